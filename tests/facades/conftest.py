"""A facade on a real uvicorn over a real server; connections break, and the job goes on, when a test says so."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import pytest
import uvicorn

from outlast import AsyncClient, Queue
from outlast.protocol import Keys, calls, holding
from outlast_edge import ANY, Edge
from outlast_worker.tcp import TcpTransport


class Hand:
    """The worker's side, moved by the test: it takes one job and says what it is told to."""

    def __init__(self, url: str, keys: Keys) -> None:
        self.keys = keys
        self.transport = TcpTransport(url)
        self.requests = 0
        self.job: holding.Reserved
        self.n = 0

    def take(self) -> str:
        self.requests += 1
        times = {"lease_ms": 60_000, "result_ttl_ms": 60_000, "dead_ttl_ms": 60_000}
        call = holding.reserve(self.keys, worker=f"w{id(self)}", request=self.requests, k=1, **times)
        [self.job] = self.transport.send(call).jobs
        self.n = self.job.n
        return self.job.id

    def say(self, *values: Any) -> None:
        """Text, or anything else as JSON."""
        events = [("chunk", v) if isinstance(v, str) else ("data", json.dumps(v)) for v in values]
        call = holding.flush(self.keys, self.job, first=self.n + 1, events=events, max_len=10_000)
        assert self.transport.send(call) in ("ok", "cancel")
        self.n += len(events)

    def again(self) -> None:
        """The attempt fails and the next one starts."""
        call = holding.retry(self.keys, self.job, error="boom", delay_ms=0, cancel_ttl_ms=60_000, count=self.n)
        assert self.transport.send(call) == "scheduled"
        self.take()

    def end(self, result: Any = "done", status: Literal["completed", "failed", "cancelled"] = "completed") -> None:
        body = json.dumps(result) if status == "completed" else result
        call = holding.settle(
            self.keys, self.job, status=status, body=body, ttl_ms=60_000, cancel_ttl_ms=60_000, count=self.n
        )
        self.transport.send(call)

    def jobs(self) -> int:
        """How many wait."""
        return self.transport.send(calls.Call(("ZCARD", self.keys.ready), int))


@pytest.fixture
def hand(valkey_url: str, keys: Keys) -> Iterator[Hand]:
    moved = Hand(valkey_url, keys)
    yield moved
    moved.transport.close()


@dataclass
class Cuts:
    """Stands between server and app, and breaks off what it is told to. It keeps what was asked."""

    app: Any
    streams: list[int] = field(default_factory=list)
    """For each of the next event streams the events after which it breaks; streams beyond these go through."""
    answers: int = 0
    """How many of the next requests get through to the app, but lose their answer."""
    requests: list[str] = field(default_factory=list)
    on_event: Callable[[], object] = lambda: None
    """Called after each event that went out."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        query = scope["query_string"].decode()
        self.requests.append(f"{scope['method']} {scope['path']}" + (f"?{query}" if query else ""))
        lost = self.answers > 0
        self.answers -= lost
        left = float("inf")
        streaming = False

        async def through(message: Any) -> None:
            nonlocal left, streaming
            if lost:
                raise ConnectionAbortedError
            if message["type"] == "http.response.start":
                streaming = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
                if self.streams and streaming:
                    left = self.streams.pop(0)
                await send(message)
            elif not streaming:
                await send(message)
            else:
                *events, rest = message["body"].split(b"\n\n")
                for event in events:
                    if left == 0:
                        raise ConnectionAbortedError
                    left -= 1
                    await send({"type": "http.response.body", "body": event + b"\n\n", "more_body": True})
                    await asyncio.get_running_loop().run_in_executor(None, self.on_event)
                if rest or not message.get("more_body"):
                    await send({**message, "body": rest})

        with suppress(ConnectionAbortedError):
            await self.app(scope, receive, through)
        # Returning from an unfinished response makes the server close the connection.


@dataclass
class Site:
    """A running server."""

    url: str
    cuts: Cuts
    http: httpx.Client


def anybody(request: Any, action: str, job: Any) -> Any:
    return ANY


@pytest.fixture
def queue(queue_name: str) -> Queue[Any, Any]:
    return Queue(queue_name)


@pytest.fixture
def serve() -> Iterator[Callable[[Any], str]]:
    """Run an ASGI app on a uvicorn of its own until the test is over; the answer is its address."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(app: Any) -> str:
        # A stream that is cut off on purpose is an error to uvicorn.
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
        thread.start()
        running.append((server, thread))
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.01)
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def site(valkey_url: str, queue: Queue[Any, Any], serve: Callable[[Any], str]) -> Iterator[Callable[..., Site]]:
    """Serve the facade that `make(edge)` gives; options go to the edge."""
    clients: list[httpx.Client] = []

    def start(make: Callable[[Edge], Any], *, queues: Any = None, authorize: Any = anybody, **options: Any) -> Site:
        edge = Edge(AsyncClient(redis_url=valkey_url), queues=queues or [queue], authorize=authorize, **options)
        cuts = Cuts(make(edge).app())
        url = serve(cuts)
        clients.append(httpx.Client(base_url=url, timeout=20))
        return Site(url, cuts, clients[-1])

    yield start
    for client in clients:
        client.close()
