"""What every contestant does, and how it is timed. Only the standard library: each runs in an environment of its own.

    python -m benchmarks.peers.saq MEASURE REDIS_URL     prints {"value": …} as its last line

Producer and worker share one process and one event loop, so that one clock tells how long anything took.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

CONCURRENCY = 50
PAYLOAD = "x" * 60  # with the wrapping that each puts around it, about 100 bytes

Job = tuple[str, float]
"""What is enqueued: "noop" or "sleep", and a number that tells it from others."""


class Contestant:
    """A queue under test. `started` and `cancelled` are to be called from its handler."""

    loop: Callable[[], asyncio.AbstractEventLoop] | None = None
    """Makes an event loop; None: asyncio's."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.starts = 0
        self.started: Callable[[float], None] = lambda number: None
        self.cancelled: Callable[[float], None] = lambda number: None

    async def open(self) -> None: ...

    async def enqueue(self, kind: str, number: float, text: str = "") -> Any:
        raise NotImplementedError

    async def start(self) -> None:
        """The worker, up to CONCURRENCY jobs at a time. It ends with the process: each measure has one of its own."""
        raise NotImplementedError

    async def cancel(self, handle: Any) -> None:
        """Of those that have one: `ROWS` in __main__ names them."""
        raise NotImplementedError

    async def handle(self, kind: str, number: float) -> None:
        self.starts += 1
        self.started(number)
        if kind == "sleep":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.cancelled(number)
                raise


def command(url: str, *words: str) -> str:
    """One command on a connection of its own; its reply as text."""
    host, _, port = url.partition("://")[2].partition("/")[0].rpartition(":")
    with socket.create_connection((host, int(port))) as link, link.makefile("rb") as reader:
        link.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w.encode()) for w in words))
        head = reader.readline()
        return reader.read(int(head[1:])).decode() if head[:1] == b"$" else head[1:].strip().decode()


def used_memory(url: str) -> int:
    """Of the data: without the buffers of whoever is connected."""
    info = dict(line.partition(":")[::2] for line in command(url, "INFO", "memory").splitlines())
    return int(info["used_memory"]) - int(info["mem_clients_normal"])


async def fill(contestant: Contestant, count: int, text: str = "") -> float:
    """Seconds that `count` enqueues take, 50 awaited at a time."""
    numbers = iter(range(count))

    async def one() -> None:
        for number in numbers:
            await contestant.enqueue("noop", number, text)

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(CONCURRENCY)))
    return time.perf_counter() - began


async def enqueue(contestant: Contestant, count: int) -> dict[str, float]:
    await fill(contestant, 100)
    return {"value": count / await fill(contestant, count)}


async def memory(contestant: Contestant, count: int) -> dict[str, float]:
    await fill(contestant, 50, PAYLOAD)
    before = used_memory(contestant.url)
    await fill(contestant, count, PAYLOAD)
    # What a server says of its clients' buffers is an estimate. Nobody needs a connection any more.
    command(contestant.url, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    return {"value": (used_memory(contestant.url) - before) / count}


async def drain(contestant: Contestant, count: int) -> dict[str, float]:
    """Jobs a second from the first start to the last, and CPU of the process for each."""
    await fill(contestant, count)
    done, first = asyncio.Event(), []

    def started(number: float) -> None:
        if not first:
            first.append((time.perf_counter(), time.process_time()))
        if contestant.starts >= count:
            done.set()

    contestant.started = started
    await contestant.start()
    await done.wait()
    await asyncio.sleep(0)
    wall, cpu = time.perf_counter() - first[0][0], time.process_time() - first[0][1]
    return {"value": count / wall, "cpu_us": cpu / count * 1e6}


async def latency(contestant: Contestant, count: int) -> dict[str, float]:
    """Milliseconds from the enqueue to the handler's first line, on an idle worker."""
    times: list[float] = []
    began = 0.0
    ran = asyncio.Event()

    def started(number: float) -> None:
        times.append((time.perf_counter() - began) * 1e3)
        ran.set()

    contestant.started = started
    await contestant.start()
    await asyncio.sleep(0.5)
    for number in range(count):
        ran.clear()
        began = time.perf_counter()
        await contestant.enqueue("noop", number)
        await ran.wait()
        await asyncio.sleep(random.uniform(0.002, 0.01))
    return spread(times[5:])


async def cancel(contestant: Contestant, count: int) -> dict[str, float]:
    """Milliseconds from the call of cancel to the interruption of a handler that says nothing."""
    times: list[float] = []
    running, gone = asyncio.Event(), asyncio.Event()
    began = 0.0

    def cancelled(number: float) -> None:
        times.append((time.perf_counter() - began) * 1e3)
        gone.set()

    contestant.started = lambda number: running.set()
    contestant.cancelled = cancelled
    await contestant.start()
    for number in range(count):
        running.clear()
        gone.clear()
        handle = await contestant.enqueue("sleep", number)
        await running.wait()
        await asyncio.sleep(random.uniform(0.02, 0.1))
        began = time.perf_counter()
        asking = asyncio.ensure_future(contestant.cancel(handle))
        async with asyncio.timeout(20):
            await gone.wait()
        await asyncio.wait([asking], timeout=5)
    return spread(times)


def spread(times: list[float]) -> dict[str, float]:
    return {"value": statistics.median(times), "p99": sorted(times)[max(0, -(-len(times) * 99 // 100) - 1)]}


Measure = Callable[[Any, int], Awaitable[dict[str, float]]]
MEASURES: dict[str, tuple[Measure, int]] = {
    "drain": (drain, 6000),
    "enqueue": (enqueue, 3000),
    "latency": (latency, 150),
    "cancel": (cancel, 15),
    "memory": (memory, 10_000),
}


def main(make: type[Contestant], more: dict[str, tuple[Measure, int]] | None = None) -> None:
    measures = {**MEASURES, **(more or {})}
    name, url = sys.argv[1:3]
    measure, count = measures[name]
    count = int(sys.argv[3]) if len(sys.argv) > 3 else count

    async def run() -> dict[str, float]:
        contestant = make(url)
        await contestant.open()
        return await measure(contestant, count)

    runner = asyncio.Runner(loop_factory=make.loop)
    print(json.dumps(runner.run(run())), flush=True)
    import os

    os._exit(0)  # some libraries leave threads and connections behind
