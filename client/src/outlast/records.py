"""What the queue gives back: jobs, events, counts. All frozen; times are aware datetimes in UTC."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from .queue import Queue

__all__ = [
    "TERMINAL",
    "Cancelled",
    "Chunk",
    "Completed",
    "Data",
    "Enqueued",
    "Event",
    "EventPage",
    "Failed",
    "Gap",
    "Job",
    "JobStatus",
    "Progress",
    "Restarted",
    "Stats",
]

P = TypeVar("P")
R = TypeVar("R")

JobStatus = Literal["waiting", "scheduled", "active", "completed", "failed", "cancelled"]

TERMINAL: frozenset[str] = frozenset({"completed", "failed", "cancelled"})
"""The statuses that a job never leaves, except by retry_dead or when its id is used again."""


@dataclass(frozen=True, slots=True)
class Enqueued:
    """The answer of enqueue. `deduplicated`: the key belonged to a job already, and `id` is that job's."""

    id: str
    deduplicated: bool
    sync_token: str | None = field(default=None, repr=False, compare=False)
    """Upstash's read-your-writes token: hand it to another function's client so that its get() sees this job."""


@dataclass(frozen=True, repr=False)
class Job(Generic[P, R]):
    """A job's record at one moment."""

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

    def __repr__(self) -> str:
        return f"Job(id={self.id!r}, status={self.status!r}, attempt={self.attempt})"


@dataclass(frozen=True, slots=True)
class Stats:
    """How many jobs are where. `oldest_waiting`: seconds since the longest waiting job became ready, or None."""

    waiting: int
    scheduled: int
    active: int
    dead: int
    oldest_waiting: float | None


@dataclass(frozen=True, slots=True)
class _EventBase:
    id: str
    """The cursor to resume after."""
    attempt: int


@dataclass(frozen=True, slots=True)
class Chunk(_EventBase):
    """Text that the handler emitted."""

    data: str
    type: Literal["chunk"] = "chunk"


@dataclass(frozen=True, slots=True)
class Data(_EventBase):
    """A JSON value that the handler emitted."""

    value: Any
    type: Literal["data"] = "data"


@dataclass(frozen=True, slots=True)
class Progress(_EventBase):
    """How far the handler has got, 0 to 1."""

    value: float
    type: Literal["progress"] = "progress"


@dataclass(frozen=True, slots=True)
class Restarted(_EventBase):
    """Attempt `attempt` starts over: drop everything that earlier attempts gave."""

    type: Literal["restarted"] = "restarted"


@dataclass(frozen=True, slots=True)
class Gap(_EventBase):
    """Events between the cursor and `first_available` were trimmed: drop what you have."""

    first_available: str
    type: Literal["gap"] = "gap"


@dataclass(frozen=True, slots=True)
class Completed(_EventBase, Generic[R]):
    """The end: the job's result."""

    result: R
    type: Literal["completed"] = "completed"


@dataclass(frozen=True, slots=True)
class Failed(_EventBase):
    """The end: no attempt is left, or the failure was for good."""

    error: str
    type: Literal["failed"] = "failed"


@dataclass(frozen=True, slots=True)
class Cancelled(_EventBase):
    """The end: somebody cancelled the job."""

    type: Literal["cancelled"] = "cancelled"


Event = Chunk | Data | Progress | Restarted | Gap | Completed[R] | Failed | Cancelled


@dataclass(frozen=True, slots=True)
class EventPage(Generic[R]):
    """One page of events. `next`: the cursor for the next call; `done`: nothing will follow."""

    events: list[Event[R]]
    next: str | None
    done: bool
