"""A webhook receiver on loopback: keeps what it gets, and answers as a script says."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from standardwebhooks import Webhook


@dataclass
class Message:
    path: str
    headers: dict[str, str]
    body: bytes

    def verified(self, secret: str) -> Any:
        """The body as the standardwebhooks package reads it. Raises for a wrong signature or an old timestamp."""
        return Webhook(secret).verify(self.body, self.headers)


class Receiver:
    def __init__(self) -> None:
        self.got: list[Message] = []
        self.connections = 0
        self.server_names: list[str | None] = []
        self.script: list[Any] = []
        """A status, (status, headers), "endless body" or "slow headers" for each message; then 204."""
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            lines = [line.partition(":") for line in head[1:] if line]
            headers = {name.lower(): value.strip() for name, _, value in lines}
            body = await reader.readexactly(int(headers["content-length"]))
            self.got.append(Message(head[0].split(" ")[1], headers, body))
            await self._answer(self.script.pop(0) if self.script else 204, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, what: Any, writer: asyncio.StreamWriter) -> None:
        if what == "slow headers":
            writer.write(b"HTTP/1.1 200 OK\r\n")
            while True:
                writer.write(b"x-drip: drop\r\n")
                await writer.drain()
                await asyncio.sleep(0.02)
        if what == "endless body":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
        status, headers = what if isinstance(what, tuple) else (what, {})
        told = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 {status} X\r\n{told}content-length: 0\r\n\r\n".encode())
        await writer.drain()


@asynccontextmanager
async def receiver(tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    receiver = Receiver()
    if tls is not None:
        tls.sni_callback = lambda _, name, __: receiver.server_names.append(name)
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
