"""What a failed attempt means: again or never, when, and under which text. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

from outlast.codec import _explain as explain_validation
from outlast.errors import InvalidArgumentError, RetryJobError, TerminalJobError
from outlast.queue import Queue

__all__ = [
    "backoff_ms",
    "encode_mended",
    "error_text",
    "is_retryable",
    "mend",
    "mend_deep",
    "quotes_input",
    "retry_after_ms",
]

MAX_ERROR = 2000
"""Characters of an error's text on a record: enough to find the cause, not a place to store pages of HTML."""


def is_retryable(error: BaseException) -> bool:
    """The default classification: everything but TerminalJobError may succeed at another attempt."""
    return not isinstance(error, TerminalJobError)


def backoff_ms(queue: Queue[Any, Any], attempt: int) -> int:
    """Exponential with full jitter: drawn evenly, so that jobs which failed together do not come back together."""
    ceiling = min(queue.max_backoff_ms, queue.backoff_ms * 2 ** min(attempt - 1, 40))
    return round(random.uniform(0, ceiling))


def retry_after_ms(queue: Queue[Any, Any], attempt: int, error: BaseException) -> int:
    """How long until the next attempt: as long as a RetryJobError says, otherwise the backoff."""
    if isinstance(error, RetryJobError) and error.retry_after is not None:
        return -int(-error.retry_after * 1000 // 1)
    return backoff_ms(queue, attempt)


def quotes_input(error: BaseException | None) -> bool:
    """Whether the text of the error, or of one behind it, quotes what was validated: a prompt, perhaps."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if _is_validation_error(error):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _is_validation_error(error: BaseException) -> bool:
    kind = type(error)
    return kind.__name__ == "ValidationError" and kind.__module__.partition(".")[0].startswith("pydantic")


def error_text(error: BaseException) -> str:
    """``<Name>: <message>``, at most 2,000 characters, for any exception whatever its own str() does."""
    name = type(error).__name__
    try:
        message = explain_validation(error) if _is_validation_error(error) else str(error)
    except BaseException:  # __str__ of a foreign class: whatever it raises must not decide about the job
        message = "(its message cannot be read)"
    whole = f"{name}: {message}" if message else name
    if len(whole) > MAX_ERROR:
        whole = whole[: MAX_ERROR - 1] + "…"
    return mend(whole)


def mend(text: str) -> str:
    """Text that UTF-8 can hold: halves of surrogate pairs are joined, and one without its other half becomes U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def mend_deep(value: Any) -> Any:
    """`mend` for every text inside plain lists and dicts; what is nested too deep for JSON stays as it is."""
    try:
        return _mend_deep(value)
    except RecursionError:
        return value


def _mend_deep(value: Any) -> Any:
    if isinstance(value, str):
        return mend(value)
    if isinstance(value, (list, tuple)):
        return [_mend_deep(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {_mend_deep(key): _mend_deep(item) for key, item in cast("Any", value).items()}
    return value


def encode_mended(encode: Callable[[Any], str], value: Any) -> str:
    """The text of a value that was paid for. Emitted text is mended; what repeats it gets the same treatment."""
    try:
        return encode(value)
    except InvalidArgumentError:
        mended = mend_deep(value)
        if mended == value:
            raise
        return encode(mended)
