"""The HTTP side of the wire: commands out of JSON bodies and paths, replies into JSON."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, cast
from urllib.parse import unquote_to_bytes

from outlast_worker.gateway.commands import is_ok
from outlast_worker.gateway.resp import Error, NilArray, Reply


class BadRequest(Exception):
    """The request cannot be understood; the message is the answer."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.text = text
        self.status = status


def _number(text: str) -> str:
    """A JSON float the way Upstash passes it on: no exponent, no `.0`."""
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise BadRequest("ERR failed to parse command: a number is out of range")
    plain = format(Decimal(repr(value)), "f")  # bounded: a float has at most 325 places
    return plain.removesuffix(".0") if value else "0"


def _constant(text: str) -> str:
    raise BadRequest(f"ERR failed to parse command: invalid JSON value {text}")


_decoder = json.JSONDecoder(parse_int=str, parse_float=_number, parse_constant=_constant)
_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _load(body: bytes) -> list[Any]:
    text = body.decode("utf-8", "replace").strip(" \t\r\n")
    if not text:
        raise BadRequest("EOF")
    if text[0] != "[":
        raise BadRequest("expected JSON array")
    try:
        return cast("list[Any]", _decoder.decode(text))
    except RecursionError:
        raise BadRequest('ERR unsupported arg type: "[": json.Delim') from None
    except ValueError:
        raise BadRequest("ERR failed to parse command: the body is not valid JSON") from None


def _command(items: Sequence[object]) -> list[bytes]:
    if not items:
        raise BadRequest("ERR empty command")
    args: list[bytes] = []
    for item in items:
        if isinstance(item, str):
            try:
                args.append(item.encode())
            except UnicodeEncodeError:  # half of a surrogate pair: Go's decoder puts U+FFFD there
                args.append(item.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode())
        elif isinstance(item, bool):
            args.append(b"true" if item else b"false")
        elif item is None:
            raise BadRequest("ERR null args are not supported")
        else:
            raise BadRequest(f'ERR unsupported arg type: "{"[" if isinstance(item, list) else "{"}": json.Delim')
    return args


def parse_command(body: bytes) -> list[bytes]:
    """The command in the body of `POST /`. Numbers arrive as their text. Raises BadRequest."""
    return _command(_load(body))


def parse_commands(body: bytes) -> list[list[bytes]]:
    """The commands in the body of `/pipeline` and `/multi-exec`. Raises BadRequest."""
    commands: list[list[bytes]] = []
    for item in _load(body):
        if not isinstance(item, list):
            raise BadRequest("expected JSON array")
        commands.append(_command(cast("list[object]", item)))
    if not commands:
        raise BadRequest("ERR empty command")
    return commands


def split_path(raw_path: bytes) -> list[bytes]:
    """The segments of a path, decoded one by one, so that %2F stays inside its segment. `//` counts as `/`."""
    if b"://" in raw_path and not raw_path.startswith(b"/"):  # the absolute form that a proxy is sent
        raw_path = b"/" + raw_path.partition(b"://")[2].partition(b"/")[2]
    return [unquote_to_bytes(part) for part in raw_path.split(b"/") if part]


def split_query(query: bytes) -> list[tuple[bytes, bytes | None]]:
    """The options of a query string in their order; None for one without `=`."""
    options: list[tuple[bytes, bytes | None]] = []
    for part in query.split(b"&"):
        if part:
            name, equals, value = part.replace(b"+", b" ").partition(b"=")
            options.append((unquote_to_bytes(name), unquote_to_bytes(value) if equals else None))
    return options


def _plain(reply: Reply) -> object:
    if isinstance(reply, bytes):
        return reply.decode("utf-8", "replace")
    if isinstance(reply, list):
        return [_plain(item) for item in reply]
    return None if isinstance(reply, NilArray) else reply


def _base64(reply: Reply) -> object:
    if isinstance(reply, Error):
        return reply.text
    if isinstance(reply, bytes):
        return b64encode(reply).decode("ascii")
    if isinstance(reply, list):
        return [_base64(item) for item in reply]
    return None if isinstance(reply, NilArray) else reply


def slot(reply: Reply, *, base64: bool) -> dict[str, object]:
    """A reply as `{"result": …}` or `{"error": …}`."""
    if isinstance(reply, Error):
        return {"error": reply.text}
    return {"result": _base64(reply) if base64 and not is_ok(reply) else _plain(reply)}


def event(message: Reply, number: int) -> bytes:
    """A push as one server-sent event; empty for a MONITOR line of another database than `number`."""
    if isinstance(message, list):
        text = b",".join([b"%d" % part if isinstance(part, int) else cast("bytes", part) for part in message])
    elif is_ok(message):
        text = b'"OK"'
    elif isinstance(message, bytes) and message.partition(b"[")[2].startswith(b"%d " % number):
        text = message
    else:
        return b""
    # A line break in a message would end the field: the rest of it goes into further fields, as the format has it.
    lines = text.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "".join([f"data: {line}\n" for line in lines]).encode() + b"\n"


def to_json(value: object) -> bytes:
    return _dumps(value).encode("utf-8", "replace")
