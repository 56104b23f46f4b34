"""RESP2, binary safe, with simple strings kept apart from bulk strings.

Upstash's base64 mode leaves the status `OK` as it is and encodes the *value* "OK", so the two must not
become the same Python object; redis-py's parser returns `bytes` for both.

    +OK  Status      -ERR …  Error      :1  int      $2  bytes      $-1  None      *1  list      *-1  NIL_ARRAY
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias


class Status(bytes):
    """A simple string, such as the reply to SET."""

    __slots__ = ()


class Error(bytes):
    """An error reply. The first word is its code."""

    __slots__ = ()

    @property
    def text(self) -> str:
        return self.decode("utf-8", "replace")


class ResultTooLarge(Error):
    """In place of a reply over the limit. The command has run, and HTTP says 200."""

    __slots__ = ()


class NilArray:
    """`*-1`: what XREAD answers when there is nothing. JSON null, like None, but another byte sequence."""

    __slots__ = ()


NIL_ARRAY: Final = NilArray()
OK: Final = Status(b"OK")

Reply: TypeAlias = "int | bytes | NilArray | list[Reply] | None"


class ProtocolError(Exception):
    """The other end does not speak RESP2; the connection is of no further use."""


class Parser:
    """Bytes in, whole replies out; nothing is parsed twice, however the bytes are cut.

    A reply of more than `limit` bytes comes out as the error that Upstash answers. Its bytes are counted and
    thrown away as they arrive, so that one LRANGE cannot take the gateway's memory.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.depth = 0  # 1 for the connections of transactions: the slots of EXEC are measured one by one
        self._buffer = bytearray()
        self._bulk = 0  # bytes of a bulk string, CRLF included, that are still to come
        self._size = 0  # of the reply (or slot) being read
        self._open: list[tuple[list[Reply], list[int]]] = []  # unfinished arrays and how many items each lacks

    def feed(self, data: bytes) -> list[Reply]:
        """The replies that `data` completes. Raises ProtocolError."""
        buffer = self._buffer
        buffer += data
        at = 0
        done: list[Reply] = []
        while True:
            value: Reply
            if self._bulk:
                here = len(buffer) - at
                if self._size > self.limit:
                    skipped = min(self._bulk, here)
                    at += skipped
                    self._bulk -= skipped
                    if self._bulk:
                        break
                    value = b""
                elif here < self._bulk:
                    break
                else:
                    value = bytes(buffer[at : at + self._bulk - 2])
                    at += self._bulk
                    self._bulk = 0
            else:
                end = buffer.find(b"\r\n", at)
                if end < 0:
                    break
                kind = buffer[at]
                line = bytes(buffer[at + 1 : end])
                self._size += end + 2 - at
                at = end + 2
                if kind == 36:  # $
                    length = _integer(line)
                    if length >= 0:
                        self._bulk = length + 2
                        self._size += length + 2
                        continue
                    value = None
                elif kind == 43:  # +
                    value = Status(line)
                elif kind == 58:  # :
                    value = _integer(line)
                elif kind == 42:  # *
                    length = _integer(line)
                    if length > 0:
                        self._open.append(([], [length]))
                        continue
                    value = NIL_ARRAY if length < 0 else []
                elif kind == 45:  # -
                    value = Error(line)
                else:
                    raise ProtocolError(f"a RESP2 reply does not start with the byte {kind}")
            while True:
                depth = len(self._open)
                if depth <= self.depth:
                    if self._size > self.limit:
                        value = ResultTooLarge(size_error(self.limit, self._size))
                    self._size = 0
                if not depth:
                    done.append(value)
                    break
                items, lacks = self._open[-1]
                if self._size <= self.limit:
                    items.append(value)
                lacks[0] -= 1
                if lacks[0]:
                    break
                value = self._open.pop()[0]
        del buffer[:at]
        return done


def _integer(line: bytes) -> int:
    try:
        return int(line)
    except ValueError:
        raise ProtocolError("a RESP2 length or integer is not a number") from None


def size_error(limit: int, actual: int) -> Error:
    return Error(b"ERR max request size exceeded. Limit: %d, Actual: %d" % (limit, actual))


def encode_command(args: Sequence[bytes]) -> bytes:
    """One command as the server reads it."""
    parts = [b"*%d\r\n" % len(args)]
    parts += [b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in args]
    return b"".join(parts)


def encode_commands(commands: Iterable[Sequence[bytes]]) -> bytes:
    return b"".join([encode_command(args) for args in commands])


def encode_reply(reply: Reply) -> bytes:
    """A reply as the server sent it, for `Upstash-Response-Format: resp2`."""
    match reply:
        case None:
            return b"$-1\r\n"
        case Status():
            return b"+%b\r\n" % reply
        case Error():
            return b"-%b\r\n" % reply.replace(b"\r", b" ").replace(b"\n", b" ")
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case int():
            return b":%d\r\n" % reply
        case list():
            return b"*%d\r\n%b" % (len(reply), b"".join([encode_reply(item) for item in reply]))
        case _:
            return b"*-1\r\n"
