"""Rules that belong to a queue, not to a deploy: kept in the database, obeyed by all its producers and workers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from math import inf
from typing import Any, TypedDict

from ._checks import Duration, check_count, to_ms
from .errors import InvalidArgumentError
from .protocol.calls import CLOCK, Call, Plan, make_room
from .protocol.keys import LARGE, Keys
from .protocol.wire import items, maybe_text, number, when

__all__ = ["RuleChanges", "Rules", "changes", "pause", "read", "resume", "set_rules"]


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a queue at one moment. None: no such rule, so the declaration in the code counts."""

    lease: float | None = None
    """Seconds. How long a silent worker owns a job."""
    timeout: float | None = None
    """Seconds. The longest that one attempt may run."""
    max_attempts: int | None = None
    """For jobs that were not enqueued with a number of their own."""
    concurrency: int | None = None
    """The most jobs of this queue that run at any moment, on all workers together."""
    rate: str | None = None
    """The most starts in any window, such as 30/60s: evenly spaced, unless there is a burst."""
    burst: int | None = None
    """Starts that may come at once after a quiet time; a window may then hold that many more, less one."""
    owner_cap: int | None = None
    """The most jobs of one owner that run at any moment."""
    max_payload: int | None = None
    """UTF-8 bytes of a payload's JSON. Producers are refused, and larger ones from elsewhere fail for good."""
    result_ttl: float | None = None
    """Seconds. How long a finished record is kept, unless the job has a time of its own."""
    paused: bool = False
    """Whether the queue has been paused without end."""
    paused_until: datetime | None = None
    """The end of the pause that is or was set, by somebody or by a provider's answer."""
    set_at: datetime | None = None
    """When rules were last set; None if they never were."""

    def __str__(self) -> str:
        named = {
            "at most {} at once": self.concurrency,
            "at most {} at once for each owner": self.owner_cap,
            "rate {}": self.rate,
            "burst {}": self.burst,
            "lease {:g} s": self.lease,
            "timeout {:g} s": self.timeout,
            "{} attempts": self.max_attempts,
            "payload up to {} bytes": self.max_payload,
            "results kept {:g} s": self.result_ttl,
            "paused{}": "" if self.paused else None,
        }
        return ", ".join(text.format(value) for text, value in named.items() if value is not None) or "no rules"


class RuleChanges(TypedDict, total=False):
    """What `set_rules` takes. None removes a rule; what is left out stays."""

    lease: Duration | None
    timeout: Duration | None
    max_attempts: int | None
    concurrency: int | None
    rate: str | None
    burst: int | None
    owner_cap: int | None
    max_payload: int | None
    result_ttl: Duration | None


_DURATIONS = {"lease": (0.1, 86_400.0), "timeout": (0.001, 365 * 86_400.0), "result_ttl": (1.0, 365 * 86_400.0)}
_COUNTS = {
    "max_attempts": (1, 1_000_000),
    "concurrency": (1, 1_000_000),
    "burst": (1, 1_000_000),
    "owner_cap": (1, 1_000),
    "max_payload": (LARGE, 512 * 1024 * 1024),
}
_FIELDS = {
    "lease": "leaseMs",
    "timeout": "timeoutMs",
    "result_ttl": "resultTtlMs",
    "max_attempts": "maxAttempts",
    "concurrency": "concurrency",
    "burst": "burst",
    "owner_cap": "ownerCap",
    "max_payload": "maxPayload",
}
_RATE = re.compile(r"(\d{1,7})/(\d{0,7})(ms|s|m|h|d)", re.ASCII)
_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def changes(given: Mapping[str, Any]) -> dict[str, str | None]:
    """Fields of the config hash and their new texts, None for what is to go. Raises InvalidArgumentError."""
    fields: dict[str, str | None] = {}
    for name, value in given.items():
        if name == "rate":
            fields |= _rate(value)
        elif name not in _FIELDS:
            raise InvalidArgumentError(f"{name!r} is no rule of a queue; there are {', '.join([*_FIELDS, 'rate'])}")
        elif value is None:
            fields[_FIELDS[name]] = None
        elif name in _DURATIONS:
            least, most = _DURATIONS[name]
            fields[_FIELDS[name]] = str(to_ms(value, name, least=least, most=most))
        else:
            least_count, most_count = _COUNTS[name]
            fields[_FIELDS[name]] = str(check_count(value, name, least=least_count, most=most_count))
    return fields


def _rate(value: Any) -> dict[str, str | None]:
    if value is None:
        return dict.fromkeys(("rate", "interval", "tat"))
    match = _RATE.fullmatch(value) if isinstance(value, str) else None
    count, interval = (int(match[1]), int(match[2] or 1) * _UNITS[match[3]]) if match else (0, 0)
    if count == 0 or not 0 < interval <= 366 * 86_400_000:
        raise InvalidArgumentError(f"rate={value!r} is no rate; write starts/time, such as 30/60s, 10/s or 1000/h")
    return {"rate": str(count), "interval": str(interval), "tat": None}


def read(keys: Keys) -> Call[Rules]:
    """The rules now."""
    names = ("leaseMs", "timeoutMs", "resultTtlMs", "maxAttempts", "concurrency", "burst", "ownerCap", "maxPayload")

    def decode(reply: Any) -> Rules:
        row = dict(zip((*names, "rate", "interval", "paused", "pausedUntil", "setAt"), items(reply), strict=True))
        whole = {name: number(row[name]) if row[name] is not None else None for name in (*names, "rate", "interval")}
        lease, timeout, result_ttl = (None if ms is None else ms / 1000 for ms in (whole[name] for name in names[:3]))
        rate, interval = whole["rate"], whole["interval"]
        paused = maybe_text(row["paused"])
        until = max(number(row["pausedUntil"], -1), -1 if paused == "1" else number(row["paused"], -1))
        return Rules(
            lease=lease,
            timeout=timeout,
            max_attempts=whole["maxAttempts"],
            concurrency=whole["concurrency"],
            rate=None if rate is None or interval is None else f"{rate}/{_interval(interval)}",
            burst=whole["burst"],
            owner_cap=whole["ownerCap"],
            max_payload=whole["maxPayload"],
            result_ttl=result_ttl,
            paused=paused == "1",
            paused_until=when(until),
            set_at=when(number(row["setAt"], -1)),
        )

    return Call(("HMGET", keys.config, *names, "rate", "interval", "paused", "pausedUntil", "setAt"), decode)


def _interval(ms: int) -> str:
    unit = "s" if ms % 1000 == 0 else "ms"
    return f"{ms // _UNITS[unit]}{unit}"


def set_rules(keys: Keys, fields: Mapping[str, str | None]) -> Plan[None]:
    """Write the changes. Workers obey them from their next take on; those that wait for a limit look at once."""
    [now] = yield [CLOCK]
    new = [part for name, value in fields.items() if value is not None for part in (name, value)]
    gone = [name for name, value in fields.items() if value is None]
    writes: list[Call[Any]] = [Call(("HSET", keys.config, "setAt", str(now), *new), lambda _: None)]
    writes += [Call(("HDEL", keys.config, *gone), lambda _: None)] if gone else []
    yield [*writes, *make_room(keys)]
    if "rate" in fields or "concurrency" in fields:
        # Each of those that wait now, at once: their timers are those of the old limits.
        [fleet] = yield [Call(("HLEN", keys.workers), number)]
        if fleet > 1:
            yield [Call(("LPUSH", keys.room, *["1"] * min(int(fleet) - 1, 1000)), lambda _: None)]
            yield make_room(keys)
    if "ownerCap" in fields:
        yield from _let_in(keys, now)


def _let_in(keys: Keys, now: int) -> Plan[None]:
    """What the old cap held back is looked at anew: it waits in `scheduled`, with the status waiting."""
    start = 0
    while True:
        [ids] = yield [Call(("ZRANGE", keys.scheduled, str(start), str(start + 999)), items)]
        if not ids:
            break
        names = [str(maybe_text(id)) for id in ids]
        states = yield [
            Call(("HMGET", keys.job(id), "status"), lambda reply: maybe_text(items(reply)[0])) for id in names
        ]
        held = [id for id, status in zip(names, states, strict=True) if status == "waiting"]
        scores = [part for id in held for part in (str(now), id)]
        yield [Call(("ZADD", keys.scheduled, "XX", *scores), lambda _: None)] if held else []
        start += len(names)
    yield [Call(("LPUSH", keys.signal, "1"), lambda _: None)]


def pause(keys: Keys, ms: int | None) -> Plan[None]:
    """Take nothing for so long, or until `resume`. A shorter pause does not shorten one that is set."""
    [now] = yield [CLOCK]
    [old] = yield [Call(("HMGET", keys.config, "paused"), lambda reply: maybe_text(items(reply)[0]))]
    end = inf if old == "1" else number(old)
    if ms is None or now + ms > end:
        yield [Call(("HSET", keys.config, "paused", "1" if ms is None else str(now + ms)), lambda _: None)]


def resume(keys: Keys) -> Plan[None]:
    """End all pauses, those that providers asked for too."""
    yield [Call(("HDEL", keys.config, "paused", "pausedUntil"), lambda _: None), *make_room(keys)]
