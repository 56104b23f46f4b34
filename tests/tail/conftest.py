"""Many viewers of a few jobs, driven call by call over a real server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
import redis
from tests.conformance.conftest import Hand

from outlast import AsyncClient, AsyncJobs, Queue
from outlast.protocol import Keys
from outlast_worker.gateway import Database, GatewayConfig, GatewayServer
from outlast_worker.tcp import TcpTransport

TOKEN = "the-token-of-many-viewers"


@pytest.fixture
def hand(valkey_url: str, keys: Keys) -> Iterator[Hand]:
    transport = TcpTransport(valkey_url)
    yield Hand(transport, keys)
    transport.close()


@pytest.fixture
def queue(queue_name: str) -> Queue[Any, Any]:
    return Queue(queue_name)


@pytest.fixture(scope="session")
def gateway(valkey_url: str) -> Iterator[GatewayServer]:
    with GatewayServer(GatewayConfig(databases=[Database(redis_url=valkey_url, token=TOKEN)])) as server:
        yield server


@pytest_asyncio.fixture(params=["tcp", "http"])
async def jobs(
    request: pytest.FixtureRequest, valkey_url: str, gateway: GatewayServer, queue: Queue[Any, Any]
) -> AsyncIterator[AsyncJobs[Any, Any]]:
    client = AsyncClient(valkey_url) if request.param == "tcp" else AsyncClient(gateway.url, TOKEN)
    async with client:
        yield client.queue(queue)


@pytest_asyncio.fixture
async def over_tcp(valkey_url: str, queue: Queue[Any, Any]) -> AsyncIterator[AsyncJobs[Any, Any]]:
    async with AsyncClient(valkey_url) as client:
        yield client.queue(queue)


class Viewer:
    """Watches in a task, and keeps what it saw."""

    def __init__(self, jobs: AsyncJobs[Any, Any], id: str, **options: Any) -> None:
        self.events: list[Any] = []
        self.at: list[float] = []
        self.task = asyncio.create_task(self._watch(jobs, id, options))

    async def _watch(self, jobs: AsyncJobs[Any, Any], id: str, options: dict[str, Any]) -> None:
        async with contextlib.aclosing(jobs.watch(id, **options)) as events:
            async for event in events:
                self.events.append(event)
                self.at.append(time.monotonic())

    @property
    def ids(self) -> list[str]:
        return [event.id for event in self.events]

    @property
    def text(self) -> str:
        """What a page would show."""
        text = ""
        for event in self.events:
            if event.type in ("restarted", "gap"):
                text = ""
            elif event.type == "chunk":
                text += event.data
        return text


def connections(raw: redis.Redis, *, blocked: bool = False) -> set[str]:
    """Ids of the connections to the server; those that a read waits on alone, if `blocked`."""
    clients = raw.client_list()
    return {client["id"] for client in clients if not blocked or "b" in client["flags"]}
