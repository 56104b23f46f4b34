"""An auditor that trusts nobody: it imports nothing of outlast.

It reads three things that were written past each other: the raw keys of a queue at rest, the server's own append-only
file (every write that ever happened, in order, also what was trimmed since), and the provider's log of calls. Each
finding is a line `rule: what`; no finding means that the rules hold.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

ENDS = ("completed", "failed", "cancelled")
HOME = {"waiting": "ready", "scheduled": "scheduled", "active": "leases", "failed": "dead"}
"""Where a job of a status is listed; one that completed or was cancelled is listed nowhere."""
KINDS = {
    **{"ready": b"zset", "scheduled": b"zset", "leases": b"zset", "dead": b"zset", "seq": b"string"},
    **{"signal": b"list", "config": b"hash", "room": b"list", "workers": b"hash", "schedules": b"hash"},
    "watch": b"string",
}
KINDS_OF = {
    **{"job": b"hash", "events": b"stream", "steps": b"hash", "idem": b"string"},
    **{"owner": b"zset", "usage": b"hash", "take": b"string", "ctl": b"list"},
}
FADING = ("owner", "usage", "take", "ctl", "watch")
"""What nobody takes away: it has to go by itself."""
OF_A_JOB = ("job", "events", "steps")
SLACK_MS = 100
"""Two processes read their clocks one after the other."""


def audit_keys(raw: redis.Redis, queue: str, accepted: Collection[str], *, at_rest: bool = False) -> list[str]:
    """What is wrong with the keys of a queue on which nothing happens now.

    `accepted`: the ids of all jobs that a producer was told of. `at_rest`: all of them must have ended by now.
    """
    return [*_Keys(raw, queue, set(accepted), at_rest).findings()]


class _Keys:
    def __init__(self, raw: redis.Redis, queue: str, accepted: set[str], at_rest: bool) -> None:
        self.raw, self.base, self.accepted, self.at_rest = raw, f"{{{queue}}}:", accepted, at_rest
        found: Any = raw.scan_iter(match=self.base.replace("[", "\\[") + "*", count=1000)
        # The delivery queue of webhooks is a queue of its own.
        self.names = {key.decode().removeprefix(self.base) for key in found if b":hooks:" not in key}
        self.places: dict[str, dict[str, float]] = {
            place: {id.decode(): score for id, score in raw.zrange(self.base + place, 0, -1, withscores=True)}  # type: ignore[union-attr]
            for place in ("ready", "scheduled", "leases", "dead")
            if place in self.names
        }
        self.records: dict[str, dict[str, str]] = {}
        for name in self.names:
            if name.startswith("job:") and raw.type(self.base + name) == b"hash":
                fields: Any = raw.hgetall(self.base + name)
                self.records[name[4:]] = {k.decode(): v.decode("utf-8", "replace") for k, v in fields.items()}

    def findings(self) -> Iterator[str]:
        yield from self._lost()
        yield from self._listings()
        for id, record in self.records.items():
            if id not in self.accepted:
                yield f"phantom: there is a job {id!r} that no producer knows of"
            yield from self._record(id, record)
        yield from self._orphans()

    def _lost(self) -> Iterator[str]:
        for id in self.accepted - self.records.keys():
            yield f"lost: job {id!r} was accepted and has no record"
        for id in self.accepted & self.records.keys():
            status = self.records[id].get("status", "waiting")
            if status not in ENDS and (self.at_rest or id not in self.places.get(HOME.get(status, ""), {})):
                yield f"lost: job {id!r} is {status}, and nobody will ever end it"

    def _listings(self) -> Iterator[str]:
        where: defaultdict[str, list[str]] = defaultdict(list)
        for place, ids in self.places.items():
            for id in ids:
                where[id].append(place)
        for id, places in where.items():
            if len(places) > 1:
                yield f"two places: job {id!r} is listed in {' and '.join(places)}"
            record = self.records.get(id)
            for place in places:
                kind = "lease without a job" if place == "leases" else "listing without a job"
                if record is None:
                    yield f"{kind}: {id!r} in {place} has no record"
                elif HOME.get(status := record.get("status", "waiting")) != place:
                    yield f"{kind}: {id!r} is in {place} and its record says {status}"

    def _record(self, id: str, record: dict[str, str]) -> Iterator[str]:
        status = record.get("status", "waiting")
        if record.get("id") != id or "payload" not in record:
            yield f"half a record: job {id!r} has only {', '.join(record)}"
        if ("token" in record) != (status == "active"):
            yield f"token: job {id!r} is {status} and {'has a' if 'token' in record else 'no'} token"
        ended = status in ENDS
        for name in OF_A_JOB:
            expires: Any = self.raw.pttl(self.base + f"{name}:{id}")
            if name == "steps":
                if expires == -1:
                    yield f"expiry: {name} of job {id!r} stay for ever"
            elif expires != -2 and (expires >= 0) != ended:
                yield f"expiry: {name} of job {id!r}, which is {status}, {'stays' if ended else 'goes in'} {expires} ms"
        yield from self._stream(id, record, status, ended)

    def _stream(self, id: str, record: dict[str, str], status: str, ended: bool) -> Iterator[str]:
        name = f"{self.base}events:{id}"
        entries: Any = self.raw.xrange(name) if f"events:{id}" in self.names else []
        kinds = [fields[b"t"].decode() for _, fields in entries]
        ends = [at for at, kind in enumerate(kinds) if kind in ENDS]
        if len(ends) > 1:
            yield f"settled twice: job {id!r} ended as {' and '.join(kinds[at] for at in ends)}"
        if "restarted" in kinds[1:]:
            yield f"restart: the output of job {id!r} has text before its latest start"
        if not ended:
            if ends:
                yield f"settled twice: job {id!r} is {status} and its output says {kinds[ends[0]]}"
            return
        if not ends:
            yield f"end: job {id!r} is {status} and its output has no end"
            return
        if ends[-1] != len(kinds) - 1:
            yield f"end: the output of job {id!r} goes on after its end"
        at, fields = entries[ends[-1]]
        told, body = fields[b"t"].decode(), fields[b"d"].decode("utf-8", "replace")
        kept = record.get("result" if status == "completed" else "error", "")
        if told != status or (status != "cancelled" and body != kept):
            yield f"end: the record of job {id!r} says {status}, and its output {told}, or another text"
        if record.get("finishedAt") != at.decode().partition("-")[0]:
            yield f"end: job {id!r} ended at {record.get('finishedAt')}, and its output at {at.decode()}"

    def _orphans(self) -> Iterator[str]:
        for name in self.names:
            kind, colon, rest = name.partition(":")
            expected = KINDS_OF.get(kind) if colon else KINDS.get(name)
            found = self.raw.type(self.base + name)
            if found == b"none":
                continue  # it expired meanwhile
            if expected is None or found != expected:
                yield f"orphan key: {name!r} is nothing that a queue has"
            elif kind in OF_A_JOB and rest not in self.records:
                yield f"orphan key: {name!r} has no job"
            elif kind == "idem":
                yield from self._mapping(rest)
            elif kind in FADING and self.raw.pttl(self.base + name) == -1:
                yield f"orphan key: {name!r} stays for ever"
        if (bells := self.raw.llen(self.base + "signal")) > 1000:  # type: ignore[operator]
            yield f"orphan key: {bells} doorbells"

    def _mapping(self, key: str) -> Iterator[str]:
        held: Any = self.raw.get(f"{self.base}idem:{key}")
        record = self.records.get(held.decode(), {})
        status = record.get("status", "waiting")
        stays = self.raw.pttl(f"{self.base}idem:{key}") == -1
        if record.get("idempotencyKey") != key or status in ("failed", "cancelled") or stays == (status == "completed"):
            yield f"orphan key: idempotency key {key!r} belongs to {held!r}, which is {status} and does not hold it"


@dataclass
class Life:
    """One job from its enqueue (or its retry_dead) on, as the server wrote it down."""

    starts: int = 0
    ends: list[tuple[str, int]] = field(default_factory=list)
    """Kind and time of each terminal event."""
    ran_after_its_end: bool = False
    flagged: bool = False


def read_history(commands: Iterable[list[bytes]], queue: str) -> dict[str, list[Life]]:
    """The lives of each job of a queue."""
    job, events = f"{{{queue}}}:job:".encode(), f"{{{queue}}}:events:".encode()
    lives: defaultdict[str, list[Life]] = defaultdict(list)
    for command in commands:
        name, key = command[0].upper(), command[1] if len(command) > 1 else b""
        if name in (b"HSET", b"HMSET") and key.startswith(job):
            mine = lives[key[len(job) :].decode()]
            fields = dict(zip(command[2::2], command[3::2], strict=True))
            if b"payload" in fields or b"revived" in fields or not mine:
                mine.append(Life())
            if b"token" in fields:
                mine[-1].starts += 1
                mine[-1].ran_after_its_end |= bool(mine[-1].ends)
            mine[-1].flagged |= b"cancelRequested" in fields
        elif name == b"XADD" and key.startswith(events):
            at = next(i for i in range(2, len(command)) if re.fullmatch(rb"\d+-\d+", command[i]))
            kind = dict(zip(command[at + 1 :: 2], command[at + 2 :: 2], strict=True))[b"t"].decode()
            mine = lives[key[len(events) :].decode()]
            if not mine:
                mine.append(Life())
            if kind in ENDS:
                mine[-1].ends.append((kind, int(command[at].partition(b"-")[0])))
    return dict(lives)


def audit_history(lives: Mapping[str, list[Life]], accepted: Collection[str], *, at_rest: bool = False) -> list[str]:
    """What is wrong with what happened. `at_rest`: every life must have an end by now."""
    out: list[str] = []
    for id in accepted:
        mine = lives.get(id, [])
        if not mine:
            out.append(f"lost: job {id!r} was accepted, and the server never wrote it")
        for at, life in enumerate(mine):
            if len(life.ends) > 1:
                out.append(f"settled twice: job {id!r} ended as {' and '.join(kind for kind, _ in life.ends)}")
            if life.ran_after_its_end:
                out.append(f"run after its end: job {id!r} was taken although it had ended")
            if not life.ends and (at_rest or at < len(mine) - 1):
                out.append(f"lost: job {id!r} was started over, or is over, and has no end")
    return out


def audit_calls(
    calls: Iterable[Mapping[str, Any]],
    lives: Mapping[str, list[Life]],
    excused: Callable[[int, int, int], bool] = lambda pid, ended, at: False,
) -> list[str]:
    """Provider calls that began after their job was cancelled.

    A call is a mapping: job, at (ms), pid. `excused(pid, ended, at)` says whether the calling process could not know:
    it was frozen, or cut off from the database, in between.
    """
    out: list[str] = []
    for call in calls:
        life = next(iter(lives.get(call["job"], [])[-1:]), None)
        if life is None or not life.ends or life.ends[0][0] != "cancelled":
            continue
        ended = life.ends[0][1]
        if call["at"] > ended + SLACK_MS and not excused(call["pid"], ended, call["at"]):
            late = call["at"] - ended
            out.append(f"call after cancel: job {call['job']!r} called its provider {late} ms after it was cancelled")
    return out


def read_calls(log: Path) -> list[dict[str, Any]]:
    """The provider's log, one JSON object a line."""
    return [json.loads(line) for line in log.read_text().splitlines()]


def read_aof(data_dir: Path) -> Iterator[list[bytes]]:
    """Every write of a server that was started with `appendonly yes`, in order.

    It must not have been rewritten (`auto-aof-rewrite-percentage 0`). A last command that is still being written is
    left out.
    """
    parts = sorted(data_dir.glob("appendonlydir/*.incr.aof"), key=lambda path: int(path.name.split(".")[-3]))
    for part in parts:
        with part.open("rb") as file:
            while (line := file.readline()).endswith(b"\n"):
                if not line.startswith(b"*"):
                    continue  # a note of the time
                command: list[bytes] = []
                for _ in range(int(line[1:])):
                    size = int(file.readline()[1:] or 0)
                    command.append(file.read(size + 2)[:-2])
                yield command


def summary(lives: Mapping[str, list[Life]]) -> Counter[str]:
    """How jobs ended, and how often more than one start was needed."""
    count: Counter[str] = Counter()
    for mine in lives.values():
        for life in mine:
            count[life.ends[0][0] if life.ends else "open"] += 1
            count["starts"] += life.starts
            count["repeated starts"] += max(0, life.starts - 1)
    return count
