"""A chat endpoint on loopback that does what a script says, and counts what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


def text(content: str, *, finish: str = "stop", usage: tuple[int, int, int] = (10, 0, 3)) -> dict[str, Any]:
    """An answer: `usage` is prompt tokens, those of them that were cached, and completion tokens."""
    return {"content": content, "finish": finish, "usage": usage}


def calls(
    *wanted: tuple[str, str], usage: tuple[int, int, int] = (10, 0, 3), finish: str = "tool_calls"
) -> dict[str, Any]:
    """A turn that asks for tools: name and arguments as JSON text."""
    return {"calls": wanted, "finish": finish, "usage": usage}


class Provider:
    def __init__(self) -> None:
        self.script: list[Any] = []
        """What the next calls do: an answer, a status, (status, headers, body), "hang" or "cut". Then echo."""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.closed = 0
        """Connections that the caller closed while they hung."""
        self.hanging = asyncio.Event()
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)
            }
            self.headers.append({**headers, ":path": head[0].split(" ")[1]})
            self.requests.append(json.loads(await reader.readexactly(int(headers["content-length"]))))
            await self._answer(self.script.pop(0) if self.script else "echo", reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, what: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if isinstance(what, int):
            what = (what, {}, {"error": {"message": "no", "type": "scripted"}})
        if isinstance(what, tuple):
            status, headers, body = what
            data = json.dumps(body).encode()
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            head = (
                f"HTTP/1.1 {status} X\r\n{lines}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
            )
            writer.write(head.encode() + data)
            await writer.drain()
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        await writer.drain()
        if what == "hang":
            self.hanging.set()
            await reader.read()  # until the caller goes
            self.closed += 1
            return
        if what == "echo":
            what = text(f"summary({len(self.requests[-1]['messages'][-1]['content'])})")
        if what == "cut":
            await self._send(writer, {"content": "half of an ans"})
            return
        if "calls" in what:
            for index, (name, arguments) in enumerate(what["calls"]):
                first = {"index": index, "id": f"call_{index}", "function": {"name": name, "arguments": arguments[:5]}}
                rest = {"index": index, "function": {"arguments": arguments[5:]}}
                for piece in (first, rest):
                    await self._send(writer, {"tool_calls": [piece]})
        else:
            for word in what["content"].split(" "):
                await self._send(writer, {"content": word if word == what["content"].split(" ")[0] else f" {word}"})
        await self._send(writer, {}, what["finish"])
        prompt, cached, completion = what["usage"]
        details = {"cached_tokens": cached}
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
        writer.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        await writer.drain()

    async def _send(self, writer: asyncio.StreamWriter, delta: dict[str, Any], finish: str | None = None) -> None:
        part = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
        writer.write(b": keep-alive\n\ndata: " + json.dumps(part).encode() + b"\n\n")
        await writer.drain()


@asynccontextmanager
async def scripted_provider() -> AsyncIterator[Provider]:
    provider = Provider()
    server = await asyncio.start_server(provider._serve, "127.0.0.1", 0)
    provider.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield provider
    finally:
        server.close()
