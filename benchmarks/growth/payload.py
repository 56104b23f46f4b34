"""Payloads of 1 kB to 1 MB, against a bare SET and GET of the same bytes over the same connection, 50 at a time."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from benchmarks.growth.common import CONCURRENCY, Column, Found, Part, Points, at_a_time, server, server_cpu
from benchmarks.plots import Panel
from outlast import AsyncClient, Queue
from outlast.protocol.calls import Call
from outlast_worker import JobContext, Worker
from outlast_worker.tcp import AsyncTcpTransport

COUNTS = {1_000: 3_000, 10_000: 1_500, 100_000: 400, 1_000_000: 80}
"""Bytes, and how many jobs of them a round has."""
WORDS = "a prompt that somebody wrote, "


def label(x: float) -> str:
    return f"{x / 1e6:g} MB" if x >= 1e6 else f"{x / 1e3:g} kB"


async def one(url: str, raw: Any, size: int, number: int) -> dict[str, float]:
    count = COUNTS[size]
    payload = (WORDS * (size // len(WORDS) + 1))[: size - 2]
    figures: dict[str, float] = {"mb": size / 1e6}
    transport = AsyncTcpTransport(url)

    async def phase(name: str, work: Any) -> None:
        server, client, began = server_cpu(raw), time.process_time(), time.perf_counter()
        await work
        wall = time.perf_counter() - began
        figures[name] = count / wall
        figures[f"{name}_mb"] = count * size / 1e6 / wall
        figures[f"{name}_us"] = wall / count * 1e6
        figures[f"{name}_cpu"] = (time.process_time() - client) / count * 1e6
        figures[f"{name}_server"] = (server_cpu(raw) - server) / count * 1e6

    numbers = iter(range(2 * count))
    text = f'"{payload}"'
    await phase(
        "set", at_a_time(count, lambda: transport.send(Call(("SET", f"bare:{next(numbers) % count}", text), str)))
    )
    numbers = iter(range(2 * count))
    await phase("get", at_a_time(count, lambda: transport.send(Call(("GET", f"bare:{next(numbers) % count}"), len))))
    raw.flushall()
    await transport.aclose()
    queue: Queue[Any, Any] = Queue(f"payload-{size}-{number}")
    worker, done, started = Worker(url), asyncio.Event(), 0

    @worker.handles(queue, concurrency=CONCURRENCY)
    async def run(job: JobContext[Any]) -> None:
        nonlocal started
        started += 1
        if started == count:
            done.set()

    async with AsyncClient(url) as client:
        jobs = client.queue(queue)
        await phase("enqueue", at_a_time(count, lambda: jobs.enqueue(payload)))

        async def drain() -> None:
            async with worker:
                await done.wait()

        await phase("drain", drain())
    raw.flushall()
    return figures


def measure(rounds: int) -> Points:
    found = Found(COUNTS)
    with server() as (url, raw):
        asyncio.run(one(url, raw, 1_000, -1))  # the first pays for imports and scripts
        for number in range(rounds):
            for size in random.sample(list(COUNTS), len(COUNTS)):
                found.add(size, asyncio.run(one(url, raw, size, number)))
    return found.medians()


def panel(title: str, unit: str, measure: str, *, drain: str) -> Panel:
    names = {"enqueue": "enqueue", "drain": drain, "set": "bare SET", "get": "bare GET"}
    return Panel(title, unit, {f"{phase}_{measure}": name for phase, name in names.items()}, log=True)


PART = Part(
    "payload",
    "payload",
    label,
    measure,
    [
        [
            Column("enqueue", "enqueued", "/s"),
            Column("enqueue_mb", "in bytes", "MB/s"),
            Column("enqueue_us", "time, to a SET's", base="set_us"),
            Column("drain", "drained", "/s"),
            Column("drain_mb", "in bytes", "MB/s"),
            Column("drain_us", "time, to a GET's", base="get_us"),
        ],
        [
            Column("enqueue_cpu", "client CPU, enqueue", "µs"),
            Column("enqueue_cpu", "to a SET's", base="set_cpu"),
            Column("drain_cpu", "worker CPU", "µs"),
            Column("drain_cpu", "to a GET's", base="get_cpu"),
            Column("enqueue_server", "server CPU, enqueue", "µs"),
            Column("enqueue_server", "to a SET's", base="set_server"),
            Column("drain_server", "server CPU, drain", "µs"),
            Column("drain_server", "to a GET's", base="get_server"),
        ],
    ],
    [
        panel("throughput", "MB a second", "mb", drain="drain"),
        panel("CPU for one job, client and worker", "µs", "cpu", drain="worker"),
        panel("CPU for one job, server", "µs", "server", drain="reserve and settle"),
    ],
)
