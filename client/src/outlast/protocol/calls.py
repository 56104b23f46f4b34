"""One function per operation, each of which returns a `Call`: what to send and how to read the answer.

Everything here is pure. Arguments are checked by the callers (client, worker); times are milliseconds. `now` moves
the clock in tests; without it the scripts use the server's. What workers send is in `holding.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from .._checks import is_dict
from ..errors import IdempotencyConflictError, InvalidArgumentError, JobInUseError, ReplyShapeError
from ..records import Enqueued
from .keys import LARGE, RANK, Keys
from .scripts import Script
from .wire import flag, items, maybe_text, moment, number, one_of, real, table, text, when

if TYPE_CHECKING:
    from ..job import Job, Stats
    from ..queue import Queue
    from ..records import JobStatus

__all__ = [
    "CLOCK",
    "LIVE",
    "Call",
    "Plan",
    "amounts_of",
    "cancel",
    "dead",
    "enqueue",
    "get",
    "heard",
    "make_room",
    "purge_dead",
    "retry_dead",
    "stats",
    "status_of",
    "told",
    "usage",
    "workers",
]

T = TypeVar("T")

CTL_TTL_MS = 600_000
"""How long a pushed cancel waits for its worker; a worker that slow learns of it at its next heartbeat instead."""
STEPS_TTL_MS = 30 * 86_400_000
"""How long the steps of an unfinished job are kept after the last one was: longer than waits and retries may last."""


@dataclass(frozen=True, slots=True, repr=False)
class Call(Generic[T]):
    """One command. With a `script`, `args` are what follows the digest in EVALSHA: numkeys, KEYS, ARGV.

    `decode` turns the raw reply (bytes or str, int, None, lists of these) into the answer, or raises the error that
    a refusal stands for. `replayable`: may be sent again when the reply was lost, because a repeat changes nothing.
    `prompt`: whoever sends it deals with a lost reply, and would rather do so than wait.
    """

    args: tuple[str, ...]
    decode: Callable[[Any], T]
    script: Script | None = None
    replayable: bool = True
    prompt: bool = False

    def command(self, *, source: bool = False, locking: bool = False) -> tuple[str, ...]:
        """The command to send: EVALSHA, or EVAL with the script's text when the server does not know it.

        `locking`: the server may know Upstash's flag for scripts that need no more than their own keys locked.
        """
        script = self.script
        if script is None:
            return self.args
        locking = locking and script.locks_keys
        if source:
            return ("EVAL", script.locking_source if locking else script.source, *self.args)
        return ("EVALSHA", script.locking_sha if locking else script.sha, *self.args)

    def __repr__(self) -> str:
        # Arguments hold payloads and results: they must not appear in a log or a traceback.
        return f"Call({self.script.name if self.script else self.args[0]})"


Plan = Generator[list[Call[Any]], list[Any], T]
"""An operation of several dependent reads: yields the calls of one pipeline, is sent their answers, returns T."""


def _clock(value: Any) -> int:
    seconds, micros = items(value)
    return number(seconds) * 1000 + number(micros) // 1000


CLOCK: Call[int] = Call(("TIME",), _clock)
"""The server's clock, in ms."""


# -- producers -----------------------------------------------------------------------------------------------------

_ENQUEUE = Script(
    "enqueue",
    "job signal lane seq? events? dead? steps? idem? config? schedules?",
    "now id nonce payload max_attempts priority delay_ms own key key_ttl_ms hash expires_ms deadline_ms "
    "schedule due extra...",
)


def enqueue(
    keys: Keys,
    *,
    id: str,
    nonce: str,
    payload: str,
    max_attempts: int,
    priority: int = 0,
    delay_ms: int = 0,
    own_id: bool = False,
    key: str = "",
    key_ttl_ms: int,
    payload_hash: str = "",
    check_payload: bool = True,
    expires_ms: int | None = None,
    deadline_ms: int | None = None,
    schedule: tuple[str, int] | None = None,
    extra: Sequence[tuple[str, str]] = (),
    now: int | None = None,
) -> Call[Enqueued]:
    """Make a job. `id` and `nonce` are minted once per call, so that a repeat of the same call is recognised.

    Without a key, an id that was drawn at random is enough, and the nonce empty: the record need not keep one.

    `own_id`: the caller chose the id, so that it may have been used before. `extra` are added record fields.
    `schedule`: the name of one, and when it is due: the run is made once, and none for an earlier time after it.
    """
    names = [keys.job(id), keys.signal]
    names += [keys.scheduled] if delay_ms > 0 else [keys.ready, keys.seq]
    if own_id:
        names += [keys.events(id), keys.dead, keys.steps(id)]
    if key:
        names.append(keys.idem(key))
        if payload_hash:
            extra = (*extra, ("payloadHash", payload_hash))
    if len(payload) > LARGE or (not payload.isascii() and len(payload.encode()) > LARGE):
        names.append(keys.config)
    if schedule is not None:
        names.append(keys.schedules)

    def decode(reply: Any) -> Enqueued:
        match items(reply):
            case [code, value]:
                answer = text(value)
                match text(code):
                    case "created":
                        return Enqueued(answer, False)
                    case "duplicate":
                        return Enqueued(answer, True)
                    case "conflict":
                        raise IdempotencyConflictError(
                            f"idempotency_key={key!r} belongs to job {answer!r}, which has another payload; "
                            "use a new key for new work",
                            answer,
                        )
                    case "in_use":
                        raise JobInUseError(
                            f"id={id!r} is a job that is still {answer}; cancel it or wait for its end, "
                            "or leave the id out",
                            id,
                        )
                    case "too_large":
                        raise InvalidArgumentError(
                            f"the payload has more bytes of JSON than queue {keys.name!r} allows, {answer}: store it "
                            "elsewhere and pass a reference, or raise the limit (outlast queue set --max-payload)"
                        )
                    case _:
                        pass
            case _:
                pass
        raise ReplyShapeError("enqueue answered with something else than a code and an id")

    return Call(
        (
            str(len(names)),
            *names,
            moment(now),
            id,
            nonce,
            payload,
            str(max_attempts),
            str(priority),
            str(delay_ms),
            flag(own_id),
            key,
            str(key_ttl_ms),
            payload_hash if check_payload else "",
            "" if expires_ms is None else str(expires_ms),
            "" if deadline_ms is None else str(deadline_ms),
            *(("", "") if schedule is None else (schedule[0], str(schedule[1]))),
            *(part for pair in extra for part in pair),
        ),
        decode,
        _ENQUEUE,
    )


CancelAnswer = Literal["cancelled", "requested", "finished", "unknown", "kept"]

_CANCEL = Script(
    "cancel", "job events ready scheduled config absent", "now id result_ttl_ms base relief ctl_ttl_ms before"
)


def cancel(
    keys: Keys,
    id: str,
    *,
    result_ttl_ms: int,
    relief: bool = False,
    before_ms: int | None = None,
    now: int | None = None,
) -> Call[CancelAnswer]:
    """Cancel a job. `relief`: the call before was refused for lack of memory.

    With `before_ms` a job that runs or was made later than that is kept.
    """
    return Call(
        (
            "6",
            keys.job(id),
            keys.events(id),
            keys.ready,
            keys.scheduled,
            keys.config,
            keys.absent,
            moment(now),
            id,
            str(result_ttl_ms),
            keys.base,
            flag(relief),
            str(CTL_TTL_MS),
            "" if before_ms is None else str(before_ms),
        ),
        cast("Callable[[Any], CancelAnswer]", one_of("cancelled", "requested", "finished", "unknown", "kept")),
        _CANCEL,
    )


_PURGE_DEAD = Script("purge_dead", "dead absent", "base before")


def purge_dead(keys: Keys, before_ms: int) -> Call[int]:
    """Forget dead jobs that died no later than that; the answer is how many. 100: call again."""
    return Call(("2", keys.dead, keys.absent, keys.base, str(before_ms)), number, _PURGE_DEAD)


_RETRY_DEAD = Script(
    "retry_dead", "job events dead ready seq signal steps", "now id nonce max_attempts steps_ttl_ms given"
)


def retry_dead(
    keys: Keys,
    id: str,
    *,
    nonce: str,
    max_attempts: int,
    given: bool = False,
    keep_steps: bool = True,
    now: int | None = None,
) -> Call[bool]:
    """Put a dead job back. True exactly for the call that did it, and for repeats of that call.

    `given`: the caller named `max_attempts`, so that no rule of the queue replaces it.
    """
    names = (keys.job(id), keys.events(id), keys.dead, keys.ready, keys.seq, keys.signal, keys.steps(id))
    known = one_of("waiting", "not_dead")
    return Call(
        ("7", *names, moment(now), id, nonce, str(max_attempts), str(STEPS_TTL_MS if keep_steps else 0), flag(given)),
        lambda reply: known(reply) == "waiting",
        _RETRY_DEAD,
    )


# -- readers (no scripts: Upstash's read-only token may not run any) --------------------------------------------------

INFO = (
    "id",
    "status",
    "error",
    "attempt",
    "starts",
    "maxAttempts",
    "progress",
    "priority",
    "createdAt",
    "updatedAt",
    "startedAt",
    "finishedAt",
    "idempotencyKey",
    "cancelRequested",
    "owner",
    "usage",
)
"""Fields of a record that say how the job does. They are small."""
_RECORD: tuple[str, ...] = (*INFO, "payload", "result")
_STATUSES = frozenset({"waiting", "scheduled", "active", "completed", "failed", "cancelled"})

P = TypeVar("P")
R = TypeVar("R")


def status_of(value: Any) -> JobStatus:
    """A status that this version does not know reads as waiting, as a missing one does (wire rule)."""
    status = maybe_text(value) or "waiting"
    return cast("JobStatus", status if status in _STATUSES else "waiting")


def amounts_of(value: str | None) -> dict[str, float]:
    """Counters by name, of a stored JSON text. What is no number is left out: readers must not fail on it."""
    if not value:
        return {}
    with suppress(ValueError, RecursionError):
        stored = json.loads(value)
        if is_dict(stored):
            return {
                str(name): n for name, n in stored.items() if isinstance(n, (int, float)) and not isinstance(n, bool)
            }
    return {}


def told(id: str, r: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `JobInfo`, from those of a record."""
    attempt = number(r["attempt"])
    return {
        "id": id,
        "status": status_of(r["status"]),
        "error": maybe_text(r["error"]),
        "attempt": attempt,
        "starts": number(r["starts"], attempt),
        "max_attempts": number(r["maxAttempts"], 1),
        "progress": real(r["progress"]),
        "priority": number(r["priority"]),
        "created_at": when(r["createdAt"]),
        "updated_at": when(r["updatedAt"]),
        "started_at": when(r["startedAt"]),
        "finished_at": when(r["finishedAt"]),
        "idempotency_key": maybe_text(r["idempotencyKey"]) or None,
        "cancel_requested": maybe_text(r["cancelRequested"]) == "1",
        "owner": maybe_text(r["owner"]),
        "usage": amounts_of(maybe_text(r["usage"])),
    }


def get(keys: Keys, id: str, queue: Queue[P, R]) -> Call[Job[P, R] | None]:
    """The record, or None. A hash without an id is no record."""
    from ..job import Job

    def decode(reply: Any) -> Job[P, R] | None:
        row = items(reply)
        if len(row) != len(_RECORD):
            raise ReplyShapeError("the record's reply has another length than asked for")
        r = dict(zip(_RECORD, row, strict=True))
        if r["id"] is None:
            return None
        return Job(
            **told(id, r),
            _queue=queue,
            _payload=maybe_text(r["payload"]),
            _result=maybe_text(r["result"]),
        )

    return Call(("HMGET", keys.job(id), *_RECORD), decode)


def stats(keys: Keys) -> Plan[Stats]:
    """Counts, and the age of the oldest waiting job: the head of each priority's band is its oldest."""
    from ..job import Stats

    bands = [
        Call(
            ("ZRANGEBYSCORE", keys.ready, str(band * RANK), f"({(band + 1) * RANK}", "LIMIT", "0", "1"),
            items,
        )
        for band in range(10)
    ]
    counts = [Call(("ZCARD", key), number) for key in (keys.ready, keys.scheduled, keys.leases, keys.dead)]
    answers = yield [*counts, CLOCK, *bands]
    heads = [text(head[0]) for head in answers[5:] if head]
    oldest: float | None = None
    if heads:
        since = yield [
            Call(("HMGET", keys.job(id), "updatedAt"), lambda reply: number(items(reply)[0])) for id in heads
        ]
        times = [ms for ms in since if ms > 0]
        oldest = max(0, answers[4] - min(times)) / 1000 if times else None
    waiting, scheduled, active, gone = answers[:4]
    return Stats(waiting, scheduled, active, gone, oldest)


def usage(keys: Keys, days: int) -> Plan[dict[str, dict[str, float]]]:
    """What was used on each of the last `days` (UTC, today included) on which anything was, oldest first."""
    [now] = yield [CLOCK]
    names = [str(datetime.fromtimestamp(now // 1000 - 86_400 * ago, UTC).date()) for ago in range(days - 1, -1, -1)]
    totals = yield [Call(("HGETALL", keys.usage(name)), _amounts) for name in names]
    return {name: total for name, total in zip(names, totals, strict=True) if total}


def _amounts(reply: Any) -> dict[str, float]:
    return amounts_of("{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in table(reply).items()) + "}")


def dead(keys: Keys, count: int) -> Plan[list[str]]:
    """Ids of dead-lettered jobs that still exist, oldest first."""
    found: list[str] = []
    start = 0
    while len(found) < count:
        [page] = yield [
            Call(
                ("ZRANGE", keys.dead, str(start), str(start + count - 1)),
                lambda reply: [text(item) for item in items(reply)],
            )
        ]
        if not page:
            break
        # Not EXISTS: the record can have expired, and its id been used again.
        states = yield [
            Call(("HMGET", keys.job(id), "status"), lambda reply: maybe_text(items(reply)[0])) for id in page
        ]
        found += [id for id, status in zip(page, states, strict=True) if status == "failed"]
        start += len(page)
    return found[:count]


def make_room(keys: Keys) -> list[Call[None]]:
    """Wake one of the workers that wait for a limit; if it does not need the room, it wakes the next."""
    return [
        Call(("LPUSH", keys.room, "1"), lambda _: None),
        Call(("LTRIM", keys.room, "0", "0"), lambda _: None),
    ]


def workers(keys: Keys) -> Call[dict[str, str]]:
    """Worker id to what it said of itself when last seen. Entries of workers that died stay until pruned."""
    return Call(("HGETALL", keys.workers), table)


LIVE = 150_000
"""ms for which a worker counts as alive after a sign of life; it gives one every two minutes at least."""


def heard(said: Mapping[str, str], now: int) -> dict[str, dict[str, Any]]:
    """The answer of `workers`, read, with `seen`: ms since it was said. Other implementations' words are left out."""
    found: dict[str, dict[str, Any]] = {}
    for id, info in said.items():
        with suppress(ValueError, TypeError, KeyError):
            told: Any = json.loads(info)
            found[id] = {**told, "seen": max(0, now - told["at"])}
    return found
