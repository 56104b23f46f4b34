"""The TypeScript side of a mixed fleet, in the raw commands that facts about its wire format name, bugs included.

Its scripts are atomic and these are not, which makes no difference with one caller at a time.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from outlast.protocol import Keys
from outlast.protocol.keys import RANK

from .lab import Lab

LEASE = 60_000
TTL = 3_600_000


@dataclass
class Run:
    """A job that a foreign worker holds."""

    id: str
    payload: str
    attempt: int
    max_attempts: int
    token: str


class Benni:
    def __init__(self, lab: Lab) -> None:
        self.keys: Keys = lab.keys
        self.raw = lab.raw

    @property
    def now(self) -> int:
        """A client's clock; here it happens to be right."""
        seconds, micros = self.raw("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    def _get(self, id: str, name: str) -> Any:
        return self.raw("HGET", self.keys.job(id), name)

    def _set(self, id: str, /, **fields: object) -> None:
        self.raw("HSET", self.keys.job(id), *(part for pair in fields.items() for part in pair), "updatedAt", self.now)

    def _event(self, id: str, kind: str, text: str) -> str:
        added: str = self.raw("XADD", self.keys.events(id), "MAXLEN", "~", 10_000, "*", "t", kind, "d", text)
        return added

    def _queue_up(self, id: str) -> None:
        score = (9 - int(self._get(id, "priority") or 0)) * RANK + self.raw("INCR", self.keys.seq)
        self.raw("ZADD", self.keys.ready, score, id)

    def _ring(self) -> None:
        self.raw("LPUSH", self.keys.signal, "1")
        self.raw("LTRIM", self.keys.signal, 0, 999)

    # -- producer ------------------------------------------------------------------------------------------------

    def enqueue(self, id: str, payload: str = "{}", *, key: str = "", priority: int = 0, max_attempts: int = 3) -> str:
        if key and (holder := self.raw("GET", self.keys.idem(key))):
            return str(holder)
        assert self._get(id, "status") not in ("waiting", "scheduled", "active")
        if key:
            self.raw("SET", self.keys.idem(key), id)
        if (old := self._get(id, "idempotencyKey")) and old != key:
            self.raw("DEL", self.keys.idem(old))
        for entries in (self.keys.ready, self.keys.scheduled, self.keys.dead, self.keys.leases):
            self.raw("ZREM", entries, id)
        self.raw("DEL", self.keys.job(id), self.keys.events(id))
        self._set(
            id,
            id=id,
            payload=payload,
            status="waiting",
            attempt=0,
            maxAttempts=max_attempts,
            priority=priority,
            createdAt=self.now,
            progress=0,
            idempotencyKey=key,
            idemTtlMs=TTL,
        )
        self._queue_up(id)
        self._ring()
        return id

    def cancel(self, id: str) -> bool:
        status = self._get(id, "status")
        if status in (None, "completed", "failed", "cancelled"):
            return False
        self._set(id, cancelRequested=1)
        if status != "active":
            for entries in (self.keys.ready, self.keys.scheduled, self.keys.leases):
                self.raw("ZREM", entries, id)
            self._end(id, "cancelled", "")
        return True

    def retry_dead(self, id: str, max_attempts: int = 3) -> bool:
        if not self.raw("ZREM", self.keys.dead, id) or not self.raw("EXISTS", self.keys.job(id)):
            return False
        self._set(id, status="waiting", attempt=0, maxAttempts=max_attempts)
        self.raw("HDEL", self.keys.job(id), "finishedAt", "token", "result")
        self.raw("PERSIST", self.keys.job(id))
        self.raw("DEL", self.keys.events(id))
        self._queue_up(id)
        self._ring()
        return True

    # -- worker --------------------------------------------------------------------------------------------------

    def reserve(self) -> Run | None:
        for id in self.raw("ZRANGEBYSCORE", self.keys.scheduled, "-inf", self.now, "LIMIT", 0, 100):
            self.raw("ZREM", self.keys.scheduled, id)
            self._set(id, status="waiting")
            self._queue_up(id)
        for id in self.raw("ZRANGEBYSCORE", self.keys.leases, "-inf", self.now, "LIMIT", 0, 100):
            self.raw("ZREM", self.keys.leases, id)
            self.raw("HDEL", self.keys.job(id), "token")
            if self._get(id, "cancelRequested") == "1":
                self._end(id, "cancelled", "")
            elif int(self._get(id, "attempt")) < int(self._get(id, "maxAttempts") or 1):
                self._set(id, status="waiting", error="Worker lease expired before the job finished")
                self._queue_up(id)
            else:
                self._end(id, "failed", "Worker lease expired before the job finished")
        popped = self.raw("ZPOPMIN", self.keys.ready)
        if not popped:
            return None
        id = popped[0]
        attempt = int(self._get(id, "attempt") or 0) + 1
        if attempt > 1:
            marker = self._event(id, "restarted", str(attempt))
            self.raw("XTRIM", self.keys.events(id), "MINID", marker)
        token = str(uuid.uuid4())
        self._set(id, status="active", attempt=attempt, token=token, startedAt=self.now)
        self.raw("ZADD", self.keys.leases, self.now + LEASE, id)
        self.raw("LPOP", self.keys.signal)
        return Run(id, self._get(id, "payload"), attempt, int(self._get(id, "maxAttempts") or 1), token)

    def touch(self, run: Run, chunk: str | None = None) -> str:
        if self._get(run.id, "token") != run.token:
            return "lost"
        self.raw("ZADD", self.keys.leases, self.now + LEASE, run.id)
        if chunk is not None:
            self._event(run.id, "chunk", chunk)
        self._set(run.id)
        return "cancel" if self._get(run.id, "cancelRequested") == "1" else "ok"

    def settle(self, run: Run, status: str, body: str) -> str:
        if self._get(run.id, "token") != run.token:
            return "lost"
        if self._get(run.id, "cancelRequested") == "1":
            status, body = "cancelled", ""
        self.raw("ZREM", self.keys.leases, run.id)
        self.raw("HDEL", self.keys.job(run.id), "token")
        self._end(run.id, status, body)
        return status

    def retry(self, run: Run, error: str, delay: int = 0) -> None:
        assert self._get(run.id, "token") == run.token
        self.raw("ZREM", self.keys.leases, run.id)
        self.raw("HDEL", self.keys.job(run.id), "token")
        self._set(run.id, status="scheduled", error=error)
        self.raw("ZADD", self.keys.scheduled, self.now + delay, run.id)

    def _end(self, id: str, status: str, body: str) -> None:
        added = {"completed": {"result": body}, "failed": {"error": body}}.get(status, {})
        self._set(id, status=status, finishedAt=self.now, **added)
        if status == "failed":
            self.raw("ZADD", self.keys.dead, self.now, id)
            self.raw("ZREMRANGEBYSCORE", self.keys.dead, 0, self.now - TTL)
        self._event(id, status, body)
        self.raw("PEXPIRE", self.keys.job(id), TTL)
        self.raw("PEXPIRE", self.keys.events(id), TTL)
        if key := self._get(id, "idempotencyKey"):
            if status == "completed":
                self.raw("PEXPIRE", self.keys.idem(key), TTL)
            else:
                self.raw("DEL", self.keys.idem(key))

    # -- watcher -------------------------------------------------------------------------------------------------

    def watch(self, id: str, after: str = "0", text: str = "") -> tuple[str, str, str | None]:
        """The joined text, the cursor, and the terminal kind: what its reader makes of the stream now."""
        end = None
        for at, fields in self.raw("XRANGE", self.keys.events(id), f"({after}", "+"):
            entry = dict(zip(fields[::2], fields[1::2], strict=True))
            after = at
            match entry["t"]:
                case "chunk":
                    text += entry["d"]
                case "restarted":
                    text = ""
                case "completed" | "failed" | "cancelled":
                    end = entry["t"]
        return text, after, end
