"""What enqueue gives back, and the statuses that a job can have. Jobs as they are read back are in `job`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["TERMINAL", "Enqueued", "JobStatus"]

JobStatus = Literal["waiting", "scheduled", "active", "completed", "failed", "cancelled"]
"""Where a job is in its life."""

TERMINAL: frozenset[str] = frozenset({"completed", "failed", "cancelled"})
"""The statuses that a job never leaves, except by retry_dead or when its id is used again."""


@dataclass(frozen=True, slots=True)
class Enqueued:
    """The answer of enqueue. `deduplicated`: the key belonged to a job already, and `id` is that job's."""

    id: str
    deduplicated: bool
    sync_token: str | None = field(default=None, repr=False, compare=False)
    """Upstash's read-your-writes token: hand it to another function's client so that its get() sees this job."""
