"""Checks of arguments, each before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from math import isfinite
from typing import Any, TypeGuard, cast

from .errors import MAX_DELAY, InvalidArgumentError

__all__ = [
    "Duration",
    "check_amounts",
    "check_count",
    "check_id",
    "check_priority",
    "check_queue_name",
    "check_several",
    "check_webhook",
    "is_dict",
    "is_list",
    "to_ms",
]

Duration = float | timedelta
"""Seconds as a number, or a timedelta."""

MAX_AMOUNT = 1e15
"""Whole numbers below are exact wherever they are added up."""
MAX_COUNTERS = 50

MAX_ID_BYTES = 512
"""UTF-8 bytes of a job id or idempotency key. Room for a hash, a path or a URL; a bound on what a key costs."""


def is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def is_dict(value: object) -> TypeGuard[dict[Any, Any]]:
    return isinstance(value, dict)


def to_ms(value: object, name: str, *, least: float = 0.0, most: float = MAX_DELAY) -> int:
    """`value` in whole milliseconds, rounded up so that a positive duration never becomes none."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise InvalidArgumentError(
            f"{name}={value!r} is {type(value).__name__}; give seconds as a number, or a timedelta"
        )
    if isinstance(seconds, float) and not isfinite(seconds):
        raise InvalidArgumentError(f"{name}={value!r} is not finite; give seconds between {least:g} and {most:.15g}")
    if not least <= seconds <= most:
        raise InvalidArgumentError(f"{name}={value!r} is out of range; give seconds between {least:g} and {most:.15g}")
    return -int(-seconds * 1000 // 1)


def check_count(value: object, name: str, *, least: int = 1, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidArgumentError(f"{name}={value!r} is out of range; give a whole number from {least} to {most}")
    return value


def check_amounts(value: Mapping[Any, Any], name: str) -> dict[str, float]:
    """Numbers >= 0 by the name of their counter, such as {"input_tokens": 1000, "cost": 0.25}."""
    if not isinstance(cast("object", value), Mapping):
        raise InvalidArgumentError(f"{name} is {type(value).__name__}; give a dict of numbers by counter")
    checked: dict[str, float] = {}
    for counter, amount in value.items():
        check_id(counter, f"counter of {name}")
        if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not 0 <= amount < MAX_AMOUNT:
            raise InvalidArgumentError(f"{name}: {counter}={amount!r} is no number from 0 to {MAX_AMOUNT:g}")
        checked[counter] = amount
    if len(checked) > MAX_COUNTERS:
        raise InvalidArgumentError(f"{name} has {len(checked)} counters; give at most {MAX_COUNTERS}")
    return checked


def check_several(value: object, name: str) -> None:
    """A list or the like. One text or dict in its place could be walked, too: letter by letter, key by key."""
    kind = type(value).__name__
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidArgumentError(f"{name} is {kind}; give a list, of a single one as well")


def check_priority(value: object) -> int:
    return check_count(value, "priority", least=0, most=9)


def check_id(value: object, name: str = "id") -> str:
    """A job id or idempotency key: any text of 1 to 512 UTF-8 bytes without control characters.

    Ids travel in keys, URLs, log lines and SSE frames; a line break or NUL in one could forge the next.
    """
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{name} is {type(value).__name__}; give a str")
    if not value:
        raise InvalidArgumentError(f"{name} is empty; give 1 to {MAX_ID_BYTES} bytes of text")
    try:
        size = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"{name} has half a surrogate pair; give text that UTF-8 can hold") from None
    if size > MAX_ID_BYTES:
        raise InvalidArgumentError(f"{name} has {size} bytes; give at most {MAX_ID_BYTES} (hash longer ones)")
    if (
        any(ord(character) < 32 or 127 <= ord(character) < 160 for character in value)
        or "\u2028" in value
        or "\u2029" in value
    ):
        raise InvalidArgumentError(f"{name}={value[:40]!r} has control characters or line breaks; leave them out")
    return value


def check_queue_name(value: object, name: str = "name", *, hooks: bool = False) -> str:
    """A queue's name becomes the hash tag of its keys, so it holds no braces.

    With `hooks` it may be ``{name}:hooks``, the queue on which the webhooks of `name` wait under its hash tag.
    """
    checked = check_id(value, name)
    plain = checked[1:-7] if hooks and checked[0] == "{" and checked.endswith("}:hooks") else checked
    if "{" in plain or "}" in plain or not plain:
        raise InvalidArgumentError(
            f"{name}={checked!r} has a brace; the name is the hash tag of all keys: leave braces out"
        )
    return checked


def check_webhook(value: object) -> str:
    """The URL of a webhook: https, or http on this machine. No message quotes its path, which may be a secret.

    Whether its host is one that a worker should talk to shows only when it is resolved, at each delivery.
    """
    import re
    from urllib.parse import urlsplit

    if not isinstance(value, str):
        raise InvalidArgumentError(f"webhook is {type(value).__name__}; give a URL")
    if len(value) > 2048 or not value.isascii() or not value.isprintable() or " " in value or "\\" in value:
        raise InvalidArgumentError("webhook is no URL of at most 2,048 ASCII characters; escape the others with %")
    try:
        parts = urlsplit(value)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise InvalidArgumentError("webhook is no URL; give one such as https://example.com/hook") from None
    if "@" in parts.netloc or parts.fragment or port == 0:
        raise InvalidArgumentError("webhook has a user, a fragment or port 0; leave them out")
    if not re.fullmatch(r"[a-z0-9._-]+", host) and not (":" in host and re.fullmatch(r"[0-9a-f:.]+", host)):
        raise InvalidArgumentError("webhook names no host that DNS can hold; give one such as https://example.com/hook")
    local = host in ("localhost", "::1") or re.fullmatch(r"127(\.\d+){3}", host)
    if parts.scheme != "https" and not (parts.scheme == "http" and local):
        raise InvalidArgumentError("webhook is not https; only this machine is reached by http://")
    return value
