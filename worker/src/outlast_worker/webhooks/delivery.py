"""The delivery of webhooks: a handler for the queue that terminal transitions put their deliveries on."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import httpx

from outlast import Job, Queue, RetryJobError, TerminalJobError, __version__
from outlast._checks import Duration, check_several, to_ms
from outlast.codec import dump_json
from outlast.errors import ConfigurationError
from outlast.protocol import Call, Keys, calls
from outlast.queue import check_queue
from outlast.rest import _retry_after

from .addresses import Target, networks, resolve, target_of
from .signing import key_of, sign

if TYPE_CHECKING:
    from outlast_worker import JobContext, Worker

__all__ = ["SCHEDULE", "Delivery", "Webhooks"]

logger = logging.getLogger("outlast.webhooks")

SCHEDULE = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
"""Seconds between attempts, three days in all: those of the Standard Webhooks specification."""
PASSING = frozenset({408, 409, 425, 429})
"""Refusals that another attempt may mend; any other 4xx is final."""
GONE_MS = 30 * 86_400_000
"""How long a URL that answered 410 is left in peace."""
MOST_RESULT = 16 * 1024
"""Bytes of a result that a message may carry; the specification asks for less than 20 kB in all."""
MOST_WAIT = 86_400.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """What the end of a job puts on the delivery queue."""

    id: str
    """The job's."""
    queue: str
    status: str
    at: int
    """When the job ended, in ms."""
    url: str = field(repr=False)
    owner: str | None = None


Secrets = Sequence[str] | Callable[[Delivery], Sequence[str]]


class Webhooks:
    """Delivers the webhooks of queues: ``Webhooks([secret]).serve(worker, queue)``.

    Each message is signed as Standard Webhooks has it, is sent over a connection to an address that was checked,
    follows no redirect and is tried again until the receiver answers 2xx; a 4xx is final, except 408, 409, 425 and 429.
    Its id stays the same over attempts. A URL that answers 410 is left alone for 30 days, unless a delivery that is put
    back with ``outlast retry-dead`` is accepted before.

    - `secrets`: one, or during a rotation several (``whsec_…``, see `new_secret`); or a function of the `Delivery`, for
      receivers with secrets of their own.
    - `results`: a completed job's message carries its result, if that has at most 16 KiB and is still there.
    - `timeout` (20 s): of one attempt, from the look-up of the name to the status. Nothing of a body is read.
    - `schedule`: seconds between attempts, and how many there are (9 more, over three days). A receiver's Retry-After
      can make a pause longer, up to a day.
    - `hosts`: the only host names that are served, if given.
    - `allow`: networks that are served though they are not public, such as ``127.0.0.0/8`` in development.
    - `tls`: for receivers with certificates of a company's own.
    """

    def __init__(
        self,
        secrets: Secrets,
        *,
        results: bool = False,
        timeout: Duration = 20.0,
        schedule: Sequence[float] = SCHEDULE,
        hosts: Collection[str] | None = None,
        allow: Sequence[str] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not callable(secrets):
            if isinstance(secrets, str) or not secrets:
                raise ConfigurationError("secrets is a list of at least one whsec_… text; new_secret() makes one")
            for secret in secrets:
                key_of(secret)
        self._secrets = secrets
        self._results = results
        self._timeout = to_ms(timeout, "timeout", least=0.001) / 1000
        if len(schedule) > 98:
            raise ConfigurationError(f"schedule has {len(schedule)} pauses; a delivery has at most 99 attempts")
        self._schedule = tuple(to_ms(pause, "schedule", most=MOST_WAIT) / 1000 for pause in schedule)
        check_several(allow, "allow")
        check_several(hosts or (), "hosts")
        self._hosts = None if hosts is None else {host.lower() for host in hosts}
        self._allow = networks(allow)
        self._given_tls = tls

    def __repr__(self) -> str:
        return "Webhooks(…)"

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return self._given_tls or httpx.create_ssl_context()

    def serve(self, worker: Worker, *queues: Queue[Any, Any], concurrency: int = 10) -> None:
        """Have `worker` deliver the webhooks of `queues`, `concurrency` at a time for each.

        A delivery is a job on the queue ``{name}:hooks``: slow receivers hold up no other jobs, and the command shows
        it (``outlast stats``, ``outlast dead '{name}:hooks'``).
        """
        for queue in queues:
            check_queue(queue)
            hooks = Queue(
                f"{{{queue.name}}}:hooks", payload=Delivery, result=dict[str, int], timeout=self._timeout + 60
            )

            async def deliver(job: JobContext[Delivery], queue: Queue[Any, Any] = queue) -> dict[str, int]:
                return await self._deliver(job, queue)

            worker.handles(hooks, concurrency=concurrency)(deliver)

    async def _deliver(self, job: JobContext[Delivery], queue: Queue[Any, Any]) -> dict[str, int]:
        delivery, what = job.payload, f"webhook of job {job.payload.id!r}"
        try:
            status = await self._attempt(job, queue)
        except RetryJobError as error:
            if job.attempt > len(self._schedule):
                raise TerminalJobError(f"{what}, given up after {job.attempt} attempts: {error}") from error.__cause__
            pause = max(self._schedule[job.attempt - 1], min(error.retry_after or 0.0, MOST_WAIT))
            # A receiver that was away does not get everything back in the same second.
            raise RetryJobError(f"{what}: {error}", retry_after=pause * random.uniform(1.0, 1.1)) from error.__cause__
        except TerminalJobError as error:
            raise TerminalJobError(f"{what}: {error}") from error.__cause__
        logger.info("%s (%s): delivered, %d", what, delivery.status, status)
        return {"status": status}

    async def _attempt(self, job: JobContext[Delivery], queue: Queue[Any, Any]) -> int:
        delivery = job.payload
        target = target_of(delivery.url)
        if self._hosts is not None and target.host not in self._hosts:
            raise TerminalJobError(f"{target.host} is none of the hosts that are served")
        hooks, send = job._output._lease.keys, job._output._transport.send
        gone = hooks.gone(sha256(delivery.url.encode()).hexdigest())
        disabled = bool(await send(Call(("EXISTS", gone), int)))
        # One that an operator puts back with retry-dead (it has more starts than attempts) is sent all the same.
        if disabled and job.starts == job.attempt:
            raise TerminalJobError(f"{target.host} answered 410 to this URL before, which disabled it")
        record: Job[Any, Any] | None = None
        if self._results and delivery.status == "completed":
            record = await send(calls.get(Keys(hooks.tag), delivery.id, queue))
        body = message(delivery, record)
        secrets = self._secrets(delivery) if callable(self._secrets) else self._secrets
        if isinstance(secrets, str) or not secrets:
            raise TerminalJobError("secrets(delivery) gave no list with a secret, and nothing is sent unsigned")
        # The same over attempts, and no other's: receivers drop what they have seen.
        id = "msg_" + sha256(f"{delivery.queue}\n{delivery.id}\n{job.id}".encode()).hexdigest()[:32]
        now = int(time.time())
        headers = {
            "host": target.authority,
            "content-type": "application/json",
            "user-agent": f"outlast-webhooks/{__version__}",
            "webhook-id": id,
            "webhook-timestamp": str(now),
            "webhook-signature": sign(secrets, id, now, body),
        }
        try:
            async with asyncio.timeout(self._timeout):
                status, retry_after = await self._post(target, headers, body)
        except TimeoutError:
            raise RetryJobError(f"{target.host} did not answer within {self._timeout:g} s") from None
        except httpx.HTTPError as error:
            raise RetryJobError(f"the connection to {target.host} failed ({type(error).__name__})") from error
        if 200 <= status < 300:
            if disabled:
                await send(Call(("DEL", gone), int))
            return status
        said = f"{target.host} answered {status}"
        if status == 410:
            await send(Call(("SET", gone, delivery.id, "PX", str(GONE_MS)), lambda _: None))
        if 400 <= status < 500 and status not in PASSING:
            raise TerminalJobError(said + (", which disables this URL" if status == 410 else ""))
        raise RetryJobError(said, retry_after=retry_after)

    async def _post(self, target: Target, headers: dict[str, str], body: bytes) -> tuple[int, float | None]:
        addresses = (await resolve(target, self._allow))[:3]
        # A pool, and so a connection, for each attempt: one that is kept could carry the next message to an address
        # that was checked for another host. The bare transport: a client would log the URL, ask the environment for
        # proxies, which resolve names themselves, and might follow redirects.
        async with httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False) as http:
            for address in addresses:
                url = httpx.URL(
                    scheme=target.scheme, host=str(address), port=target.port, raw_path=target.path.encode()
                )
                # sni_hostname is also the name that the certificate must have.
                extensions = {"sni_hostname": target.host, "timeout": httpx.Timeout(self._timeout).as_dict()}
                request = httpx.Request("POST", url, content=body, headers=headers, extensions=extensions)
                try:
                    response = await http.handle_async_request(request)
                except httpx.ConnectError:
                    if address == addresses[-1]:
                        raise
                    continue
                await response.aclose()  # the status says it all; a body could go on for ever
                return response.status_code, _retry_after(response)
        raise RetryJobError(f"{target.host} has no address")


def message(delivery: Delivery, record: Job[Any, Any] | None) -> bytes:
    """The body. `record`: the job's, if it was asked for; one of a later life of the same id is left aside."""
    data: dict[str, Any] = {"id": delivery.id, "queue": delivery.queue, "status": delivery.status}
    ended = datetime.fromtimestamp(delivery.at / 1000, UTC)
    if record is not None and record.finished_at == ended and len((record._result or "").encode()) <= MOST_RESULT:
        with suppress(ValueError):  # a codec of the queue's own may write something else than JSON
            data["result"] = json.loads(record._result or "null")
    stamp = ended.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return dump_json({"type": f"job.{delivery.status}", "timestamp": stamp, "data": data}).encode()
