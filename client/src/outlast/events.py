"""What a watcher gets: events and pages of them, all frozen. A cold function that only enqueues never loads this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

__all__ = [
    "Cancelled",
    "Chunk",
    "Completed",
    "Data",
    "Event",
    "EventPage",
    "Failed",
    "Gap",
    "Progress",
    "Restarted",
]

R = TypeVar("R")


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
"""What a watch yields."""


@dataclass(frozen=True, slots=True)
class EventPage(Generic[R]):
    """One page of events. `next`: the cursor for the next call; `done`: nothing will follow."""

    events: list[Event[R]]
    next: str | None
    done: bool
