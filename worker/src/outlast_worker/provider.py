"""What a provider's refusal means for the job: try again, pause the queue, or give up."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, cast

from outlast._checks import Duration, to_ms
from outlast.errors import RateLimitedError, RetryJobError, TerminalJobError

from .policy import error_text

__all__ = ["provider_error"]

AT_ONCE = 1.0
"""Seconds of pause for a 429 that names 0, or a date that is past by this clock. It uses no attempt: without a pause
the provider would be asked as fast as it refuses, and without end."""


def provider_error(
    error: BaseException, *, pause: Duration = 30.0
) -> RetryJobError | RateLimitedError | TerminalJobError:
    """What to raise for an error that calling a provider ended with::

        try:
            reply = await client.chat.completions.create(…)
        except Exception as error:
            raise provider_error(error) from error

    By the HTTP status that the error carries, whichever client it is from (httpx, openai, anthropic, google-genai,
    requests, aiohttp, urllib): 429 pauses the queue and gives the attempt back, 408, 5xx and errors without a status
    (time-outs, lost connections) are tried again, and any other 4xx ends the job. Retry-After is obeyed; a 429 without
    one pauses for `pause` seconds, and one of 0 for a second. A 429 for an account that is out of money ends the job:
    no pause helps.

    Switch the client's own retries off (``max_retries=0``), or each attempt pays several times.
    """
    return meaning(_status(error), error_text(error), wait=_retry_after(error), pause=to_ms(pause, "pause") / 1000)


def meaning(
    status: int | None, said: str, *, wait: float | None, pause: float
) -> RetryJobError | RateLimitedError | TerminalJobError:
    """The rule itself: what a refusal with this status and text asks for. `wait`: seconds that the provider named."""
    if status == 429 and "insufficient_quota" not in said:
        return RateLimitedError(said, retry_after=pause if wait is None else wait or AT_ONCE)
    if status is None or status == 408 or status >= 500:
        return RetryJobError(said, retry_after=wait)
    return TerminalJobError(said)


def _status(error: BaseException) -> int | None:
    for source in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            value = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and 400 <= value < 600:
                return value
    return None


def _retry_after(error: BaseException) -> float | None:
    """Seconds, from the headers of the answer."""
    for source in (getattr(error, "response", None), error):
        pairs: Any = getattr(getattr(source, "headers", None), "items", None)
        if callable(pairs):
            found = {str(name).lower(): str(value).strip() for name, value in cast("Any", pairs())}
            for name, unit in (("retry-after-ms", 1000), ("retry-after", 1)):
                value = found.get(name, "")
                if re.fullmatch(r"\d{1,12}(\.\d+)?", value, re.ASCII):
                    return float(value) / unit
            with suppress(ValueError, TypeError):
                when = parsedate_to_datetime(found.get("retry-after", ""))
                return max(0.0, (when.astimezone(UTC) - datetime.now(UTC)).total_seconds())
    return None
