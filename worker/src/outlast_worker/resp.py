"""RESP2, the words of the database's wire: commands out, replies in. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from outlast.transport import code_of

_hiredis: Any
try:
    import hiredis as _hiredis
except ImportError:
    _hiredis = None

__all__ = ["Refusal", "Replies", "pack", "replies"]


LONG = 65536
"""Bytes of a list from which on what is there of it is kept, until the rest has come."""


class Refusal:
    """An error reply. It is a value, not an exception: its neighbours in the pipeline have replies of their own."""

    __slots__ = ("code", "text")

    def __init__(self, line: bytes) -> None:
        self.text = line.decode("utf-8", "replace")
        self.code = code_of(self.text)


def pack(command: Sequence[str]) -> bytes:
    """One command as the server reads it."""
    whole = f"*{len(command)}\r\n" + "".join([f"${len(argument)}\r\n{argument}\r\n" for argument in command])
    if whole.isascii():  # characters are bytes: no need to encode each argument by itself
        return whole.encode()
    parts = [b"*%d\r\n" % len(command)]
    for argument in command:
        data = argument.encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


class _Incomplete(Exception):
    """The reply goes on; it cannot be whole before `need` bytes are there."""

    def __init__(self, need: int) -> None:
        self.need = need


def _parse(data: bytes, at: int) -> tuple[Any, int]:
    """The RESP2 reply at `at`, and where it ends."""
    end = data.find(b"\r\n", at)
    if end < 0:
        raise _Incomplete(len(data) + 1)
    kind = data[at]
    line = data[at + 1 : end]
    end += 2
    if kind == 36:  # $
        size = int(line)
        if size < 0:
            return None, end
        stop = end + size
        if len(data) < stop + 2:
            raise _Incomplete(stop + 2)
        return data[end:stop], stop + 2
    if kind == 58:  # :
        return int(line), end
    if kind == 42:  # *
        size = int(line)
        if size < 0:
            return None, end
        out: list[Any] = []
        for _ in range(size):
            # Nearly all of what comes is text in lists, so its case is here once more, without a call for each.
            if data[end : end + 1] == b"$" and (line_end := data.find(b"\r\n", end)) > 0:
                length = int(data[end + 1 : line_end])
                stop = line_end + 2 + length
                if length >= 0 and stop + 2 <= len(data):
                    out.append(data[line_end + 2 : stop])
                    end = stop + 2
                    continue
            value, end = _parse(data, end)
            out.append(value)
        return out, end
    if kind == 43:  # +
        return line, end
    if kind == 45:  # -
        return Refusal(line), end
    raise ValueError(kind)


class Replies:
    """Bytes in, whole replies out."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._need = 1
        self._list: list[Any] | None = None
        """What is there of a long list, so that it is not read from its beginning whenever more of it arrives."""
        self._left = 0

    def feed(self, data: bytes, out: list[Any]) -> None:
        """Append to `out` what `data` completes. ValueError: the other end does not speak RESP2."""
        self._parts.append(data)
        self._size += len(data)
        if self._size < self._need:
            return  # in the middle of a long payload: parsing again would find the same
        data = b"".join(self._parts)
        at = 0
        self._need = 1
        while at < len(data):
            try:
                value, at = _parse(data, at)
            except _Incomplete as more:
                if self._list is None and data[at] == 42 and len(data) - at > LONG:
                    end = data.index(b"\r\n", at)
                    self._list, self._left, at = [], int(data[at + 1 : end]), end + 2
                    continue
                self._need = more.need - at
                break
            if self._list is None:
                out.append(value)
                continue
            self._list.append(value)
            self._left -= 1
            if self._left == 0:
                out.append(self._list)
                self._list = None
        self._parts = [data[at:]] if at < len(data) else []
        self._size = len(data) - at


class _Reader(Protocol):
    def feed(self, data: bytes, out: list[Any]) -> None: ...


class _Fast:
    """The same by hiredis, where it is installed: a reserved job has a dozen parts, and C reads them for nothing."""

    def __init__(self) -> None:
        self._reader = _hiredis.Reader(
            protocolError=ValueError, replyError=_refusal, notEnoughData=_MORE, encoding=None
        )

    def feed(self, data: bytes, out: list[Any]) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not _MORE:
            out.append(reply)


_MORE: Any = object()


def _refusal(line: str) -> Any:
    return Refusal(line.encode("utf-8", "surrogateescape"))


def replies() -> _Reader:
    """A reader for one connection."""
    return Replies() if _hiredis is None else _Fast()
