"""A database that is 0.2, 5 or 40 ms away, and one next door.

What a network adds is a process of ours (`benchmarks.growth.link`). What that takes by itself is subtracted, as far as
there is any left: the way is what a bare PING through it takes, which stands in the table and by which the rest is
divided. Client and worker share a process and a clock, and each has its connections.
"""

from __future__ import annotations

import asyncio
import random
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from subprocess import Popen
from typing import Any

from benchmarks.growth.common import CONCURRENCY, Column, Found, Part, Points, at_a_time, child, process_cpu, server
from benchmarks.plots import Panel
from outlast import AsyncClient, Queue
from outlast.aio import AsyncJobs
from outlast_worker import JobContext, Worker

AWAY = (0.0, 0.2, 5.0, 40.0)
"""ms. 0: without the process in between."""
STARTS, CANCELS, VIEWS = 30, 15, 20
STREAM = 1.0
"""Seconds."""


def label(x: float) -> str:
    return f"{x:g} ms" if x else "none"


def jobs_of(x: float) -> int:
    return 2_000 if x > 10 else 6_000


def ping(port: int) -> float:
    """ms of a bare round trip."""
    times = []
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(30):
            began = time.perf_counter()
            link.sendall(b"PING\r\n")
            link.recv(100)
            times.append((time.perf_counter() - began) * 1e3)
            time.sleep(0.001)
    return statistics.median(times)


Handler = Callable[[JobContext[Any]], Coroutine[Any, Any, None]]


@asynccontextmanager
async def working(url: str, name: str, run: Handler, concurrency: int = CONCURRENCY) -> AsyncIterator[Worker]:
    worker = Worker(url)
    worker.handles(Queue(name), concurrency=concurrency)(run)
    async with worker:
        yield worker


async def starts(url: str, jobs: AsyncJobs[Any, Any], name: str) -> float:
    """ms from the call of enqueue to the handler's first line."""
    times: list[float] = []
    ran = asyncio.Event()

    async def run(job: JobContext[Any]) -> None:
        times.append((time.perf_counter() - began) * 1e3)
        ran.set()

    async with working(url, name, run):
        for _ in range(STARTS + 3):
            ran.clear()
            began = time.perf_counter()
            asking = asyncio.ensure_future(jobs.enqueue(None))
            await ran.wait()
            job = await asking
            await jobs.wait(job.id)
            await asyncio.sleep(random.uniform(0.001, 0.01))
    return statistics.median(times[3:])


async def cancels(url: str, jobs: AsyncJobs[Any, Any], name: str) -> float:
    """ms from the call of cancel to the interruption of a handler that says nothing."""
    times: list[float] = []
    running, gone = asyncio.Event(), asyncio.Event()

    async def run(job: JobContext[Any]) -> None:
        running.set()
        try:
            await asyncio.sleep(60)
        finally:
            times.append((time.perf_counter() - began) * 1e3)
            gone.set()

    async with working(url, name, run):
        for _ in range(CANCELS):
            running.clear()
            gone.clear()
            job = await jobs.enqueue(None)
            await running.wait()
            await asyncio.sleep(random.uniform(0.01, 0.05))
            began = time.perf_counter()
            asking = asyncio.ensure_future(jobs.cancel(job.id))
            await gone.wait()
            await asking
    return statistics.median(times)


async def drains(url: str, jobs: AsyncJobs[Any, Any], name: str, count: int) -> dict[str, float]:
    began, started, done = 0.0, 0, asyncio.Event()

    async def run(job: JobContext[Any]) -> None:
        nonlocal began, started
        began = began or time.perf_counter()
        started += 1
        if started == count:
            done.set()

    enqueued = await at_a_time(count, lambda: jobs.enqueue(None))
    async with working(url, name, run):
        await done.wait()
        wall = time.perf_counter() - began
    return {"enqueue": count / enqueued, "drain": count / wall}


async def streams(url: str, jobs: AsyncJobs[Any, Any], name: str) -> dict[str, float]:
    """Tokens a second of one job: emitted as fast as it goes, and each written before the next."""
    found: dict[str, float] = {}

    async def run(job: JobContext[Any]) -> None:
        for flushed in (False, True):
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < STREAM / 2:
                await job.emit("token ")
                if flushed:
                    await job.flush()
                elif count % 100 == 0:
                    await asyncio.sleep(0)  # a provider's stream would let others run, too
                count += 1
            await job.flush()
            found["flushed" if flushed else "tokens"] = count / (time.perf_counter() - began)

    async with working(url, name, run):
        job = await jobs.enqueue(None)
        await jobs.wait(job.id)
    return found


async def views(url: str, jobs: AsyncJobs[Any, Any], name: str) -> float:
    """ms from an emit to a viewer, when the one before is long gone."""
    times: list[float] = []
    seen = asyncio.Event()

    async def run(job: JobContext[Any]) -> None:
        await seen.wait()
        for _ in range(VIEWS):
            await asyncio.sleep(random.uniform(0.06, 0.09))
            await job.emit(repr(time.perf_counter()))

    async with working(url, name, run):
        job = await jobs.enqueue(None)
        viewing = jobs.watch(job.id)
        asyncio.get_running_loop().call_later(0.2, seen.set)
        async for event in viewing:
            if event.type == "chunk":
                times += [(time.perf_counter() - float(event.data)) * 1e3]
    return statistics.median(times[1:])


async def one(port: int, x: float, number: int) -> dict[str, float]:
    url = f"redis://127.0.0.1:{port}"
    far = ping(port)
    figures = {"far": far}
    async with AsyncClient(url) as client:

        def queue(kind: str) -> tuple[AsyncJobs[Any, Any], str]:
            name = f"{kind}-{x}-{number}"
            return client.queue(Queue(name)), name

        figures["start"] = await starts(url, *queue("start"))
        figures["cancel"] = await cancels(url, *queue("cancel"))
        figures |= await drains(url, *queue("drain"), jobs_of(x))
        figures |= await streams(url, *queue("stream"))
        figures["view"] = await views(url, *queue("view"))
    if x:
        figures["one"] = 1
        figures |= {f"{name}_trips": figures[name] / far for name in ("start", "cancel", "view")}
        figures["flushed_trips"] = 1e3 / figures["flushed"] / far
        for name in ("enqueue", "drain"):
            figures[f"{name}_trips"] = CONCURRENCY / figures[name] * 1e3 / far
        figures["bound"] = CONCURRENCY / far * 1e3
    return figures


def link_to(port: int, delay: float) -> tuple[Popen[str], int]:
    process = child("link", port, delay)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def measure(rounds: int) -> Points:
    found = Found(AWAY)
    with server() as (_, raw):
        port = raw.connection_pool.connection_kwargs["port"]
        links, ports = {}, {0.0: port}
        try:
            links[0.0], near = link_to(port, 0)
            own = ping(near)
            for x in filter(None, AWAY):
                links[x], ports[x] = link_to(port, max(0, x - own) / 1e3)
            for number in range(rounds):
                for x in random.sample(AWAY, len(AWAY)):
                    before = process_cpu(links[x].pid) if x else 0
                    began = time.perf_counter()
                    figures = asyncio.run(one(ports[x], x, number))
                    if x:
                        used = process_cpu(links[x].pid) - before
                        figures["link"] = used / (time.perf_counter() - began) * 100
                    found.add(x, figures)
                    raw.flushall()
        finally:
            for link in links.values():
                link.terminate()
                link.wait()
    return found.medians()


PART = Part(
    "latency",
    "network",
    label,
    measure,
    [
        [
            Column("far", "a PING", "ms"),
            Column("start", "enqueue to start", "ms"),
            Column("start_trips", "in PINGs", base="one"),
            Column("cancel", "cancel to interrupted", "ms"),
            Column("cancel_trips", "in PINGs", base="one"),
            Column("view", "emit to viewer", "ms"),
            Column("view_trips", "in PINGs", base="one"),
        ],
        [
            Column("drain", "drained", "/s"),
            Column("drain_trips", "PINGs a job and slot", base="one"),
            Column("enqueue", "enqueued", "/s"),
            Column("enqueue_trips", "PINGs a call", base="one"),
            Column("tokens", "tokens of one stream", "/s"),
            Column("flushed", "each flushed", "/s"),
            Column("flushed_trips", "PINGs a flush", base="one"),
        ],
    ],
    [
        Panel(
            "how long, p50",
            "ms",
            {"far": "a PING", "start": "enqueue to start", "cancel": "cancel to interrupted", "view": "emit to viewer"},
            log=True,
        ),
        Panel(
            "how many a second, 50 at a time",
            "jobs a second",
            {"drain": "drained", "enqueue": "enqueued", "bound": "one PING a job"},
            log=True,
        ),
        Panel("one stream", "tokens a second", {"tokens": "emitted", "flushed": "each flushed"}, log=True),
    ],
)
