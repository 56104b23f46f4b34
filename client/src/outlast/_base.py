"""What the sync and the async client share: everything but the waiting."""

from __future__ import annotations

import json
import os
import random
from binascii import b2a_base64
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

from ._checks import check_amounts, check_count, check_id, check_priority, check_webhook, to_ms
from ._config import Address, find_address, find_namespace
from .errors import (
    ConfigurationError,
    InvalidArgumentError,
    JobCancelledError,
    JobFailedError,
    OutlastError,
    ServerError,
)
from .protocol import Call, Keys, calls
from .records import Enqueued
from .transport import is_transient

if TYPE_CHECKING:
    from ._checks import Duration
    from .bulk import Batch, NewJob
    from .events import Completed, Event, EventPage
    from .listing import JobPage, JobState
    from .protocol import Tail
    from .queue import Queue
    from .rules import RuleChanges, Rules

__all__ = ["ClientBase", "Follow", "JobsBase", "outcome", "page"]

P = TypeVar("P")
R = TypeVar("R")

BLOCK = 10.0
"""Seconds that a watcher's read waits on the server over TCP. An end that was lost is noticed that late."""
OUTAGE = 60.0
"""Seconds of nothing but faults after which a watch that had begun gives up. Its cursor resumes it."""
PAGE_LIMIT = 1000
_ALPHANUMERIC = bytes.maketrans(b"+/", b"AZ")


class ClientBase:
    """The settings of a client. Nothing is looked at before the first call."""

    def __init__(
        self,
        url: str | None,
        token: str | None,
        redis_url: str | None,
        given: Sequence[Any],
        namespace: str | None,
        read_regions: bool,
        env: Any = None,
    ) -> None:
        address = (url, token, redis_url)
        if sum(item is not None for item in (*given, *address[::2])) > 1:
            raise ConfigurationError("transport, upstash, url and redis_url each name the database; give one of them")
        self._address = address
        self._namespace = namespace
        self._env = env
        self.read_regions = read_regions

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} holds a secret and connections; make one where it is used")

    @property
    def _environment(self) -> Any:
        return os.environ if self._env is None else self._env

    def _find_address(self) -> Address:
        return find_address(*self._address, self._environment)

    @cached_property
    def _prefix(self) -> str:
        return find_namespace(self._namespace, self._environment)


class Order(NamedTuple):
    """An enqueue, ready to be sent as often as it takes: its id and nonce are fixed."""

    id: str
    call: Call[Enqueued]


def _random_id() -> str:
    """24 letters and digits, some 142 random bits: an id is no credential, but it must not be guessed either.

    Short, because the database keeps it three times, and without a sign that a URL or a command line would mind.
    """
    return b2a_base64(os.urandom(18), newline=False).translate(_ALPHANUMERIC).decode()


def stamped(answer: Enqueued, sync_token: str | None) -> Enqueued:
    return answer if sync_token is None else replace(answer, sync_token=sync_token)


class JobsBase(Generic[P, R]):
    """Arguments in, Calls out."""

    def __init__(self, client: ClientBase, queue: Queue[P, R]) -> None:
        from .queue import check_queue  # loaded by whoever declared it

        check_queue(queue)
        self.queue = queue
        """The declaration."""
        self._settings = client

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.queue.name!r})"

    @cached_property
    def _keys(self) -> Keys:
        return Keys(self._settings._prefix + self.queue.name)

    def _order(
        self,
        payload: P,
        *,
        id: str | None,
        idempotency_key: str | None,
        idempotency_ttl: Duration | None,
        priority: int,
        delay: Duration,
        max_attempts: int | None,
        timeout: Duration | None,
        expires: Duration | None,
        deadline: Duration | None,
        result_ttl: Duration | None,
        owner: str | None,
        webhook: str | None = None,
        budget: Mapping[str, float] | None = None,
        trace: str | None = None,
        schedule: tuple[str, int] | None = None,
    ) -> Order:
        queue = self.queue
        key = "" if idempotency_key is None else check_id(idempotency_key, "idempotency_key")
        if idempotency_ttl is not None and not key:
            raise InvalidArgumentError("idempotency_ttl was given without idempotency_key; give both or neither")
        key_ttl_ms = queue.idempotency_ttl_ms if idempotency_ttl is None else to_ms(idempotency_ttl, "idempotency_ttl")
        delay_ms = to_ms(delay, "delay")
        extra: list[tuple[str, str]] = []
        if owner is not None:
            extra.append(("owner", check_id(owner, "owner")))
        if max_attempts is not None:
            extra.append(("attemptsGiven", "1"))
        if timeout is not None:
            extra.append(("timeoutMs", str(to_ms(timeout, "timeout", least=0.001))))
        if result_ttl is not None:
            extra.append(("resultTtlMs", str(to_ms(result_ttl, "result_ttl", least=1))))
        if budget is not None:
            extra.append(("budget", json.dumps(check_amounts(budget, "budget"), separators=(",", ":"))))
        if trace is not None:
            extra.append(("trace", trace))
        text = queue.encode_payload(payload)
        job_id = _random_id() if id is None else check_id(id)
        if webhook is not None:
            extra.append(("webhook", self._webhook(job_id, webhook, owner)))
        call = calls.enqueue(
            self._keys,
            id=job_id,
            # What tells a repeat of this call from another one that means the same job. One's own random id does.
            nonce=os.urandom(12).hex() if id is not None or key else "",
            payload=text,
            max_attempts=queue.max_attempts
            if max_attempts is None
            else check_count(max_attempts, "max_attempts", most=1_000_000),
            priority=check_priority(priority),
            delay_ms=delay_ms,
            own_id=id is not None,
            key=key,
            key_ttl_ms=key_ttl_ms,
            payload_hash=payload_hash(text) if key else "",
            check_payload=queue.check_payload,
            expires_ms=_limit_ms(expires, "expires", delay_ms, delay),
            deadline_ms=_limit_ms(deadline, "deadline", delay_ms, delay),
            schedule=schedule,
            extra=extra,
        )
        return Order(job_id, call)

    def _webhook(self, id: str, url: str, owner: str | None) -> str:
        """What the message will be about, as the delivery queue's payload will have it; the end adds how it ended."""
        if self._keys.tag != self._keys.name:
            raise InvalidArgumentError(f"queue {self.queue.name!r} delivers webhooks itself, so its jobs have none")
        told = {"id": id, "queue": self.queue.name, "url": check_webhook(url)}
        return json.dumps(
            told if owner is None else {**told, "owner": owner}, ensure_ascii=False, separators=(",", ":")
        )

    def _get(self, id: str) -> Call[Any]:
        return calls.get(self._keys, check_id(id), self.queue)

    def _cancel(self, id: str, *, relief: bool = False) -> Call[calls.CancelAnswer]:
        return calls.cancel(self._keys, check_id(id), result_ttl_ms=self.queue.result_ttl_ms, relief=relief)

    def _retry_dead(self, id: str, max_attempts: int | None = None, keep_steps: bool = True) -> Call[bool]:
        attempts = self.queue.max_attempts if max_attempts is None else max_attempts
        return calls.retry_dead(
            self._keys,
            check_id(id),
            nonce=os.urandom(12).hex(),
            given=max_attempts is not None,
            max_attempts=check_count(attempts, "max_attempts", most=1_000_000),
            keep_steps=keep_steps,
        )

    def _usage(self, days: int) -> calls.Plan[dict[str, dict[str, float]]]:
        return calls.usage(self._keys, check_count(days, "days", most=400))

    def _rules(self) -> Call[Rules]:
        from .rules import read

        return read(self._keys)

    def _set_rules(self, given: RuleChanges) -> calls.Plan[None]:
        from .rules import changes, set_rules

        return set_rules(self._keys, changes(given))

    def _pause(self, duration: Duration | None) -> calls.Plan[None]:
        from .rules import pause

        return pause(self._keys, None if duration is None else to_ms(duration, "duration"))

    def _resume(self) -> calls.Plan[None]:
        from .rules import resume

        return resume(self._keys)

    def _dead(self, count: int) -> calls.Plan[list[str]]:
        return calls.dead(self._keys, check_count(count, "count", most=10_000))

    def _by_state(self, state: JobState, limit: int, cursor: str | None, reverse: bool) -> calls.Plan[JobPage]:
        from .listing import MAX_PAGE, check_state, page

        return page(
            self._keys, check_state(state), check_count(limit, "limit", most=MAX_PAGE), cursor=cursor, reverse=reverse
        )

    def _purge(self, state: JobState, older_than: Duration) -> calls.Plan[int]:
        from .listing import check_state, purge

        if check_state(state) == "active":
            raise InvalidArgumentError("state='active': what runs is not purged; cancel those jobs")
        return purge(
            self._keys, state, older_ms=to_ms(older_than, "older_than"), result_ttl_ms=self.queue.result_ttl_ms
        )

    def _batch(self, jobs: Iterable[P | NewJob[P]], trace: str | None) -> Batch:
        from .bulk import Batch

        return Batch(self, jobs, trace)

    def _follow(
        self,
        id: str,
        blocking: bool,
        timeout: Duration | None,
        *,
        after: str | None = None,
        poll: Duration | None = None,
        limit: int = 500,
        result_only: bool = False,
    ) -> Follow[R]:
        from .protocol import Tail

        pace = None if poll is None else to_ms(poll, "poll", least=0.01) / 1000
        blocking = blocking and pace is None
        tail = Tail(
            self._keys,
            check_id(id),
            self.queue,
            after=after,
            poll=pace,
            limit=check_count(limit, "limit", most=PAGE_LIMIT),
            read_regions=self._settings.read_regions,
            record_first=result_only,
            blocking=blocking,
        )
        seconds = None if timeout is None else to_ms(timeout, "timeout") / 1000
        return Follow(tail, blocking, seconds)


CANCELLED: frozenset[calls.CancelAnswer] = frozenset({"cancelled", "requested"})
"""Answers of cancel after which the job gives no result."""


def _limit_ms(value: Duration | None, name: str, delay_ms: int, delay: Duration) -> int | None:
    if value is None:
        return None
    ms = to_ms(value, name, least=0.001)
    if ms <= delay_ms:
        raise InvalidArgumentError(f"{name}={value!r} ends before delay={delay!r}: the job could never run; raise it")
    return ms


def payload_hash(text: str) -> str:
    """SHA-256 of a payload's canonical JSON: the order of keys and the blanks of a codec make no difference."""
    # The text of a codec of the caller's own that does not write JSON counts as it is.
    with suppress(ValueError, RecursionError):
        text = json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# -- following a job -------------------------------------------------------------------------------------------------


class Follow(Generic[R]):
    """The loop around a Tail without its I/O: the time that is left, blocking reads, faults that pass.

    A driver, while `going`, lets `_reads` answer the tail's next poll, with `pause` and `block` as they are here, and
    hands over the answer or the error.
    """

    def __init__(self, tail: Tail[R], blocking: bool, timeout: float | None) -> None:
        self.tail = tail
        self.going = True
        self.fault: OutlastError | None = None
        """What the last call failed with."""
        self._blocking = blocking
        self._deadline = None if timeout is None else monotonic() + timeout
        self._resume_at = 0.0
        self._answered = False
        self._faults = 0
        self._since = 0.0

    def _left(self) -> float:
        return BLOCK if self._deadline is None else self._deadline - monotonic()

    @property
    def pause(self) -> float:
        """Seconds to sleep before the next poll. What the caller did meanwhile counts."""
        pause = self._resume_at - monotonic()
        return max(0.0, pause if self._deadline is None else min(pause, self._left()))

    @property
    def block(self) -> float | None:
        """Seconds that the next poll may wait on the server, once the pause is over."""
        left = self._left() - self.pause
        return min(BLOCK, left) if self._blocking and self.tail.blocks and left > 0 else None

    def feed(self, reply: Any) -> list[Event[R]]:
        """The events of an answer. Raises JobNotFoundError for an unknown job."""
        now = monotonic()
        self._answered, self._faults, self.fault = True, 0, None
        events = self.tail.feed(reply)
        waits = self._blocking and self.tail.blocks
        self._resume_at = now if waits else now + self.tail.delay
        if self.tail.done:
            self.going = False
        elif self._left() <= 0 and (self.tail.delay > 0 or (waits and not events)):
            self.going = False  # out of time, and there is nothing more to be had at once
        return events

    def failed(self, error: OutlastError) -> None:
        """Survive a fault that may pass, else raise it. The transport has repeated the call already."""
        if isinstance(error, ServerError) and "max request size exceeded" in str(error) and self.tail.shrink():
            return  # Upstash's limit holds for one command's answer: ask for less at once
        now = monotonic()
        if self._faults == 0:
            self._since = now
        if not is_transient(error) or not self._answered or now - self._since > OUTAGE:
            # Before the first answer a wrong address is likelier than a short fault.
            raise error
        if self._faults == 0:
            import logging

            logging.getLogger("outlast").warning("job %r: %s; asking again for up to %g s", self.tail.id, error, OUTAGE)
        self.fault = error
        self.tail.shrink()  # on a slow link a page may be what takes too long
        if self._left() <= 0:
            self.going = False
            return
        pause = random.uniform(0.5, 1.0) * min(5.0, 0.2 * 2.0**self._faults)
        self._faults += 1
        self._resume_at = now + max(pause, getattr(error, "retry_after", None) or 0.0)


def page(follow: Follow[R], events: list[Event[R]]) -> EventPage[R]:
    from .events import EventPage

    return EventPage(events, follow.tail.cursor, follow.tail.done)


def outcome(id: str, event: Event[R]) -> Completed[R] | None:
    """A completed job's event, None for an event that ends nothing. Raises what else a job can end as."""
    from .events import Cancelled, Completed, Failed

    match event:
        case Completed():
            return event
        case Failed():
            raise JobFailedError(f"job {id!r} failed: {event.error[:500]}", id, event.error)
        case Cancelled():
            raise JobCancelledError(f"job {id!r} was cancelled", id)
        case _:
            return None


def timed_out(id: str, timeout: Duration | None) -> TimeoutError:
    return TimeoutError(f"job {id!r} had not ended after timeout={timeout!r}; it goes on, wait again for it")
