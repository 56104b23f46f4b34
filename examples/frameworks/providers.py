"""What an error of a model provider means for a job. The SDKs of OpenAI and Anthropic name their errors alike."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

from outlast import OutlastError, RateLimitedError, RetryJobError, TerminalJobError

FINAL = {"invalid_request_error", "authentication_error", "permission_error", "not_found_error", "insufficient_quota"}
PAUSE = 10.0
"""Seconds to pause when a 429 does not say how long."""


@contextmanager
def provider(*errors: type[Exception]) -> Iterator[None]:
    """Around calls of an SDK: turns its errors (and those of its connection) into the job's."""
    try:
        yield
    except (*errors, httpx2.TransportError) as error:
        raise job_error(error) from error


def job_error(error: Any) -> OutlastError:
    """Try again, pause, or give up."""
    status = getattr(error, "status_code", None)
    body = getattr(error, "body", None)
    detail = body.get("error", body) if isinstance(body, dict) else {}
    kinds = {detail.get("code"), detail.get("type")} if isinstance(detail, dict) else set()
    # Not the provider's own words: they may quote the prompt, and this text is kept on the record.
    what = " ".join(str(part) for part in (type(error).__name__, status, *sorted(filter(None, kinds))) if part)
    if kinds & FINAL:
        return TerminalJobError(what)
    after = retry_after(error)
    if status == 429 or "rate_limit_error" in kinds:
        return RateLimitedError(what, retry_after=PAUSE if after is None else after)
    # An error inside a stream comes with the status 200 or none at all.
    if status in (None, 200, 408, 409) or status >= 500:
        return RetryJobError(what, retry_after=after)
    return TerminalJobError(what)


def retry_after(error: Any) -> float | None:
    """Seconds that the provider asks to wait. A date instead of seconds counts as nothing said."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    for name, unit in (("retry-after-ms", 1000), ("retry-after", 1)):
        try:
            return max(0.0, float(headers[name]) / unit)
        except (KeyError, ValueError):
            continue
    return None
