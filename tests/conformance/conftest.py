"""Every behaviour here is promised of every transport: six clients, one suite.

The async clients are played as plain ones, so that each test is written once. The side of the worker is `Hand`, which
sends protocol calls by itself: nothing here depends on the worker.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import upstash_redis
import upstash_redis.asyncio

import outlast
from outlast.protocol import Keys, holding
from outlast_worker.gateway import Database, Faults, GatewayConfig, GatewayServer
from outlast_worker.tcp import TcpTransport

TOKEN = "the-token-of-the-conformance-suite"
DRIVERS = ("httpx", "httpx-async", "upstash-redis", "upstash-redis-async", "tcp", "tcp-async")
HTTP = DRIVERS[:4]


REST = os.environ.get("OUTLAST_TEST_REST")
"""Somebody else's gateway in front of the server, started by `tests.everywhere`. It has no faults to be switched on."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if REST is not None:
        ours = {"faults", "gateway"}
        items[:] = [item for item in items if ours.isdisjoint(inspect.signature(item.function).parameters)]  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def gateway(valkey_url: str) -> Iterator[Any]:
    if REST is not None:
        yield SimpleNamespace(url=REST)
        return
    database = Database(redis_url=valkey_url, token=TOKEN)
    with GatewayServer(GatewayConfig(databases=[database], faults=Faults())) as server:
        yield server


@pytest.fixture
def faults(gateway: GatewayServer) -> Iterator[Faults]:
    switches = gateway.gateway.config.faults
    assert switches is not None
    yield switches
    switches.clear()


class Plain:
    """An AsyncJobs played as Jobs: each call runs the loop until its answer is there."""

    def __init__(self, jobs: Any, runner: asyncio.Runner) -> None:
        self._jobs = jobs
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._jobs, name)

        def call(*args: Any, **options: Any) -> Any:
            answer = method(*args, **options)
            return self._iterate(answer) if inspect.isasyncgen(answer) else self._runner.run(answer)

        return call

    def _iterate(self, events: AsyncGenerator[Any, None]) -> Generator[Any, None, None]:
        async def following() -> Any:
            return await anext(events, None)

        try:
            while (event := self._runner.run(following())) is not None:
                yield event
        finally:
            self._runner.run(events.aclose())


Open = Callable[[outlast.Queue[Any, Any]], Any]


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_jobs(driver: str, gateway: GatewayServer, valkey_url: str) -> Iterator[Open]:
    """Opens the jobs of a queue through the driver."""
    if driver in ("httpx", "upstash-redis", "tcp"):
        redis: Any = None
        if driver == "httpx":
            client = outlast.Client(gateway.url, TOKEN)
        elif driver == "tcp":
            client = outlast.Client(valkey_url)
        else:
            redis = upstash_redis.Redis(gateway.url, TOKEN, rest_retries=0)
            client = outlast.Client(upstash=redis)
        with client:
            yield client.queue
        if redis is not None:
            redis.close()
        return
    with asyncio.Runner() as runner:
        if driver == "httpx-async":
            aclient = outlast.AsyncClient(gateway.url, TOKEN)
        elif driver == "tcp-async":
            aclient = outlast.AsyncClient(valkey_url)
        else:
            redis = upstash_redis.asyncio.Redis(gateway.url, TOKEN, rest_retries=0)
            aclient = outlast.AsyncClient(upstash=redis)
        yield lambda queue: Plain(aclient.queue(queue), runner)
        runner.run(aclient.aclose())
        if driver == "upstash-redis-async":
            runner.run(redis.close())


@pytest.fixture
def queue(queue_name: str) -> outlast.Queue[Any, Any]:
    return outlast.Queue(queue_name)


@pytest.fixture
def jobs(open_jobs: Open, queue: outlast.Queue[Any, Any]) -> Any:
    return open_jobs(queue)


class Hand:
    """What a worker does to a queue, one call at a time."""

    LEASE_MS = 30_000

    def __init__(self, transport: TcpTransport, keys: Keys) -> None:
        self._transport = transport
        self._keys = keys
        self._requests = 0
        self._written: dict[str, int] = {}

    def reserve(self, k: int = 1, *, now: int | None = None) -> list[holding.Reserved]:
        self._requests += 1
        answer = self._transport.send(
            holding.reserve(
                self._keys,
                worker="hand",
                request=self._requests,
                k=k,
                lease_ms=self.LEASE_MS,
                result_ttl_ms=60_000,
                dead_ttl_ms=60_000,
                now=now,
            )
        )
        for job in answer.jobs:
            self._written[job.id] = job.n
        return answer.jobs

    def take(self, **options: Any) -> holding.Reserved:
        [job] = self.reserve(**options)
        return job

    def emit(self, job: holding.Reserved, *events: tuple[str, str], progress: str = "", max_len: int = 10_000) -> str:
        held = self._transport.send(
            holding.flush(
                self._keys, job, first=self._written[job.id] + 1, events=events, max_len=max_len, progress=progress
            )
        )
        self._written[job.id] += len(events)
        return held

    def say(self, job: holding.Reserved, *chunks: str) -> str:
        return self.emit(job, *(("chunk", chunk) for chunk in chunks))

    def settle(
        self,
        job: holding.Reserved,
        status: Literal["completed", "failed", "cancelled"] = "completed",
        body: str = "null",
        *,
        ttl_ms: int = 60_000,
    ) -> str:
        return self._transport.send(
            holding.settle(
                self._keys,
                job,
                status=status,
                body=body,
                ttl_ms=ttl_ms,
                cancel_ttl_ms=60_000,
                count=self._written[job.id],
            )
        )

    def retry(self, job: holding.Reserved, *, delay_ms: int = 0, error: str = "try again") -> str:
        return self._transport.send(
            holding.retry(
                self._keys,
                job,
                error=error,
                delay_ms=delay_ms,
                cancel_ttl_ms=60_000,
                count=self._written[job.id],
            )
        )

    def run(self, chunks: Sequence[str] = (), result: str = "null") -> holding.Reserved:
        """Take the next job, write its chunks and complete it."""
        job = self.take()
        if chunks:
            self.say(job, *chunks)
        assert self.settle(job, "completed", result) == "completed"
        return job


@pytest.fixture
def hand(valkey_url: str, keys: Keys) -> Iterator[Hand]:
    transport = TcpTransport(valkey_url)
    yield Hand(transport, keys)
    transport.close()
