"""kill -9 at every point of a ten-step job: at most the step that was under way is paid for again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.faults.links import Background
from tests.faults.processes import until

from outlast import AsyncClient, Queue
from outlast.protocol.digests import DIGESTS
from outlast_worker import JobContext, Worker

from .forks import STEPS

ROOT = Path(__file__).parents[2]

NAMES = {sha: name for name, sha in DIGESTS.items()}
SCRIPTS = 1 + STEPS + 1
"""reserve, a save for each step, settle."""


class KillPoint(Background):
    """Stands between a worker and the server, and has the worker killed at its n-th script call.

    `when`: before the call is passed on, during (it ran, the reply is withheld), or after its reply.
    """

    def __init__(self, url: str, nth: int, when: str, kill: Callable[[], None]) -> None:
        host, _, port = url.rpartition("/")[2].rpartition(":")
        self._target = (host, int(port))
        self._left = nth
        self._when = when
        self._kill = kill
        self.calls: list[str] = []

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def open(self) -> None:
        self.port = await self.listen(self._serve)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(*self._target)
        withheld = asyncio.Event()

        async def replies() -> None:
            while data := await up_reader.read(65536):
                if withheld.is_set() and self._when == "during":
                    self._kill()
                    return
                writer.write(data)
                await writer.drain()
                if withheld.is_set():
                    self._kill()
                    return

        async def requests() -> None:
            while True:
                head = await reader.readuntil(b"\r\n")
                command = head
                words = []
                for _ in range(int(head[1:])):
                    size = await reader.readuntil(b"\r\n")
                    word = await reader.readexactly(int(size[1:]) + 2)
                    words.append(word[:-2])
                    command += size + word
                script = NAMES.get(words[1].decode()) if words[0] == b"EVALSHA" else None
                if script in ("step", "settle") or (script == "reserve" and script not in self.calls):
                    # A slow machine may add renewals, and looks at what else is due.
                    self.calls.append(script)
                    self._left -= 1
                    if self._left == 0:
                        if self._when == "before":
                            self._kill()
                            return
                        withheld.set()
                up_writer.write(command)
                await up_writer.drain()

        ways = [asyncio.ensure_future(replies()), asyncio.ensure_future(requests())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            up_writer.close()
            with suppress(OSError):
                await up_writer.wait_closed()


class Forks:
    def __init__(self) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.steps.forks"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.popen.stdout is not None
        os.set_blocking(self.popen.stdout.fileno(), False)
        self._rest = b""
        self.pids: dict[str, int] = {}
        self.killed: set[str] = set()
        self.runs: dict[str, Counter[int]] = {}

    def start(self, url: str, queue: str, point: str) -> None:
        assert self.popen.stdin is not None
        self.runs[point] = Counter()
        self.popen.stdin.write(f"{url} {queue} {point}\n".encode())
        self.popen.stdin.flush()

    def read(self) -> None:
        assert self.popen.stdout is not None
        with suppress(BlockingIOError):
            while data := os.read(self.popen.stdout.fileno(), 65536):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    said = json.loads(line)
                    if "pid" in said:
                        self.pids[said["point"]] = said["pid"]
                    else:
                        self.runs[said["point"]][said["step"]] += 1

    def kill(self, point: str) -> None:
        if point not in self.killed:
            os.kill(self.pids[point], signal.SIGKILL)
            self.killed.add(point)

    def close(self) -> None:
        for point in self.pids:
            with suppress(ProcessLookupError):
                self.kill(point)
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.close()
        self.popen.wait(20)
        self.popen.stdout.close()


@pytest.mark.timeout(180)
async def test_kill_before_during_and_after_each_script_call(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    points = [f"{when}-{nth}" for nth in range(1, SCRIPTS + 1) for when in ("before", "during", "after")]
    queues = {point: Queue(f"{queue_name}-{point}", lease=1.0, result=int) for point in points}
    forks = Forks()
    runs = forks.runs

    async def again(n: int, point: str) -> int:
        runs[point][n] += 1
        return n * n

    def handler(point: str) -> Any:
        async def run(job: JobContext[Any]) -> int:
            return sum([await job.step(f"step-{n}", again, n, point) for n in range(STEPS)])

        return run

    ids = {point: (await aclient.queue(queues[point]).enqueue(None)).id for point in points}
    warm = Queue(f"{queue_name}-warm", result=int)
    runs["warm"] = Counter()
    worker = Worker(valkey_url)
    worker.handles(warm)(handler("warm"))
    async with worker:  # every script is known to the server, so each call is one call
        await aclient.queue(warm).wait((await aclient.queue(warm).enqueue(None)).id, timeout=20)

    with ExitStack() as stack:
        stack.callback(forks.close)
        proxies = {}
        for point in points:
            when, _, nth = point.partition("-")
            proxy = KillPoint(valkey_url, int(nth), when, lambda point=point: forks.kill(point))  # type: ignore[misc]
            proxies[point] = stack.enter_context(proxy)
            forks.start(proxies[point].url, queues[point].name, point)
            await until(lambda: forks.read() or point in forks.pids, "it is started")  # noqa: B023

        await until(lambda: forks.read() or len(forks.killed) == len(points), "all are killed", 60)
        await asyncio.sleep(0.1)
        forks.read()
        before = {point: dict(runs[point]) for point in points}
        second = Worker(valkey_url, block=0.2)
        for point in points:
            second.handles(queues[point])(handler(point))
        async with second:
            for point in points:
                total = await aclient.queue(queues[point]).wait(ids[point], timeout=30)
                assert total == sum(n * n for n in range(STEPS)), point
        for point in points:
            when, _, nth = point.partition("-")
            assert set(runs[point]) == set(range(STEPS)), point
            twice = [n for n, count in runs[point].items() if count > 1]
            in_flight = max(before[point], default=None)
            assert twice in ([], [in_flight]), (point, runs[point])
            assert set(runs[point].values()) <= {1, 2}
            if when == "during":
                assert twice == [], f"{point}: its value was stored, whatever became of the reply"
            if when == "before" and 2 <= int(nth) <= STEPS + 1:
                assert twice == [int(nth) - 2], f"{point}: killed before that was stored"
            record = await aclient.queue(queues[point]).get(ids[point])
            assert record is not None
            assert record.attempt <= 2
