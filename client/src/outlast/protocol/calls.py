"""One function per operation, each of which returns a `Call`: what to send and how to read the answer.

Everything here is pure. Arguments are checked by the callers (client, worker); times are milliseconds. `now` moves
the clock in tests; without it the scripts use the server's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, cast

from .._checks import is_dict
from ..errors import IdempotencyConflictError, InvalidArgumentError, JobInUseError, ReplyShapeError
from ..records import Enqueued
from .keys import LARGE, RANK, Keys
from .scripts import Script

if TYPE_CHECKING:
    from ..job import Job, Stats
    from ..queue import Queue
    from ..records import JobStatus

__all__ = [
    "CLOCK",
    "LIVE",
    "Call",
    "Plan",
    "Reservation",
    "Reserved",
    "Terms",
    "Used",
    "admit",
    "cancel",
    "dead",
    "enqueue",
    "flush",
    "get",
    "glance",
    "heard",
    "make_room",
    "prune_dead",
    "purge_dead",
    "release",
    "renew",
    "reserve",
    "retry",
    "retry_dead",
    "seen",
    "settle",
    "stats",
    "step",
    "steps",
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


# -- reading replies -----------------------------------------------------------------------------------------------


def text(value: Any) -> str:
    """A reply string. Bytes that are not UTF-8 (a foreign writer's) become U+FFFD rather than an error."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise ReplyShapeError(f"expected text in the reply, got {type(value).__name__}")


def exact_text(value: Any) -> str:
    """As `text`, but bytes that are not UTF-8 become halves of surrogate pairs, which no encoder takes for text."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else text(value)


def maybe_text(value: Any) -> str | None:
    return None if value is None else text(value)


def number(value: Any, default: int = 0) -> int:
    """A stored number: benni may write 1.8e12 where an integer is meant."""
    if value is None or value == b"" or value == "":
        return default
    try:
        return int(value)
    except ValueError:
        try:
            return int(float(value))
        except (ValueError, OverflowError):
            return default


def items(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(cast("Sequence[Any]", value))
    raise ReplyShapeError(f"expected a list in the reply, got {type(value).__name__}")


def table(value: Any) -> dict[str, str]:
    """Of a reply that has fields and values in turn."""
    flat = [text(item) for item in items(value)]
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _clock(value: Any) -> int:
    seconds, micros = items(value)
    return number(seconds) * 1000 + number(micros) // 1000


CLOCK: Call[int] = Call(("TIME",), _clock)
"""The server's clock, in ms."""


def when(value: Any) -> datetime | None:
    ms = number(value, -1)
    if ms < 0:
        return None
    try:
        return datetime.fromtimestamp(ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _word(*known: str) -> Callable[[Any], str]:
    def decode(reply: Any) -> str:
        word = text(reply)
        if word not in known:
            raise ReplyShapeError(f"expected one of {', '.join(known)} in the reply")
        return word

    return decode


def _now(now: int | None) -> str:
    return "" if now is None else str(now)


def _flag(value: bool) -> str:
    return "1" if value else "0"


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
            _now(now),
            id,
            nonce,
            payload,
            str(max_attempts),
            str(priority),
            str(delay_ms),
            _flag(own_id),
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
            _now(now),
            id,
            str(result_ttl_ms),
            keys.base,
            _flag(relief),
            str(CTL_TTL_MS),
            "" if before_ms is None else str(before_ms),
        ),
        cast("Callable[[Any], CancelAnswer]", _word("cancelled", "requested", "finished", "unknown", "kept")),
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
    known = _word("waiting", "not_dead")
    return Call(
        ("7", *names, _now(now), id, nonce, str(max_attempts), str(STEPS_TTL_MS if keep_steps else 0), _flag(given)),
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


def _float(value: Any) -> float:
    try:
        return float(text(value)) if value is not None else 0.0
    except ValueError:
        return 0.0


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
        "progress": _float(r["progress"]),
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


# -- workers -------------------------------------------------------------------------------------------------------


@dataclass(slots=True, repr=False)
class Reserved:
    """A job that was taken, as its holder needs it. `b` and `n` number its events: the next one is ``b-(n+1)``."""

    id: str
    payload: str
    attempt: int
    max_attempts: int
    priority: int
    created_at_ms: int
    starts: int
    gen: str
    b: str
    n: int
    rank: str
    key: str
    timeout_ms: int | None
    deadline_at_ms: int | None
    expires_at_ms: int | None
    result_ttl_ms: int | None
    owner: str | None
    trace: str | None
    usage: str
    counted: str
    budget: str
    token: str

    def __repr__(self) -> str:
        return f"Reserved(id={self.id!r}, attempt={self.attempt})"


class Terms(NamedTuple):
    """What the queue's rules say to workers. None: there is no such rule."""

    lease_ms: int | None = None
    timeout_ms: int | None = None
    result_ttl_ms: int | None = None
    max_payload: int | None = None
    concurrency: int | None = None
    owner_cap: int | None = None


Limited = Literal["", "paused", "rate", "room"]


class Reservation(NamedTuple):
    """The answer of reserve. `hint_ms`: until something becomes due; 0 call again; -1 nothing is known.

    `limited`: why nothing more may be taken, so that the doorbell means nothing: until the hint has passed (paused,
    rate), or a job anywhere has ended (room). `terms`: None says nothing new. `stale`: the request came later than it
    allowed itself and took nothing.
    """

    jobs: list[Reserved]
    hint_ms: float
    limited: Limited
    server_now_ms: int
    terms: Terms | None = None
    stale: bool = False


def glance(keys: Keys) -> list[Call[Any]]:
    """When what is first in scheduled and in leases is due, in ms (or never), and how many jobs are ready.

    Three commands, for who expects to find nothing: a reserve that does is six.
    """

    def score(reply: Any) -> float:
        found = items(reply)
        return _float(found[1]) if found else inf

    first = ("0", "0", "WITHSCORES")
    return [
        Call(("ZRANGE", keys.scheduled, *first), score),
        Call(("ZRANGE", keys.leases, *first), score),
        Call(("ZCARD", keys.ready), number),
    ]


_RESERVE = Script(
    "reserve",
    "ready scheduled leases signal seq take config dead room watch absent",
    "now token k lease_ms again stale_at grace_ms result_ttl_ms dead_ttl_ms bell base max_bytes was_limited",
)


def grace_ms(lease_ms: int) -> int:
    """How long a lease must stay lapsed before it is taken: 1 s, at most a third of the lease."""
    return min(1000, lease_ms // 3)


def reserve(
    keys: Keys,
    *,
    worker: str,
    request: int,
    line: int = 0,
    k: int,
    lease_ms: int,
    result_ttl_ms: int,
    dead_ttl_ms: int,
    again: bool = False,
    stale_at_ms: int | None = None,
    bell: bool = False,
    limited: Limited = "",
    grace: int | None = None,
    max_bytes: int = 6 * 1024 * 1024,
    now: int | None = None,
) -> Call[Reservation]:
    """Take up to `k` jobs (0: only promote and reclaim) under the token ``worker:request``.

    At most 100 are taken; if more were asked for and more may be had, the hint is 0. A send that may arrive late
    carries `stale_at_ms` on the server's clock. A repeat of a request whose reply was lost has the same `request` and
    `again`, waits until that time has passed, and carries a new one: it takes jobs if the first send took none.
    `limited` is what this worker's last reservation said. `line` tells two requests apart that are under way at once.
    """
    token = f"{worker}:{request}"
    names = (
        keys.ready,
        keys.scheduled,
        keys.leases,
        keys.signal,
        keys.seq,
        keys.take(f"{worker}+{line}" if line else worker),
        keys.config,
        keys.dead,
        keys.room,
        keys.watch,
        keys.absent,
    )

    def optional(value: Any) -> int | None:
        return number(value) if value not in (b"", "", None) else None

    def job(row: list[Any]) -> Reserved:
        row = row + [""] * (21 - len(row))
        return Reserved(
            id=text(row[0]),
            payload=exact_text(row[1]),
            attempt=number(row[2]),
            max_attempts=number(row[3], 1),
            priority=number(row[4]),
            created_at_ms=number(row[5]),
            starts=number(row[6]),
            gen=text(row[7]),
            b=text(row[8]),
            n=number(row[9]),
            rank=text(row[10]),
            key=text(row[11]),
            timeout_ms=optional(row[12]),
            deadline_at_ms=optional(row[13]),
            expires_at_ms=optional(row[14]),
            result_ttl_ms=optional(row[15]),
            owner=text(row[16]) or None,
            trace=text(row[17]) or None,
            usage=text(row[18]),
            counted=text(row[19]),
            budget=text(row[20]),
            token=token,
        )

    def decode(reply: Any) -> Reservation:
        match items(reply):
            case [code, at, hint, why, rules, *jobs] if text(code) == "ok" and text(why) in _LIMITED:
                return Reservation(
                    [job(items(row)) for row in jobs],
                    float(text(hint)),
                    _LIMITED[text(why)],
                    number(at),
                    Terms(*(optional(rule) for rule in items(rules))) if rules else None,
                )
            case [code, at] if text(code) == "stale":
                return Reservation([], 0, "", number(at), stale=True)
            case _:
                raise ReplyShapeError("reserve answered with something else than jobs")

    return Call(
        (
            str(len(names)),
            *names,
            _now(now),
            token,
            str(k),
            str(lease_ms),
            _flag(again),
            "" if stale_at_ms is None else str(stale_at_ms),
            str(grace_ms(lease_ms) if grace is None else grace),
            str(result_ttl_ms),
            str(dead_ttl_ms),
            _flag(bell),
            keys.base,
            str(max_bytes),
            limited or "0",
        ),
        decode,
        _RESERVE,
        # A bare resend could take a second batch; the worker repeats by itself, with `again`.
        replayable=again,
        prompt=True,
    )


_LIMITED: dict[str, Limited] = {"0": "", "paused": "paused", "rate": "rate", "room": "room"}

_ADMIT = Script("admit", "owner ready scheduled signal leases", "id")


def admit(keys: Keys, id: str, owner: str) -> Call[bool]:
    """A job of an owner under a cap has ended: the next one that was held back may come to its turn."""
    known = _word("admitted", "none")
    return Call(
        ("5", keys.owner(owner), keys.ready, keys.scheduled, keys.signal, keys.leases, id),
        lambda reply: known(reply) == "admitted",
        _ADMIT,
        # A repeat lets in one more, which reserve holds back again.
    )


def make_room(keys: Keys) -> list[Call[None]]:
    """Wake one of the workers that wait for a limit; if it does not need the room, it wakes the next."""
    return [
        Call(("LPUSH", keys.room, "1"), lambda _: None),
        Call(("LTRIM", keys.room, "0", "0"), lambda _: None),
    ]


Held = Literal["ok", "cancel", "lost"]
_HELD = cast("Callable[[Any], Held]", _word("ok", "cancel", "lost"))

_FLUSH = Script(
    "flush",
    "job events leases?",
    "now token id again lease_ms progress usage max_len b n attempt event...",
    locks_keys=True,
)


def flush(
    keys: Keys,
    job: Reserved,
    *,
    first: int,
    events: Sequence[tuple[str, str]],
    max_len: int,
    lease_ms: int | None = None,
    progress: str = "",
    usage: str = "",
    again: bool = False,
    now: int | None = None,
) -> Call[Held]:
    """Append `events` (kind, text), numbered from `first`. With `lease_ms` it renews the lease, too."""
    names = [keys.job(job.id), keys.events(job.id)] + ([] if lease_ms is None else [keys.leases])
    return Call(
        (
            str(len(names)),
            *names,
            _now(now),
            job.token,
            job.id,
            _flag(again),
            "" if lease_ms is None else str(lease_ms),
            progress,
            usage,
            str(max_len),
            job.b,
            str(first),
            str(job.attempt),
            *(part for event in events for part in event),
        ),
        _HELD,
        _FLUSH,
        replayable=again or not events,
    )


_RENEW = Script("renew", "leases job...", "now lease_ms relief job...", locks_keys=True)


def renew(
    keys: Keys, jobs: Sequence[Reserved], *, lease_ms: int, relief: bool = False, now: int | None = None
) -> Call[list[Held]]:
    """Extend the leases of `jobs`; the answers are in their order. `relief`: the call before met a full database."""
    return Call(
        (
            str(1 + len(jobs)),
            keys.leases,
            *(keys.job(job.id) for job in jobs),
            _now(now),
            str(lease_ms),
            _flag(relief),
            *(part for job in jobs for part in (job.id, job.token)),
        ),
        lambda reply: [_HELD(answer) for answer in items(reply)],
        _RENEW,
    )


_STEP = Script("step", "job steps", "token gen field value ttl_ms stale", locks_keys=True)
_STEP_PREFIX = "s:"
"""Of the fields that hold values: a step may have any name, also that of the field gen."""


def step(
    keys: Keys, job: Reserved, *, name: str, value: str, ttl_ms: int = STEPS_TTL_MS, stale: bool = False
) -> Call[Held]:
    """Keep the value of a finished step. `stale`: `steps` found those of another life of the id, which are dropped."""
    return Call(
        (
            "2",
            keys.job(job.id),
            keys.steps(job.id),
            job.token,
            job.gen,
            _STEP_PREFIX + name,
            value,
            str(ttl_ms),
            _flag(stale),
        ),
        _HELD,
        _STEP,
    )


def steps(keys: Keys, job: Reserved) -> Call[tuple[dict[str, str], bool]]:
    """The steps that earlier attempts of this job finished, name to text; and whether there are stale ones instead."""

    def decode(reply: Any) -> tuple[dict[str, str], bool]:
        found = table(reply)
        if found.pop("gen", job.gen) != job.gen:
            return {}, True
        return {name.removeprefix(_STEP_PREFIX): value for name, value in found.items()}, False

    return Call(("HGETALL", keys.steps(job.id)), decode)


class Used(NamedTuple):
    """What a job has used, as its holder gives it away: `text` for the record; `amounts` for the totals of `day`."""

    text: str = ""
    day: str = ""
    amounts: Sequence[tuple[str, str]] = ()


_NOTHING = Used()

Settled = Literal["completed", "failed", "cancelled", "lost"]


def _totals(keys: Keys, used: Used) -> list[str]:
    return [keys.usage(used.day)] if used.amounts else []


def _used(used: Used) -> tuple[str, ...]:
    return (used.text, *(part for pair in used.amounts for part in pair))


_SETTLE = Script(
    "settle",
    "job events leases absent dead? steps? usage? idem?",
    "now token id status body ttl_ms cancel_ttl_ms attempt count has_key has_steps used total...",
)


def settle(
    keys: Keys,
    job: Reserved,
    *,
    status: Literal["completed", "failed", "cancelled"],
    body: str,
    ttl_ms: int,
    cancel_ttl_ms: int,
    count: int,
    steps: bool = False,
    used: Used = _NOTHING,
    now: int | None = None,
) -> Call[Settled]:
    """End the job. `body` is the result's text or the error's; `count` the number of its last event (its n).

    `steps`: this attempt read or kept steps, which then expire with the record.
    """
    names = [keys.job(job.id), keys.events(job.id), keys.leases, keys.absent]
    if status == "failed":
        names.append(keys.dead)
    if steps:
        names.append(keys.steps(job.id))
    names += _totals(keys, used)
    if job.key:
        names.append(keys.idem(job.key))
    return Call(
        (
            str(len(names)),
            *names,
            _now(now),
            job.token,
            job.id,
            status,
            body,
            str(ttl_ms),
            str(cancel_ttl_ms),
            str(job.attempt),
            str(count),
            _flag(bool(job.key)),
            _flag(steps),
            *_used(used),
        ),
        cast("Callable[[Any], Settled]", _word("completed", "failed", "cancelled", "lost")),
        _SETTLE,
    )


_RETRY = Script(
    "retry",
    "job events leases scheduled absent signal? usage? idem?",
    "now token id reason delay_ms cancel_ttl_ms attempt count has_key rings used total...",
)


def retry(
    keys: Keys,
    job: Reserved,
    *,
    error: str,
    delay_ms: int,
    cancel_ttl_ms: int,
    count: int,
    ring: bool = False,
    used: Used = _NOTHING,
    now: int | None = None,
) -> Call[Literal["scheduled", "cancelled", "lost"]]:
    """Give the job back for another attempt. `ring`: this worker stops and will not be there when it is due."""
    names = [keys.job(job.id), keys.events(job.id), keys.leases, keys.scheduled, keys.absent]
    names += [keys.signal] if ring else []
    names += _totals(keys, used)
    names += [keys.idem(job.key)] if job.key else []
    return Call(
        (
            str(len(names)),
            *names,
            _now(now),
            job.token,
            job.id,
            error,
            str(delay_ms),
            str(cancel_ttl_ms),
            str(job.attempt),
            str(count),
            _flag(bool(job.key)),
            _flag(ring),
            *_used(used),
        ),
        cast(
            'Callable[[Any], Literal["scheduled", "cancelled", "lost"]]',
            _word("scheduled", "cancelled", "lost"),
        ),
        _RETRY,
    )


_RELEASE = Script(
    "release",
    "job events leases ready signal absent config? usage? idem?",
    "now token id reason rank pause_ms cancel_ttl_ms attempt starts count emitted has_key used total...",
)


def release(
    keys: Keys,
    job: Reserved,
    *,
    cancel_ttl_ms: int,
    count: int,
    emitted: bool,
    error: str = "",
    pause_ms: int | None = None,
    used: Used = _NOTHING,
    now: int | None = None,
) -> Call[Literal["waiting", "cancelled", "lost"]]:
    """Hand the job back at its old rank, the attempt not counted. With `pause_ms` the queue pauses for that long.

    `emitted`: this attempt wrote events, or a flush of it is unresolved: the marker that drops them is due now.
    """
    names = [keys.job(job.id), keys.events(job.id), keys.leases, keys.ready, keys.signal, keys.absent]
    names += [keys.config] if pause_ms is not None else []
    names += _totals(keys, used)
    names += [keys.idem(job.key)] if job.key else []
    return Call(
        (
            str(len(names)),
            *names,
            _now(now),
            job.token,
            job.id,
            error,
            job.rank,
            "" if pause_ms is None else str(pause_ms),
            str(cancel_ttl_ms),
            str(job.attempt),
            str(job.starts),
            str(count),
            _flag(emitted),
            _flag(bool(job.key)),
            *_used(used),
        ),
        cast('Callable[[Any], Literal["waiting", "cancelled", "lost"]]', _word("waiting", "cancelled", "lost")),
        _RELEASE,
    )


_PRUNE_DEAD = Script("prune_dead", "dead absent", "base")


def prune_dead(keys: Keys) -> Call[int]:
    """Drop dead-letter entries that have no dead record any more; the answer is how many. 100: call again."""
    return Call(("2", keys.dead, keys.absent, keys.base), number, _PRUNE_DEAD)


def seen(keys: Keys, worker: str, info: str | None) -> Call[None]:
    """Say in the queue's list of workers that `worker` lives, or with None that it has gone."""
    if info is None:
        return Call(("HDEL", keys.workers, worker), lambda _: None)
    return Call(("HSET", keys.workers, worker, info), lambda _: None)


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
