"""outlast: a job queue for slow, streaming model calls. This distribution has the protocol and the HTTP clients.

Importing it loads neither httpx nor pydantic: a cold function pays for what it uses, when it uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import (
    AuthError,
    BudgetExceededError,
    BulkEnqueueError,
    ConfigurationError,
    IdempotencyConflictError,
    InvalidArgumentError,
    JobCancelledError,
    JobError,
    JobFailedError,
    JobInUseError,
    JobLeaseLostError,
    JobNotFoundError,
    JobStopped,
    OutlastError,
    QuotaExceededError,
    RateLimitedError,
    ReplyShapeError,
    RetryJobError,
    ServerError,
    StepValueError,
    StoreFullError,
    TerminalJobError,
    TransportError,
)
from .queue import Queue
from .records import Enqueued, JobStatus

if TYPE_CHECKING:
    from .aio import AsyncClient, AsyncJobs
    from .bulk import NewJob
    from .client import Client, Jobs
    from .events import (
        Cancelled,
        Chunk,
        Completed,
        Data,
        Event,
        EventPage,
        Failed,
        Gap,
        Progress,
        Restarted,
    )
    from .job import Job, JobInfo, Stats
    from .listing import JobPage, JobState, ListedJob
    from .rules import Rules

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncJobs",
    "AuthError",
    "BudgetExceededError",
    "BulkEnqueueError",
    "Cancelled",
    "Chunk",
    "Client",
    "Completed",
    "ConfigurationError",
    "Data",
    "Enqueued",
    "Event",
    "EventPage",
    "Failed",
    "Gap",
    "IdempotencyConflictError",
    "InvalidArgumentError",
    "Job",
    "JobCancelledError",
    "JobError",
    "JobFailedError",
    "JobInUseError",
    "JobInfo",
    "JobLeaseLostError",
    "JobNotFoundError",
    "JobPage",
    "JobState",
    "JobStatus",
    "JobStopped",
    "Jobs",
    "ListedJob",
    "NewJob",
    "OutlastError",
    "Progress",
    "Queue",
    "QuotaExceededError",
    "RateLimitedError",
    "ReplyShapeError",
    "Restarted",
    "RetryJobError",
    "Rules",
    "ServerError",
    "Stats",
    "StepValueError",
    "StoreFullError",
    "TerminalJobError",
    "TransportError",
]

_LAZY = {
    **dict.fromkeys(("Client", "Jobs"), "client"),
    **dict.fromkeys(("AsyncClient", "AsyncJobs"), "aio"),
    **dict.fromkeys(("Cancelled", "Chunk", "Completed", "Data", "Event", "EventPage", "Failed"), "events"),
    **dict.fromkeys(("Gap", "Progress", "Restarted"), "events"),
    **dict.fromkeys(("Job", "JobInfo", "Stats"), "job"),
    **dict.fromkeys(("JobPage", "JobState", "ListedJob"), "listing"),
    "NewJob": "bulk",
    "Rules": "rules",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'outlast' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
