"""A queue on a real server, driven through Calls alone, with a clock that is moved by hand."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import redis

from outlast import Event, Queue
from outlast.protocol import Call, Keys, Tail, calls, holding
from outlast.records import Enqueued
from outlast.transport import drive

T = TypeVar("T")

T0 = 1_800_000_000_000
LEASE = 60_000
RESULT_TTL = 3_600_000
DEAD_TTL = 3_600_000
MAX_LEN = 10_000

_nonces = itertools.count()


def connect(url: str) -> redis.Redis:
    """A connection that gives raw RESP2 replies, as Calls decode them."""
    connection = redis.Redis.from_url(url, protocol=2)
    connection.response_callbacks.clear()
    return connection


@dataclass
class Holder:
    """A worker's side of one job that it took: numbers its events, as PROTOCOL asks of the holder."""

    lab: Lab
    job: holding.Reserved
    n: int = field(init=False)
    emitted: bool = False
    stepped: bool = False
    used: holding.Used = field(default_factory=holding.Used)

    def __post_init__(self) -> None:
        self.n = self.job.n

    @property
    def id(self) -> str:
        return self.job.id

    def flush_call(
        self,
        *events: tuple[str, str],
        renew: bool = False,
        progress: str = "",
        usage: str = "",
        again: bool = False,
    ) -> Any:
        return holding.flush(
            self.lab.keys,
            self.job,
            first=self.n + 1,
            events=events,
            max_len=self.lab.max_len,
            lease_ms=LEASE if renew else None,
            progress=progress,
            usage=usage,
            again=again,
            now=self.lab.now,
        )

    def flush(self, *events: tuple[str, str], renew: bool = False, progress: str = "", again: bool = False) -> str:
        answer: str = self.lab.send(self.flush_call(*events, renew=renew, progress=progress, again=again))
        if answer != "lost":
            self.n += len(events)
            self.emitted = self.emitted or bool(events)
        return answer

    def emit(self, *texts: str, renew: bool = False) -> str:
        return self.flush(*(("chunk", text) for text in texts), renew=renew)

    def progress(self, value: str, renew: bool = False) -> str:
        return self.flush(("progress", value), progress=value, renew=renew)

    def renew(self) -> str:
        return self.lab.send(holding.renew(self.lab.keys, [self.job], lease_ms=LEASE, now=self.lab.now))[0]

    def settle_call(
        self, status: Literal["completed", "failed", "cancelled"], body: str, ttl: int | None = None
    ) -> Call[holding.Settled]:
        keep = ttl or (DEAD_TTL if status == "failed" else RESULT_TTL)
        return holding.settle(
            self.lab.keys,
            self.job,
            status=status,
            body=body,
            ttl_ms=keep,
            cancel_ttl_ms=RESULT_TTL,
            count=self.n,
            steps=self.stepped,
            used=self.used,
            now=self.lab.now,
        )

    def uses(self, day: str = "2026-11-30", **amounts: float) -> Holder:
        """What the holder says of its usage when it gives the job away."""
        self.used = holding.Used(json.dumps(amounts), day, [(name, json.dumps(n)) for name, n in amounts.items()])
        return self

    def step_call(self, name: str, value: str, *, stale: bool = False) -> Call[holding.Held]:
        return holding.step(self.lab.keys, self.job, name=name, value=value, stale=stale)

    def step(self, name: str, value: str, *, stale: bool = False) -> str:
        self.stepped = True
        return self.lab.send(self.step_call(name, value, stale=stale))

    def steps(self) -> tuple[dict[str, str], bool]:
        return self.lab.send(holding.steps(self.lab.keys, self.job))

    def complete(self, body: str = "null", ttl: int | None = None) -> str:
        return self.lab.send(self.settle_call("completed", body, ttl))

    def fail(self, error: str = "Error: bad", ttl: int | None = None) -> str:
        return self.lab.send(self.settle_call("failed", error, ttl))

    def retry_call(
        self, delay_ms: int = 0, error: str = "Error: again", ring: bool = False
    ) -> Call[Literal["scheduled", "cancelled", "lost"]]:
        return holding.retry(
            self.lab.keys,
            self.job,
            error=error,
            delay_ms=delay_ms,
            cancel_ttl_ms=RESULT_TTL,
            count=self.n,
            ring=ring,
            used=self.used,
            now=self.lab.now,
        )

    def retry(self, delay_ms: int = 0, error: str = "Error: again", ring: bool = False) -> str:
        return self.lab.send(self.retry_call(delay_ms, error, ring))

    def release_call(
        self, pause_ms: int | None = None, error: str = "", emitted: bool | None = None
    ) -> Call[Literal["waiting", "cancelled", "lost"]]:
        return holding.release(
            self.lab.keys,
            self.job,
            cancel_ttl_ms=RESULT_TTL,
            count=self.n,
            emitted=self.emitted if emitted is None else emitted,
            error=error,
            pause_ms=pause_ms,
            used=self.used,
            now=self.lab.now,
        )

    def release(self, pause_ms: int | None = None, error: str = "", emitted: bool | None = None) -> str:
        return self.lab.send(self.release_call(pause_ms, error, emitted))


class Lab:
    def __init__(self, connection: redis.Redis, keys: Keys) -> None:
        self.connection = connection
        self.keys = keys
        self.queue: Queue[Any, Any] = Queue(keys.name)
        self.now = T0
        self.max_len = MAX_LEN
        self._requests = itertools.count(1)

    # -- sending -------------------------------------------------------------------------------------------------

    def send(self, call: Call[T]) -> T:
        return call.decode(self.reply(call))

    def reply(self, call: Call[Any]) -> Any:
        try:
            return self.connection.execute_command(*call.command())
        except redis.exceptions.NoScriptError:
            return self.connection.execute_command(*call.command(source=True))

    def raw(self, *command: object) -> Any:
        """Any command, past our code; bytes become text."""
        return _text(self.connection.execute_command(*command))

    # the rest of Transport, for plans
    blocking = False
    sync_token = None

    def send_many(self, many: Sequence[Call[Any]]) -> list[Any]:
        return [self.send(call) for call in many]

    def close(self) -> None: ...

    # -- producers -----------------------------------------------------------------------------------------------

    def enqueue_call(self, id: str = "job-a", *, own: bool = True, **options: Any) -> Call[Enqueued]:
        given = {
            "nonce": f"nonce-{next(_nonces)}" if own or options.get("key") else "",
            "payload": "{}",
            "max_attempts": 3,
            "key_ttl_ms": RESULT_TTL,
            "own_id": own,
            "now": self.now,
            **options,
        }
        return calls.enqueue(self.keys, id=id, **given)

    def enqueue(self, id: str = "job-a", *, own: bool = True, **options: Any) -> Enqueued:
        return self.send(self.enqueue_call(id, own=own, **options))

    def cancel(self, id: str = "job-a", **options: Any) -> calls.CancelAnswer:
        return self.send(calls.cancel(self.keys, id, **{"result_ttl_ms": RESULT_TTL, "now": self.now, **options}))

    def retry_dead(self, id: str = "job-a", *, nonce: str | None = None, max_attempts: int = 3, **more: Any) -> bool:
        nonce = nonce or f"nonce-{next(_nonces)}"
        return self.send(calls.retry_dead(self.keys, id, nonce=nonce, max_attempts=max_attempts, now=self.now, **more))

    def stats(self) -> Any:
        return drive(self, calls.stats(self.keys))

    def dead(self, count: int = 50) -> list[str]:
        return drive(self, calls.dead(self.keys, count))

    def get(self, id: str = "job-a") -> Any:
        return self.send(calls.get(self.keys, id, self.queue))

    # -- workers -------------------------------------------------------------------------------------------------

    def reserve_call(self, k: int = 1, *, worker: str = "w", request: int | None = None, **options: Any) -> Any:
        given = {
            "worker": worker,
            "request": next(self._requests) if request is None else request,
            "k": k,
            "lease_ms": LEASE,
            "result_ttl_ms": RESULT_TTL,
            "dead_ttl_ms": DEAD_TTL,
            "now": self.now,
            **options,
        }
        return holding.reserve(self.keys, **given)

    def reserve(self, k: int = 1, **options: Any) -> holding.Reservation:
        answer: holding.Reservation = self.send(self.reserve_call(k, **options))
        return answer

    def take(self, k: int = 1, **options: Any) -> list[Holder]:
        return [Holder(self, job) for job in self.reserve(k, **options).jobs]

    def one(self, id: str | None = None, **options: Any) -> Holder:
        """Take exactly one job, the expected one."""
        [holder] = self.take(1, **options)
        assert id is None or holder.id == id
        return holder

    def running(self, id: str = "job-a", *, worker: str = "w", **options: Any) -> Holder:
        """A job that was just made and taken."""
        self.enqueue(id, **options)
        return self.one(id, worker=worker)

    def lapse(self) -> None:
        """Let every lease lapse and be looked at twice, so that the next reserve has what they owned."""
        self.now += LEASE + 1
        self.reserve(0)
        self.now += holding.grace_ms(LEASE) + 1

    # -- readers -------------------------------------------------------------------------------------------------

    def tail(self, id: str = "job-a", **options: Any) -> Tail[Any]:
        return Tail(self.keys, id, self.queue, **options)

    def step(self, tail: Tail[Any]) -> list[Event[Any]]:
        """One poll."""
        return tail.feed(self.send(tail.poll()))

    def drain(self, tail: Tail[Any]) -> list[Event[Any]]:
        """Everything that a reader gets now: until the end, or until it would wait."""
        events: list[Event[Any]] = []
        for _ in range(1000):
            events += self.step(tail)
            if tail.done or tail.delay:
                return events
        raise AssertionError("the tail polls without end and without a pause")

    def read(self, id: str = "job-a", **options: Any) -> list[Event[Any]]:
        return self.drain(self.tail(id, **options))

    # -- looking -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All keys of the queue without their prefix, in the shape of the golden files, stream ids and TTLs as is."""
        prefix = self.keys.base
        pattern = "".join("\\" + c if c in "*?[]\\^" else c for c in prefix) + "*"
        state: dict[str, Any] = {}
        cursor = "0"
        names: set[str] = set()
        while True:
            cursor, found = self.raw("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            names.update(found)
            if cursor == "0":
                break
        for name in sorted(names):
            kind = self.raw("TYPE", name)
            ttl = self.raw("PTTL", name)
            entry: dict[str, Any] = {"type": kind, "ttl_ms": None if ttl == -1 else ttl}
            match kind:
                case "hash":
                    entry["fields"] = _pairs(self.raw("HGETALL", name))
                case "zset":
                    entry["members"] = _pairs(self.raw("ZRANGE", name, 0, -1, "WITHSCORES"))
                case "list":
                    entry["items"] = self.raw("LRANGE", name, 0, -1)
                case "string":
                    entry["value"] = self.raw("GET", name)
                case "stream":
                    entry["entries"] = [(id, _pairs(fields)) for id, fields in self.raw("XRANGE", name, "-", "+")]
                case _:  # gone since the scan
                    continue
            state[name.removeprefix(prefix)] = entry
        return state

    def record(self, id: str = "job-a") -> dict[str, str]:
        return _pairs(self.raw("HGETALL", self.keys.job(id)))

    def entries(self, id: str = "job-a") -> list[tuple[str, dict[str, str]]]:
        return [(at, _pairs(fields)) for at, fields in self.raw("XRANGE", self.keys.events(id), "-", "+")]

    def where(self, id: str = "job-a") -> list[str]:
        """The sets that list the job."""
        return [
            name
            for name in ("ready", "scheduled", "leases", "dead")
            if self.raw("ZSCORE", self.keys.base + name, id) is not None
        ]

    def score(self, set: str, id: str = "job-a") -> float:
        return float(self.raw("ZSCORE", self.keys.base + set, id))


def _text(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, (list, tuple)):
        return [_text(item) for item in value]
    return value


def _pairs(flat: list[Any]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def text_of(events: Sequence[Event[Any]]) -> str:
    """What a reader has joined: text so far, dropped at each restart and gap."""
    text = ""
    for event in events:
        if event.type in ("restarted", "gap"):
            text = ""
        elif event.type == "chunk":
            text += event.data
    return text
