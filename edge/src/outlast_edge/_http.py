"""The HTTP that has nothing to do with jobs: problems, negotiation, bodies, keys, entity tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from http import HTTPStatus
from typing import Any, NoReturn, cast

from starlette.requests import Request
from starlette.responses import Response

from ._frames import dump

__all__ = ["Problem", "idempotency_key", "json_reply", "number", "object_body", "phrase", "precondition", "wants"]

NOSNIFF = {"X-Content-Type-Options": "nosniff"}


class Problem(Exception):
    """An answer in the form of RFC 9457, with a `code` that programs can rely on."""

    def __init__(
        self, status: int, code: str, detail: str, *, headers: Mapping[str, str] | None = None, **more: Any
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.body = {
            "type": "about:blank",
            "title": phrase(status),
            "status": status,
            "detail": detail,
            "code": code,
            **more,
        }
        self.headers = {"Cache-Control": "no-store", **NOSNIFF, **(headers or {})}

    def response(self) -> Response:
        return Response(dump(self.body), self.status, {**self.headers, "Content-Type": "application/problem+json"})


def phrase(status: int) -> str:
    """The status in words."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def json_reply(request: Request, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON, without its body for HEAD."""
    body = dump(value)
    all_headers = {"Cache-Control": "no-store", **NOSNIFF, "Content-Type": "application/json", **(headers or {})}
    if request.method == "HEAD":
        return Response(b"", status, {**all_headers, "Content-Length": str(len(body))})
    return Response(body, status, all_headers)


def precondition(request: Request, value: Any) -> tuple[str, bool]:
    """The entity tag of `value`, and whether the caller has it already."""
    tag = f'"{sha256(dump(value)).hexdigest()[:32]}"'
    known = request.headers.get("if-none-match", "")
    return tag, known.strip() == "*" or tag in re.findall(r'"[^"]*"', known)


def wants(request: Request, *kinds: str) -> str | None:
    """Which of the media types the Accept header likes best; the first where it has no opinion, None for none."""
    accept = request.headers.get("accept", "").strip() or "*/*"
    ranges: dict[str, float] = {}
    for part in accept.split(","):
        name, *parameters = (item.strip().lower() for item in part.split(";"))
        quality = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    quality = float(parameter[2:])
                except ValueError:
                    quality = 0.0
        ranges[name] = quality

    def quality_of(kind: str) -> float:
        for pattern in (kind, kind.partition("/")[0] + "/*", "*/*"):
            if pattern in ranges:
                return ranges[pattern]
        return 0.0

    best = max(kinds, key=quality_of)
    return best if quality_of(best) > 0 else None


def number(request: Request, name: str, default: float, *, most: float, least: float = 0.0) -> float:
    """A number of the query, cut to `most`."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) or float(text) < least:
        raise Problem(400, "bad_parameter", f"?{name}= takes a number from {least:g} to {most:g}.")
    return min(float(text), most)


_KEY = re.compile(r"[\x21\x23-\x7e][\x21-\x7e]{0,254}")
_QUOTED = re.compile(r'"((?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')


def idempotency_key(request: Request) -> str | None:
    """The Idempotency-Key header, bare or as a quoted string: both spell the same key."""
    given = request.headers.getlist("idempotency-key")
    if not given:
        return None
    if len(given) == 1:
        text = given[0].strip()
        if quoted := _QUOTED.fullmatch(text):
            text = re.sub(r"\\(.)", r"\1", quoted[1])
            if 1 <= len(text) <= 255:
                return text
        elif _KEY.fullmatch(text):
            return text
    raise Problem(400, "bad_idempotency_key", "Idempotency-Key takes one key of 1 to 255 visible ASCII characters.")


async def object_body(request: Request, most: int, *, untyped: bool = False) -> dict[str, Any]:
    """The request's JSON object. A body that is too large is refused before it has been read whole.

    `untyped`: for clients that send JSON without saying so; from a page of another origin it still has to be said.
    """
    headers = request.headers
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    foreign = "origin" in headers and headers.get("sec-fetch-site") != "same-origin"
    is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    if not is_json and (foreign or not untyped):
        # Not only tidiness: a form on another site can post text/plain with the visitor's cookies, but not JSON.
        raise Problem(415, "not_json", "Send a JSON object with Content-Type: application/json.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Problem(415, "encoded", "Send the body without Content-Encoding.")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        _too_large(most)
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > most:
            _too_large(most)
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise Problem(400, "bad_json", "The body is not JSON.") from None
    if not isinstance(value, dict):
        raise Problem(422, "bad_body", 'The body is not an object; send {"payload": …}.')
    return cast("dict[str, Any]", value)


def _too_large(most: int) -> NoReturn:
    raise Problem(413, "too_large", f"The body may have at most {most} bytes.", headers={"Connection": "close"})


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
