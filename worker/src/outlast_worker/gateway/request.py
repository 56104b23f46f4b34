"""One HTTP request as it comes, and the ways to answer it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from outlast_worker.gateway.wire import BadRequest, split_path, split_query

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

TRANSPORT = "outlast.transport"  # in the scope: what our server puts there, so that faults can cut the connection
JSON = b"application/json; charset=utf-8"


class Gone(Exception):
    """The caller has hung up, or a fault has cut the connection; there is nobody to answer."""


@dataclass(slots=True)
class Request:
    """Read as far as the headers. `status` is 0 until the answer has begun."""

    method: str
    segments: list[bytes]
    query: list[tuple[bytes, bytes | None]]
    headers: Mapping[bytes, bytes]
    receive: Receive
    send: Send
    transport: asyncio.Transport | None
    names: list[str] = field(default_factory=list[str])  # of its commands
    status: int = 0
    version: int | None = None  # the sync token to send
    billed: int | None = None
    trickle: float = 0.0

    @classmethod
    def read(cls, scope: Scope, receive: Receive, send: Send) -> Request:
        path = split_path(scope.get("raw_path") or scope["path"].encode())
        query = split_query(scope.get("query_string", b""))
        return cls(scope["method"], path, query, dict(scope["headers"]), receive, send, scope.get(TRANSPORT))

    @property
    def token(self) -> bytes:
        """`_token` before the header; the header with or without "Bearer"."""
        for name, value in self.query:
            if name == b"_token":
                return value or b""
        header = self.headers.get(b"authorization", b"").strip()
        return header[7:].strip() if header[:7].lower() == b"bearer " else header

    @property
    def sync_token(self) -> int:
        shown = self.headers.get(b"upstash-sync-token", b"")
        return int(shown) if shown.isdigit() and len(shown) < 20 else 0

    async def body(self, limit: int) -> bytes:
        """The whole body; past `limit` its bytes are only counted, and the answer is 413 with their number."""
        parts: list[bytes] = []
        size, more = 0, True
        while more and size <= 4 * limit:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise Gone
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
            if size <= limit:
                parts.append(message.get("body", b""))
        if size > limit:
            raise BadRequest(f"ERR max request size exceeded. Limit: {limit}, Actual: {size}", 413)
        return b"".join(parts)

    async def hung_up(self) -> None:
        """Returns when the caller is gone."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.status = status
        await self.send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def write(self, data: bytes, *, last: bool = False) -> None:
        body = b"" if self.method == "HEAD" else data
        await self.send({"type": "http.response.body", "body": body, "more_body": not last})

    async def answer(
        self, status: int, body: bytes, content_type: bytes = JSON, headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> None:
        length = b"%d" % len(body)
        fields = [(b"content-type", content_type), (b"content-length", length), *self.common_headers(), *headers]
        await self.begin(status, fields)
        if self.trickle:
            for at in range(len(body) - 1):
                await self.write(body[at : at + 1])
                await asyncio.sleep(self.trickle)
            body = body[-1:]
        await self.write(body, last=True)

    def common_headers(self) -> list[tuple[bytes, bytes]]:
        fields = [(b"access-control-allow-credentials", b"true")]
        if origin := self.headers.get(b"origin"):
            fields += [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        if self.version is not None:
            fields.append((b"upstash-sync-token", b"%d" % self.version))
        if self.billed is not None:
            fields.append((b"outlast-billed", b"%d" % self.billed))
        return fields

    async def cut(self, *, flush: bool = False) -> None:
        """Close the caller's connection without (more of) an answer. Raises Gone."""
        if self.transport is None:  # under another server the nearest thing is to fail
            raise ConnectionResetError("a test switch has cut this connection")
        self.transport.close() if flush else self.transport.abort()
        await self.hung_up()
        raise Gone
