"""Events as browsers see them: one projection to JSON, one encoding as Server-Sent Events.

What the encoding must survive: parsers that split on any Unicode line end (so no such character stays raw), parsers
that dispatch on every blank line (so `retry` travels inside an event's block and keep-alives have one newline), and
EventSource's own event names (so no kind is called error, open or message).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, cast, overload

from outlast import Cancelled, Chunk, Completed, Data, Event, Failed, Gap, Progress, Restarted
from outlast.errors import ReplyShapeError

__all__ = [
    "KEEP_ALIVE",
    "SHORT",
    "SSE_HEADERS",
    "FailureText",
    "chunk_frame",
    "dump",
    "frame",
    "generic_failure",
    "parse_result",
    "project",
    "sse_frames",
]

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    # no-transform: a proxy that compresses also buffers. X-Accel-Buffering is nginx's switch for the same.
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
    "X-Content-Type-Options": "nosniff",
    "Vary": "Accept",
}

KEEP_ALIVE = b":\n"
"""A comment with a single newline: a blank line after it would be an empty event to httpx-sse and its copies."""

SHORT = 4096
"""Characters of a chunk whose frame is kept for the job's other viewers: 512 of them are a few MB at most."""

FailureText = Callable[[str], str]
"""From the text on the record to what an end user may read."""

_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def generic_failure(_: str) -> str:
    """What end users read of a failure: the record's text may name hosts, keys or prompts."""
    return "The job failed."


def _plain(value: object) -> object:
    """What json cannot write: models and other types of the queue's declaration."""
    from pydantic_core import to_jsonable_python

    return to_jsonable_python(value)


def dump(value: Any) -> bytes:
    """One line of JSON in UTF-8, whatever is in it: foreign writers may have stored NaN or half a surrogate pair."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
    except ValueError:
        loose = json.dumps(value, default=_plain)
        text = json.dumps(json.loads(loose, parse_constant=lambda _: None), ensure_ascii=False, separators=(",", ":"))
    try:
        return text.translate(_LINE_ENDS).encode()
    except UnicodeEncodeError:
        return json.dumps(json.loads(text), separators=(",", ":")).encode()


def parse_result(text: str) -> Any:
    """A stored result as JSON to show; the text itself where a codec of the queue's own wrote something else."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def project(event: Event[Any], failure_text: FailureText = generic_failure) -> tuple[str, dict[str, Any]]:
    """The kind of an event and its data, the same in frames and in JSON pages."""
    match event:
        case Chunk():
            return "chunk", {"text": event.data}
        case Data():
            return "data", {"value": event.value}
        case Progress():
            return "progress", {"value": event.value}
        case Restarted():
            return "restarted", {"attempt": event.attempt}
        case Gap():
            return "gap", {"first_available": event.first_available}
        case Completed():
            return "completed", {"result": event.result}
        case Failed():
            return "failed", {"error": failure_text(event.error)}
        case Cancelled():
            return "cancelled", {}
        case _:
            raise ReplyShapeError(f"{type(cast('object', event)).__name__} is no event of a job")


def frame(kind: str, data: Any, *, id: str | None = None, retry: int | None = None) -> bytes:
    """One event's block. `retry`: milliseconds after which the viewer connects again when the connection ends."""
    lines = [b"id: %b\n" % id.encode()] if id else []
    if retry is not None:
        lines.append(b"retry: %d\n" % retry)
    return b"".join((*lines, b"event: %b\ndata: " % kind.encode(), dump(data), b"\n\n"))


@lru_cache(maxsize=512)
def chunk_frame(id: str, text: str) -> bytes:
    """The frame of a chunk of at most `SHORT` characters: made once for all who watch the job."""
    return frame("chunk", {"text": text}, id=id)


@overload
def sse_frames(events: AsyncIterable[Event[Any]], *, failure_text: FailureText = ...) -> AsyncIterator[bytes]: ...
@overload
def sse_frames(events: Iterable[Event[Any]], *, failure_text: FailureText = ...) -> Iterator[bytes]: ...
def sse_frames(
    events: AsyncIterable[Event[Any]] | Iterable[Event[Any]], *, failure_text: FailureText = generic_failure
) -> AsyncIterator[bytes] | Iterator[bytes]:
    """The frames of any ``watch()``, for the streaming response of another framework, plain or async.

    The same frames as `Edge` sends, without its keep-alives, limits and `state`: give watch() a `timeout` below the
    platform's, answer with the content type ``text/event-stream``, and pass ``Last-Event-ID`` on as `after`.
    `failure_text` makes of a failure's text what end users may read; by default one sentence for all.
    """

    def one(event: Event[Any]) -> bytes:
        kind, data = project(event, failure_text)
        return frame(kind, data, id=event.id)

    if isinstance(events, AsyncIterable):
        return (one(event) async for event in events)
    return (one(event) for event in events)
