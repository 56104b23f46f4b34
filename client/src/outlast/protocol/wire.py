"""How values travel: what a reply holds is read here, and an argument written. Nothing a server says is trusted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from ..errors import ReplyShapeError

__all__ = ["exact_text", "flag", "items", "maybe_text", "moment", "number", "one_of", "real", "table", "text", "when"]


def text(value: Any) -> str:
    """A reply string. Bytes that are not UTF-8 (a foreign writer's) become U+FFFD rather than an error."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise ReplyShapeError(f"expected text in the reply, got {type(value).__name__}")


def exact_text(value: Any) -> str:
    """As `text`, but bytes that are not UTF-8 become halves of surrogate pairs, which no encoder takes for text."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else text(value)


def maybe_text(value: Any) -> str | None:
    return None if value is None else text(value)


def number(value: Any, default: int = 0) -> int:
    """A stored number: benni may write 1.8e12 where an integer is meant."""
    if value is None or value == b"" or value == "":
        return default
    try:
        return int(value)
    except ValueError:
        try:
            return int(float(value))
        except (ValueError, OverflowError):
            return default


def items(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(cast("Sequence[Any]", value))
    raise ReplyShapeError(f"expected a list in the reply, got {type(value).__name__}")


def table(value: Any) -> dict[str, str]:
    """Of a reply that has fields and values in turn."""
    flat = [text(item) for item in items(value)]
    return dict(zip(flat[::2], flat[1::2], strict=True))


def real(value: Any) -> float:
    try:
        return float(text(value)) if value is not None else 0.0
    except ValueError:
        return 0.0


def when(value: Any) -> datetime | None:
    ms = number(value, -1)
    if ms < 0:
        return None
    try:
        return datetime.fromtimestamp(ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def one_of(*known: str) -> Callable[[Any], str]:
    def decode(reply: Any) -> str:
        word = text(reply)
        if word not in known:
            raise ReplyShapeError(f"expected one of {', '.join(known)} in the reply")
        return word

    return decode


def moment(now: int | None) -> str:
    return "" if now is None else str(now)


def flag(value: bool) -> str:
    return "1" if value else "0"
