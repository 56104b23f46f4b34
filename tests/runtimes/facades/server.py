"""All facades and a real worker in one process, for clients of other languages. It prints its port and serves.

A job's prompt is its script: ``{"tokens": […], "fails": [n, …], "pause": s, "end": …}`` in JSON. Attempt k fails after
fails[k-1] tokens; a token that is no text is emitted as it is. A request's header ``x-cut: n`` breaks its stream after
n events, ``x-cut: n clean`` ends it in good order; ``x-lose: 1`` loses the answer of a first try.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute

from outlast import AsyncClient, Queue, RetryJobError, TerminalJobError
from outlast_edge import ANY, Edge
from outlast_edge.facades.ai_sdk import AiSdk
from outlast_edge.facades.openai_chat import OpenAIChat
from outlast_edge.facades.openai_responses import OpenAIResponses
from outlast_worker import JobContext, Worker

from streams import WritableStreams  # isort: skip

chat: Queue[Any, Any] = Queue("chat", max_attempts=10, backoff=0, max_backoff=0)
worker = Worker(os.environ["REDIS_URL"], emit_interval=0)
logging.disable(logging.ERROR)  # attempts fail because the scripts say so


def script_of(payload: dict[str, Any]) -> dict[str, Any]:
    """The last text that the user said, in whichever of the protocols."""
    if "input" in payload:
        text = payload["input"]
        text = text if isinstance(text, str) else text[-1]["content"][0]["text"]
    else:
        last = [message for message in payload["messages"] if message["role"] == "user"][-1]
        text = last["content"] if "content" in last else last["parts"][0]["text"]
    script: dict[str, Any] = json.loads(text)
    return script


@worker.handles(chat, concurrency=200)
async def run(job: JobContext[Any]) -> Any:
    script = script_of(job.payload)
    fails = script.get("fails", [])
    stop = fails[job.starts - 1] if job.starts <= len(fails) else None
    text = ""
    for place, token in enumerate(script["tokens"]):
        if place == stop:
            break
        await job.emit(token)
        await job.flush()
        text += token if isinstance(token, str) else ""
        await asyncio.sleep(script.get("pause", 0))
    if stop is not None:
        raise RetryJobError("as the script says", retry_after=0)
    if script.get("end") == "fail":
        raise TerminalJobError("with a secret inside")
    return script.get("result", text)


class Cuts:
    """Breaks streams as their requests ask for."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        cut, _, clean = headers.get("x-cut", "").partition(" ")
        left = int(cut) if cut else 1_000_000
        lost = "x-lose" in headers and headers.get("x-stainless-retry-count", "0") == "0"
        streaming = False

        async def through(message: Any) -> None:
            nonlocal left, streaming
            if lost:
                raise ConnectionAbortedError
            if message["type"] == "http.response.start":
                streaming = bool(cut) and any(value.startswith(b"text/event-stream") for _, value in message["headers"])
            elif streaming:
                *events, _ = message["body"].split(b"\n\n")
                for event in events[: max(0, left)]:
                    await send({"type": "http.response.body", "body": event + b"\n\n", "more_body": True})
                left -= len(events)
                if left < 0:
                    if clean:
                        await send({"type": "http.response.body", "body": b""})
                    raise ConnectionAbortedError
                message = {**message, "body": b""}
            await send(message)

        with suppress(ConnectionAbortedError):
            await self.app(scope, receive, through)


def routes() -> list[BaseRoute]:
    client = AsyncClient(redis_url=os.environ["REDIS_URL"])
    edge = Edge(client, queues=[chat], authorize=lambda *_: ANY)
    # Short waits: the suite waits for them to end.
    written = Edge(client, queues=[Queue("written")], authorize=lambda *_: ANY, max_wait=2, max_stream=8)
    return [
        *AiSdk(edge).routes,
        *AiSdk(edge, path="/api/reset", restart="reset-step").routes,
        *AiSdk(edge, path="/api/replay", replay_finished=True).routes,
        *OpenAIResponses(edge).routes,
        *OpenAIChat(edge).routes,
        *WritableStreams(written, client).routes,
    ]


class Server(uvicorn.Server):
    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)


async def main() -> None:
    anywhere = Middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    app = Cuts(Starlette(routes=routes(), middleware=[anywhere]))
    async with worker:
        await Server(uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=1)).serve()


asyncio.run(main())
