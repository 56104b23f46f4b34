"""Every error that outlast raises.

::

    OutlastError
     ├ InvalidArgumentError (ValueError)  nothing was sent: mend the argument that it names
     ├ ConfigurationError                 nothing was sent: no address, no token, a package is missing
     ├ TransportError  .maybe_applied     no reply to trust: refused, timed out, 5xx, not JSON
     ├ ServerError     .code              the database or the gateway said no
     │  ├ AuthError                       wrong or missing token, or one without the right
     │  ├ StoreFullError                  no memory left: free some, then try again
     │  └ QuotaExceededError              the plan's request limit is used up: do not retry
     ├ BulkEnqueueError .outcomes         enqueue_many(): not all of the jobs were made
     ├ ReplyShapeError                    done, but the answer or the stored value is not ours
     ├ JobError        .job_id
     │  ├ JobNotFoundError                unknown id, or the record has expired
     │  ├ JobInUseError                   the id belongs to a job that has not finished
     │  ├ IdempotencyConflictError        the key was used with another payload
     │  ├ JobFailedError                  wait(): the job ended as failed
     │  ├ JobCancelledError               wait(): the job ended as cancelled
     │  └ JobLeaseLostError               in a handler: stop working, somebody else owns the job
     ├ RetryJobError   .retry_after       raised by handlers: try again, then
     ├ RateLimitedError .retry_after      raised by handlers: pause the queue, give the attempt back
     └ TerminalJobError                   raised by handlers: never try again
        ├ BudgetExceededError             by job.usage: the job has used more than it may
        └ StepValueError (also InvalidArgumentError)  a step's value cannot be kept: the job ends

    JobStopped (BaseException)            in a plain handler: the job was stopped; let it pass
"""

from __future__ import annotations

from datetime import timedelta
from math import isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .records import Enqueued

__all__ = [
    "AuthError",
    "BudgetExceededError",
    "BulkEnqueueError",
    "ConfigurationError",
    "IdempotencyConflictError",
    "InvalidArgumentError",
    "JobCancelledError",
    "JobError",
    "JobFailedError",
    "JobInUseError",
    "JobLeaseLostError",
    "JobNotFoundError",
    "JobStopped",
    "OutlastError",
    "QuotaExceededError",
    "RateLimitedError",
    "ReplyShapeError",
    "RetryJobError",
    "ServerError",
    "StepValueError",
    "StoreFullError",
    "TerminalJobError",
    "TransportError",
]


class OutlastError(Exception):
    """The root of the tree: catch it to catch all of them."""


class InvalidArgumentError(OutlastError, ValueError):
    """An argument that cannot work. Nothing was sent."""


class ConfigurationError(OutlastError):
    """The client or worker cannot be built as asked. Nothing was sent."""


class TransportError(OutlastError):
    """No reply that can be trusted.

    `maybe_applied` is False when the request certainly did not reach the database. When it is True, the call may
    have taken effect: calling again is safe for every call of this library (each one knows its own repeat).
    `status` is the HTTP status, when there was one. `job_id` is set by enqueue: the id that the job has, if it exists.
    """

    def __init__(
        self,
        message: str,
        *,
        maybe_applied: bool = True,
        status: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.maybe_applied = maybe_applied
        self.status = status
        self.retry_after = retry_after
        self.job_id: str | None = None


class ServerError(OutlastError):
    """The database or the gateway refused the command. `code` is the first word of its message, such as READONLY."""

    def __init__(self, message: str, *, code: str = "ERR") -> None:
        super().__init__(message)
        self.code = code


class AuthError(ServerError):
    """The token or password is wrong, missing, or has no right to do this."""


class StoreFullError(ServerError):
    """The database has no memory left for a write. Reads, cancels and settles still work."""


class QuotaExceededError(ServerError):
    """The plan's request limit is used up. Retrying only makes it worse."""


class ReplyShapeError(OutlastError):
    """The command ran, but its answer, or a stored value, is not what this library writes."""


class BulkEnqueueError(OutlastError):
    """Not all jobs of an enqueue_many were made. `outcomes` has for each, in order, its `Enqueued` or its error.

    A TransportError among them has `job_id`, the id that the job has if it was made. Its `maybe_applied` is False for
    those that were not sent any more.
    """

    def __init__(self, message: str, outcomes: list[Enqueued | OutlastError]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


class JobError(OutlastError):
    """An error about one job, `job_id`."""

    def __init__(self, message: str, job_id: str) -> None:
        super().__init__(message)
        self.job_id = job_id


class JobNotFoundError(JobError):
    """No job has this id: it never had, or its record has expired."""


class JobInUseError(JobError):
    """The id belongs to a job that has not finished. Nothing was written."""


class IdempotencyConflictError(JobError):
    """The idempotency key belongs to a job (`job_id`) with another payload. Nothing was written."""


class JobFailedError(JobError):
    """The job ended as failed; `error` is the text on its record."""

    def __init__(self, message: str, job_id: str, error: str) -> None:
        super().__init__(message, job_id)
        self.error = error


class JobCancelledError(JobError):
    """The job ended as cancelled: there is no result."""


class JobLeaseLostError(JobError):
    """The lease is gone: another worker may own the job. Nothing was written; stop working on it."""


def _retry_after(value: object, owner: str) -> float:
    """Seconds until the retry. Refused at construction, so that a bad value shows up where it was made."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value) or value < 0:
        raise InvalidArgumentError(
            f"{owner}: retry_after={value!r} is not a delay; give seconds as a finite number >= 0, or a timedelta"
        )
    return min(float(value), MAX_DELAY)


MAX_DELAY = 365 * 86_400.0
"""Seconds. The longest delay of a job or a retry: a year. A longer retry_after is cut to it."""


class RetryJobError(OutlastError):
    """Raise it in a handler: this attempt failed, try again.

    With `retry_after` (seconds or timedelta, at most a year) exactly then; without it after the usual backoff.
    A value that is not a finite number >= 0 raises InvalidArgumentError here, at construction.
    """

    def __init__(self, message: str = "", *, retry_after: float | timedelta | None = None) -> None:
        super().__init__(message)
        self.retry_after = None if retry_after is None else _retry_after(retry_after, "RetryJobError")


class RateLimitedError(OutlastError):
    """Raise it in a handler: the provider asked for a pause.

    The attempt is given back and the whole queue, on all workers, takes nothing for `retry_after` seconds. An
    earlier time never shortens a pause that is in force.
    """

    def __init__(self, message: str = "", *, retry_after: float | timedelta) -> None:
        super().__init__(message)
        self.retry_after = _retry_after(retry_after, "RateLimitedError")


class TerminalJobError(OutlastError):
    """Raise it in a handler: the job has failed for good; another attempt would fail the same way."""


class BudgetExceededError(TerminalJobError):
    """The job has used more than its budget allows. It has failed for good, whatever its handler makes of this."""


class StepValueError(InvalidArgumentError, TerminalJobError):
    """A step returned what is no JSON, or too large. The job has failed for good: it would be paid for again."""


class JobStopped(BaseException):
    """Raised by emit, progress and heartbeat of a plain (threaded) handler once its job was stopped.

    A BaseException like CancelledError, so that `except Exception` around a provider call does not swallow it.
    Let it pass: the outcome is decided by the reason of the stop, not by how the handler ends.
    """

    def __init__(self, reason: str, job_id: str) -> None:
        super().__init__(f"job {job_id!r} was stopped: {reason}")
        self.reason = reason
        self.job_id = job_id
