"""What workers send: how jobs are taken, and what only the holder of one may say of it.

As in `calls.py`, everything is pure, times are milliseconds, and `now` moves the clock in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple, cast

from ..errors import ReplyShapeError
from .calls import STEPS_TTL_MS, Call
from .keys import Keys
from .scripts import Script
from .wire import exact_text, flag, items, moment, number, one_of, real, table, text

__all__ = [
    "Limited",
    "Reservation",
    "Reserved",
    "Terms",
    "Used",
    "admit",
    "flush",
    "glance",
    "grace_ms",
    "prune_dead",
    "release",
    "renew",
    "reserve",
    "retry",
    "seen",
    "settle",
    "step",
    "steps",
]


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
        return real(found[1]) if found else inf

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
            moment(now),
            token,
            str(k),
            str(lease_ms),
            flag(again),
            "" if stale_at_ms is None else str(stale_at_ms),
            str(grace_ms(lease_ms) if grace is None else grace),
            str(result_ttl_ms),
            str(dead_ttl_ms),
            flag(bell),
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
    known = one_of("admitted", "none")
    return Call(
        ("5", keys.owner(owner), keys.ready, keys.scheduled, keys.signal, keys.leases, id),
        lambda reply: known(reply) == "admitted",
        _ADMIT,
        # A repeat lets in one more, which reserve holds back again.
    )


Held = Literal["ok", "cancel", "lost"]
_HELD = cast("Callable[[Any], Held]", one_of("ok", "cancel", "lost"))

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
            moment(now),
            job.token,
            job.id,
            flag(again),
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
            moment(now),
            str(lease_ms),
            flag(relief),
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
            flag(stale),
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
            moment(now),
            job.token,
            job.id,
            status,
            body,
            str(ttl_ms),
            str(cancel_ttl_ms),
            str(job.attempt),
            str(count),
            flag(bool(job.key)),
            flag(steps),
            *_used(used),
        ),
        cast("Callable[[Any], Settled]", one_of("completed", "failed", "cancelled", "lost")),
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
            moment(now),
            job.token,
            job.id,
            error,
            str(delay_ms),
            str(cancel_ttl_ms),
            str(job.attempt),
            str(count),
            flag(bool(job.key)),
            flag(ring),
            *_used(used),
        ),
        cast(
            'Callable[[Any], Literal["scheduled", "cancelled", "lost"]]',
            one_of("scheduled", "cancelled", "lost"),
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
            moment(now),
            job.token,
            job.id,
            error,
            job.rank,
            "" if pause_ms is None else str(pause_ms),
            str(cancel_ttl_ms),
            str(job.attempt),
            str(job.starts),
            str(count),
            flag(emitted),
            flag(bool(job.key)),
            *_used(used),
        ),
        cast('Callable[[Any], Literal["waiting", "cancelled", "lost"]]', one_of("waiting", "cancelled", "lost")),
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
