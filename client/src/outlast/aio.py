"""The client for coroutines: `client` with await. Everything that is not waiting is in `_base`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from ._base import (
    CANCELLED,
    ClientBase,
    Follow,
    JobsBase,
    outcome,
    page,
    stamped,
    timed_out,
)
from ._config import tcp_transport
from .errors import OutlastError, StoreFullError, TransportError
from .observe import enqueuing
from .protocol import calls
from .transport import AsyncTransport, adrive

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    import httpx
    import upstash_redis.asyncio

    from ._areads import AsyncReads
    from ._checks import Duration
    from .bulk import NewJob
    from .events import Event, EventPage
    from .job import Job, Stats
    from .listing import JobPage, JobState
    from .queue import Queue
    from .records import Enqueued
    from .rules import RuleChanges, Rules

__all__ = ["AsyncClient", "AsyncJobs"]

P = TypeVar("P")
R = TypeVar("R")


class AsyncClient(ClientBase):
    """A database with queues in it. Making a client does nothing; the first call looks for the address.

    The address is the first that is there: `url` and `token`, or `redis_url`; OUTLAST_REST_URL and OUTLAST_REST_TOKEN;
    UPSTASH_REDIS_REST_URL and _TOKEN; KV_REST_API_URL and _TOKEN; OUTLAST_REDIS_URL or REDIS_URL (over TCP, needs
    outlast-worker). `url` takes redis:// and rediss:// as well. Without any, the first call raises ConfigurationError.

    - `transport`: any object that sends Calls, instead of an address. Closing it stays your business.
    - `upstash`: an `upstash_redis.asyncio` client of your own, instead of an address. Give it ``rest_retries=0``.
    - `namespace`: stands in front of every queue's name, so that a preview deployment does not eat production's
      jobs. Default: OUTLAST_NAMESPACE, else nothing.
    - `read_regions`: the database has replicas that lag: an unknown job is believed to be one only after 3 s.
    - `env`: read instead of os.environ: a mapping, or an object with attributes.
    - `sync_token`: what another client's `sync_token` was after a write that this one must see.

    The rest is for HTTP only:

    - `timeout` (20 s): the longest that one call takes, repeats and their pauses included. Watching and waiting
      are many calls.
    - `allow_http`: permit a plain http:// address that is not this machine. It shows the token to the network.
    - `http_client`: an httpx client of your own (a proxy, certificates, a transport for tests), or a function that
      makes one. Closing it stays your business.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        redis_url: str | None = None,
        transport: AsyncTransport | None = None,
        upstash: upstash_redis.asyncio.Redis | None = None,
        namespace: str | None = None,
        read_regions: bool = False,
        sync_token: str | None = None,
        timeout: Duration = 20.0,
        allow_http: bool = False,
        http_client: httpx.AsyncClient | Callable[[], httpx.AsyncClient] | None = None,
        env: Any = None,
    ) -> None:
        super().__init__(url, token, redis_url, (transport, upstash), namespace, read_regions, env)
        self._given = transport
        self._upstash = upstash
        self._rest_options: dict[str, Any] = {
            "timeout": timeout,
            "sync_token": sync_token,
            "allow_http": allow_http,
            "http_client": http_client,
        }

    @classmethod
    def from_env(cls, env: Any, *, namespace: str | None = None, read_regions: bool = False) -> AsyncClient:
        """A client that reads `env` instead of os.environ: a mapping, or an object with attributes (Cloudflare)."""
        return cls(env=env, namespace=namespace, read_regions=read_regions)

    @cached_property
    def _transport(self) -> AsyncTransport:
        if self._given is not None:
            return self._given
        if self._upstash is not None:
            from .upstash import AsyncUpstashTransport

            return AsyncUpstashTransport(self._upstash)
        address = self._find_address()
        if address.token is None:
            made: AsyncTransport = tcp_transport("AsyncTcpTransport", address.url)
            return made
        from .rest import AsyncRestTransport

        return AsyncRestTransport(address.url, address.token, **self._rest_options)

    @cached_property
    def _reads(self) -> AsyncReads:
        from ._areads import AsyncReads

        return AsyncReads(self._transport)

    @property
    def sync_token(self) -> str | None:
        """Upstash's read-your-writes token after the latest call; None elsewhere. Give it to another client."""
        return self._transport.sync_token

    def queue(self, queue: Queue[P, R]) -> AsyncJobs[P, R]:
        """The jobs of a declared queue in this database."""
        return AsyncJobs(self, queue)

    async def aclose(self) -> None:
        """Give the connections back. A later call opens new ones."""
        if "_reads" in self.__dict__:
            await self._reads.aclose()
        if "_transport" in self.__dict__ and self._given is None:
            await self._transport.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


class AsyncJobs(JobsBase[P, R]):
    """The jobs of one queue.

    Every method can raise TransportError (no answer; calling again is safe), ServerError and its kinds (the database
    refused) and InvalidArgumentError (nothing was sent).
    """

    def __init__(self, client: AsyncClient, queue: Queue[P, R]) -> None:
        super().__init__(client, queue)
        self._client = client

    @property
    def _transport(self) -> AsyncTransport:
        return self._client._transport

    async def enqueue(
        self,
        payload: P,
        *,
        id: str | None = None,
        idempotency_key: str | None = None,
        idempotency_ttl: Duration | None = None,
        priority: int = 0,
        delay: Duration = 0.0,
        max_attempts: int | None = None,
        timeout: Duration | None = None,
        expires: Duration | None = None,
        deadline: Duration | None = None,
        result_ttl: Duration | None = None,
        owner: str | None = None,
        webhook: str | None = None,
        budget: Mapping[str, float] | None = None,
    ) -> Enqueued:
        """Make a job, or with an `idempotency_key` that a job holds already, answer with that job.

        - `id`: your own instead of a random one. It may be used again once its job has finished; before that,
          JobInUseError.
        - `idempotency_key`: held while the job lives and for `idempotency_ttl` after it completes, though never longer
          than the record; freed when the job fails or is cancelled. Used with another payload it raises
          IdempotencyConflictError, unless the queue was declared with check_payload=False.
        - `priority`: 0 to 9, 9 first; jobs of one priority run in the order they came.
        - `delay`: seconds until the job may start, at most a year.
        - `max_attempts`, `timeout`, `result_ttl`: as declared on the queue, here for this job.
        - `expires`: seconds within which the first attempt must start, else the job fails. `deadline`: within which the
          job must end.
        - `owner`: whose job this is, for `authorize` of outlast-edge.
        - `webhook`: an https URL that is told when the job has ended. The worker delivers it: see
          `outlast_worker.webhooks`.
        - `budget`: lowers the queue's for this job, and adds limits of its own: ``{"cost": 0.1}``.

        A lost reply is asked for again and makes no second job. If the answer stays away, TransportError carries
        `job_id`, the id that the job has if it was made.
        """
        with enqueuing(self.queue.name) as observed:
            order = self._order(
                payload,
                id=id,
                idempotency_key=idempotency_key,
                idempotency_ttl=idempotency_ttl,
                priority=priority,
                delay=delay,
                max_attempts=max_attempts,
                timeout=timeout,
                expires=expires,
                deadline=deadline,
                result_ttl=result_ttl,
                owner=owner,
                webhook=webhook,
                budget=budget,
                trace=observed.trace,
            )
            try:
                answer = await self._transport.send(order.call)
            except TransportError as error:
                error.job_id = order.id
                raise
            observed.answered(answer)
        return stamped(answer, self._transport.sync_token)

    async def enqueue_many(self, jobs: Iterable[P | NewJob[P]]) -> list[Enqueued]:
        """Make many jobs at once: payloads, or `NewJob`s where one needs options. The answers are in their order.

        A thousand small jobs are one round trip; more, and larger ones, are several. At most 10,000 a call. Each job is
        made or refused by itself, as `enqueue` would: a queue's consumers see the first while the last is on its way.

        All are checked before anything is written: InvalidArgumentError names the first that is wrong. If the database
        then refuses one, the others are made all the same, and BulkEnqueueError says at the end what became of each.
        A lost reply is asked for again and makes no second job.
        """
        with enqueuing(self.queue.name) as observed:
            batch = self._batch(jobs, observed.trace)
            while calls := batch.next():
                try:
                    batch.answered(await self._transport.send_many(calls, outcomes=True))
                except TransportError as error:
                    batch.failed(error)
            for answer in batch.made:
                observed.answered(answer)
            return batch.result(self._transport.sync_token)

    async def get(self, id: str) -> Job[P, R] | None:
        """The job's record now, or None: the id is unknown, or the record has expired."""
        job: Job[P, R] | None = await self._transport.send(self._get(id))
        return job

    async def cancel(self, id: str) -> bool:
        """Stop a job. True if it will not produce a result, also when it was cancelled before.

        A job that has not started is over at once; of a running one the worker learns at once, and its handler is
        interrupted. False: it has completed or failed already, or is unknown.
        """
        try:
            answer = await self._transport.send(self._cancel(id))
        except StoreFullError:
            # Stopping work frees memory, so a full database must not stand in its way.
            answer = await self._transport.send(self._cancel(id, relief=True))
        return answer in CANCELLED

    def watch(
        self,
        id: str,
        *,
        after: str | None = None,
        poll: Duration | None = None,
        timeout: Duration | None = None,
    ) -> AsyncGenerator[Event[R], None]:
        """The job's events in order, ending with the terminal one. The events come as the job makes them.

        - `after`: the id of the last event that you have, None for all, "latest" for only what is still to come.
        - `poll`: seconds between reads. By default over HTTP 0.15 after data, rising to 0.6, and to 2 once nothing
          came for 10 s; over TCP a read waits on the server. All watches of this client are read for together, so
          events may come sooner than asked for.
        - `timeout`: seconds after which the iteration ends quietly, so that you can resume after the last event.

        Faults that pass are survived for up to 60 s. Raises JobNotFoundError for an unknown job.
        """
        return self._watch(self._follow(id, self._transport.blocking, timeout, after=after, poll=poll))

    async def _watch(self, follow: Follow[R]) -> AsyncGenerator[Event[R], None]:
        while follow.going:
            for event in await self._turn(follow):
                yield event

    async def events(
        self,
        id: str,
        *,
        after: str | None = None,
        limit: int = 500,
        wait: Duration = 0.0,
    ) -> EventPage[R]:
        """One page of at most `limit` events after the cursor `after`, for functions that may not loop.

        `wait`: seconds to wait for the first one. Ask again with ``after=page.next`` until ``page.done``. Raises
        JobNotFoundError for an unknown job.
        """
        follow = self._follow(id, self._transport.blocking, wait, after=after, limit=limit)
        while follow.going:
            if events := await self._turn(follow):
                return page(follow, events)
        return page(follow, [])

    async def wait(self, id: str, *, timeout: Duration | None = None, poll: Duration | None = None) -> R:
        """The job's result, once it has one. `poll`: seconds between looks, by default as in watch.

        Raises JobFailedError, JobCancelledError, JobNotFoundError, or TimeoutError after `timeout` seconds.
        """
        follow = self._follow(id, self._transport.blocking, timeout, poll=poll, result_only=True)
        while follow.going:
            for event in await self._turn(follow):
                if done := outcome(id, event):
                    return done.result
        raise timed_out(id, timeout) from follow.fault

    async def _turn(self, follow: Follow[R]) -> list[Event[R]]:
        try:
            reply = await self._client._reads.ask(follow.tail, pause=follow.pause, block=follow.block)
        except OutlastError as error:
            follow.failed(error)
            return []
        return follow.feed(reply)

    async def stats(self) -> Stats:
        """How many jobs are waiting, scheduled, active and dead, and since when the oldest one waits."""
        return await adrive(self._transport, calls.stats(self._keys))

    async def rules(self) -> Rules:
        """The queue's rules in the database, its pauses among them."""
        return await self._transport.send(self._rules())

    async def set_rules(self, **changes: Unpack[RuleChanges]) -> None:
        """Set rules of the queue: of all its producers and workers, over what their code declares.

        See `Rules` for what there is; None removes a rule, and what is left out stays. Running workers obey from their
        next take on. `max_payload` is at least 16 KiB.
        """
        await adrive(self._transport, self._set_rules(changes))

    async def pause(self, duration: Duration | None = None) -> None:
        """Let workers take no more jobs of this queue, for `duration` seconds or until resume(). What runs goes on.

        A pause never shortens one that is set.
        """
        await adrive(self._transport, self._pause(duration))

    async def resume(self) -> None:
        """End every pause of the queue, those that providers asked for too. Idle workers learn of it at once."""
        await adrive(self._transport, self._resume())

    async def usage(self, days: int = 30) -> dict[str, dict[str, float]]:
        """What the queue's jobs used on each of the last `days` on which they did: 2026-11-30 (UTC) to counters.

        Counted when an attempt ends, and kept for 400 days.
        """
        return await adrive(self._transport, self._usage(days))

    async def by_state(
        self, state: JobState, *, limit: int = 50, cursor: str | None = None, reverse: bool = False
    ) -> JobPage:
        """One page of at most `limit` jobs, 1 to 100, that are in a state now, without their payloads.

        - `state`: "waiting", in the order in which they will run; "scheduled", by the time when they are due (delayed
          jobs, and failed ones before their next attempt); "active", by the end of their lease; "dead", by the time
          when they failed for good. Of completed and cancelled jobs the database has no list: ask for one by its id.
        - `cursor`: the `next` of the page before. It is None on the last page.
        - `reverse`: from the other end: the jobs that died last come first.

        A page costs limit + 1 commands; at most 50 more where very many jobs share the moment at which it begins.
        Pages miss no job that stays where it is; one that moves meanwhile may be on two pages or on none. A page can
        have fewer jobs than `limit`, or none, and still a `next`: what has just left the state is left out.
        """
        return await adrive(self._transport, self._by_state(state, limit, cursor, reverse))

    async def dead(self, count: int = 50) -> list[str]:
        """Ids of at most `count` jobs that failed for good and are still kept, oldest first."""
        return await adrive(self._transport, self._dead(count))

    async def purge(self, state: JobState, *, older_than: Duration = 0.0) -> int:
        """Empty a state of the jobs that are in it now, a hundred a round trip; others go on meanwhile. How many.

        - "waiting" and "scheduled": the jobs are cancelled, as by `cancel`: watchers and webhooks are told, keys are
          freed, records stay for the result TTL. What a worker takes before its turn to be cancelled runs on.
        - "dead": the jobs are forgotten, with their output and steps. Nothing is left to retry or to look at.
        - `older_than`: seconds since they were made, or died.

        Calling again after an error goes on where it ended. After a lost reply the number may be a batch too low.
        """
        return await adrive(self._transport, self._purge(state, older_than))

    async def retry_dead(self, id: str, *, max_attempts: int | None = None, keep_steps: bool = True) -> bool:
        """Put a job that failed for good back to work, with a fresh count of attempts. False: it is not dead.

        Its output starts over: watchers get `Restarted`. `max_attempts`: by default the queue's. `keep_steps`: do not
        run the steps again that it had finished.
        """
        return await self._transport.send(self._retry_dead(id, max_attempts, keep_steps))
