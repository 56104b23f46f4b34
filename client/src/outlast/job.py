"""Jobs and counts as they are read back, all frozen; times are aware datetimes in UTC.

Apart from `records`, because a cold function that only enqueues need not load it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from datetime import datetime

    from .queue import Queue
    from .records import JobStatus

__all__ = ["Job", "JobInfo", "Stats"]

P = TypeVar("P")
R = TypeVar("R")


@dataclass(frozen=True, repr=False)
class JobInfo:
    """A job's record at one moment, without what it was given and what it made."""

    id: str
    status: JobStatus
    error: str | None
    """The last failure's text, kept over retries: a completed job can carry one."""
    attempt: int
    """Attempts that count against max_attempts: 0 before the first take."""
    starts: int
    """Times that a worker took the job; above `attempt` when an attempt was given back."""
    max_attempts: int
    progress: float
    priority: int
    created_at: datetime | None
    updated_at: datetime | None
    started_at: datetime | None
    """When the latest attempt started."""
    finished_at: datetime | None
    idempotency_key: str | None
    cancel_requested: bool
    owner: str | None
    usage: dict[str, float]
    """What its handlers have reported by ``job.usage``, over all attempts: a number for each counter."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self.id!r}, status={self.status!r}, attempt={self.attempt})"


@dataclass(frozen=True, repr=False)
class Job(JobInfo, Generic[P, R]):
    """A job's record at one moment."""

    _queue: Queue[P, R] = field(repr=False, compare=False)
    _payload: str | None = field(repr=False)
    _result: str | None = field(repr=False)

    @cached_property
    def payload(self) -> P:
        """The payload. Raises ReplyShapeError when the stored text does not fit the queue's declaration."""
        return self._queue.decode_payload(self._payload or "")

    @cached_property
    def result(self) -> R | None:
        """The result of a completed job, None before: look at `status` to tell that from a result of None."""
        if self.status != "completed":
            return None
        return self._queue.decode_result(self._result if self._result is not None else "null")


@dataclass(frozen=True, slots=True)
class Stats:
    """How many jobs are where. `oldest_waiting`: seconds since the longest waiting job became ready, or None."""

    waiting: int
    scheduled: int
    active: int
    dead: int
    oldest_waiting: float | None
