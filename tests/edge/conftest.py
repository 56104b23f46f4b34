"""A real uvicorn on loopback over a real server; the job's side is driven call by call, so that a test decides when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import pytest
import uvicorn

from outlast import AsyncClient, OutlastError, Queue
from outlast.protocol import Keys, calls, holding
from outlast_edge import ANY, Edge
from outlast_worker.tcp import AsyncTcpTransport, TcpTransport


class Worker:
    """Takes one job at a time and says what it is told to."""

    def __init__(self, url: str, keys: Keys) -> None:
        self.transport = TcpTransport(url)
        self.keys = keys
        self.requests = 0
        self.n = 0
        self.job: holding.Reserved

    def take(self) -> str:
        self.requests += 1
        [self.job] = self.transport.send(
            holding.reserve(
                self.keys,
                worker=f"w{id(self)}",
                request=self.requests,
                k=1,
                lease_ms=60_000,
                result_ttl_ms=60_000,
                dead_ttl_ms=60_000,
            )
        ).jobs
        self.n = self.job.n
        return self.job.id

    def say(self, *texts: str, kind: str = "chunk", progress: str = "", max_len: int = 10_000) -> None:
        events = [(kind, text) for text in texts]
        call = holding.flush(self.keys, self.job, first=self.n + 1, events=events, max_len=max_len, progress=progress)
        assert self.transport.send(call) in ("ok", "cancel")
        self.n += len(events)

    def again(self) -> None:
        """The attempt fails and the next one starts."""
        self.transport.send(
            holding.retry(self.keys, self.job, error="boom", delay_ms=0, cancel_ttl_ms=60_000, count=self.n)
        )
        self.take()

    def end(
        self, body: str = '"done"', status: Literal["completed", "failed", "cancelled"] = "completed", ttl: int = 60_000
    ) -> None:
        self.transport.send(
            holding.settle(self.keys, self.job, status=status, body=body, ttl_ms=ttl, cancel_ttl_ms=ttl, count=self.n)
        )


@pytest.fixture
def worker(valkey_url: str, keys: Keys) -> Iterator[Worker]:
    worker = Worker(valkey_url, keys)
    yield worker
    worker.transport.close()


@dataclass
class Web:
    """A running server and a client for it."""

    url: str
    host: str
    http: httpx.Client
    loop: asyncio.AbstractEventLoop

    def enqueue(self, payload: Any = "hello", **headers: str) -> dict[str, Any]:
        reply = self.http.post("/v1/jobs", json={"payload": payload}, headers=headers)
        assert reply.status_code == 202, reply.text
        made: dict[str, Any] = reply.json()
        return made

    def viewers(self) -> int:
        """Tasks that serve a request right now."""

        async def count() -> int:
            names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
            return sum(name.startswith(("Stream._run", "RequestResponseCycle.")) for name in names)

        return asyncio.run_coroutine_threadsafe(count(), self.loop).result(10)


class Server:
    """A uvicorn in a thread."""

    def __init__(self, app: Any, **options: Any) -> None:
        config = uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1, **options)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            threading.Event().wait(0.01)
        self.port: int = self.server.servers[0].sockets[0].getsockname()[1]

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.server.serve()

    def web(self, host: str) -> Web:
        url = f"http://127.0.0.1:{self.port}"
        return Web(url, host, httpx.Client(base_url=url, timeout=20, headers={"host": host}), self.loop)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


class Shared(Server):
    """One server for many applications, told apart by the Host header: a start costs more than most tests."""

    def __init__(self) -> None:
        self.apps: dict[str, Any] = {}
        super().__init__(self._dispatch, interface="asgi3")

    async def _dispatch(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await self.apps[dict(scope["headers"])[b"host"].decode()](scope, receive, send)


@pytest.fixture(scope="session")
def shared() -> Iterator[Shared]:
    server = Shared()
    yield server
    server.close()


@pytest.fixture
def serve(shared: Shared) -> Iterator[Callable[..., Web]]:
    """Serve an ASGI app until the test is over; with options or `alone`, in a server of its own."""
    webs: list[Web] = []
    servers: list[Server] = []

    def start(app: Any, *, alone: bool = False, **options: Any) -> Web:
        host = f"app{len(webs)}"
        if alone or options:
            servers.append(Server(app, **options))
            webs.append(servers[-1].web(host))
        else:
            shared.apps[host] = app
            webs.append(shared.web(host))
        return webs[-1]

    yield start
    for web in webs:
        web.http.close()
    for server in servers:
        server.close()


class Counting:
    """A transport that writes down what goes over it, polls when told to, and fails when told to."""

    def __init__(self, url: str, *, blocking: bool = True) -> None:
        self.inner = AsyncTcpTransport(url, timeout=2)
        self.blocking = blocking
        self.sync_token = None
        self.calls: list[str] = []
        self.fault: OutlastError | None = None
        self.lag = 0
        """So many records are not there yet."""

    async def send(self, call: calls.Call[Any], *, block: float | None = None) -> Any:
        self.calls.append(call.script.name if call.script else call.args[0])
        if self.fault is not None:
            raise self.fault
        if self.lag and self.calls[-1] == "HMGET":
            self.lag -= 1
            return call.decode([None] * (len(call.args) - 2))
        return await self.inner.send(call, block=block)

    async def send_many(self, several: Sequence[calls.Call[Any]]) -> list[Any]:
        return await self.inner.send_many(several)

    async def aclose(self) -> None:
        await self.inner.aclose()


@pytest.fixture
def counting(valkey_url: str, shared: Shared) -> Iterator[Counting]:
    transport = Counting(valkey_url)
    yield transport
    asyncio.run_coroutine_threadsafe(transport.aclose(), shared.loop).result(10)


@pytest.fixture
def polling(valkey_url: str, shared: Shared) -> Iterator[Counting]:
    """As over HTTP: no read waits on the server."""
    transport = Counting(valkey_url, blocking=False)
    yield transport
    asyncio.run_coroutine_threadsafe(transport.aclose(), shared.loop).result(10)


@pytest.fixture
def queue(queue_name: str) -> Queue[Any, Any]:
    return Queue(queue_name)


@pytest.fixture
def client(valkey_url: str, shared: Shared) -> Iterator[AsyncClient]:
    client = AsyncClient(redis_url=valkey_url)
    yield client
    asyncio.run_coroutine_threadsafe(client.aclose(), shared.loop).result(10)


def anybody(request: Any, action: str, job: Any) -> Any:
    return ANY


@pytest.fixture
def web(serve: Callable[..., Web], client: AsyncClient, queue: Queue[Any, Any]) -> Web:
    """An edge over TCP where every caller may do everything."""
    return serve(Edge(client, queues=[queue], authorize=anybody).app())
