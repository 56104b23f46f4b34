"""outlast, as its documentation has it used: a typed queue, a client over TCP, a worker with the extra `fast`."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from typing import Any

from pydantic import BaseModel

from benchmarks.contest import CONCURRENCY, Contestant, Measure, fill, main, spread
from outlast import AsyncClient, Queue
from outlast_worker import JobContext, Worker
from outlast_worker.worker import _fast_loop


class Work(BaseModel):
    kind: str
    number: float
    text: str = ""


QUEUE: Queue[Work, None] = Queue("benchmark", payload=Work)


class Ours(Contestant):
    loop = _fast_loop()

    async def open(self) -> None:
        self.jobs = AsyncClient(redis_url=self.url).queue(QUEUE)

    async def enqueue(self, kind: str, number: float, text: str = "", **options: Any) -> Any:
        return (await self.jobs.enqueue(Work(kind=kind, number=number, text=text), **options)).id

    async def start(self) -> None:
        self.worker = Worker(self.url)

        @self.worker.handles(QUEUE, concurrency=CONCURRENCY)
        async def run(job: JobContext[Work]) -> None:
            await self.handle(job.payload.kind, job.payload.number)

        await self.worker.__aenter__()

    async def stop(self) -> None:
        await self.worker.__aexit__(None, None, None)

    async def cancel(self, handle: Any) -> None:
        await self.jobs.cancel(handle)


async def late(ours: Ours, count: int) -> dict[str, float]:
    """Milliseconds by which delayed jobs start late on an otherwise idle worker."""
    due: dict[float, float] = {}
    times: list[float] = []
    done = asyncio.Event()

    def started(number: float) -> None:
        times.append((time.perf_counter() - due[number]) * 1e3)
        if len(times) == count:
            done.set()

    ours.started = started
    await ours.start()
    for number in range(count):
        delay = random.uniform(0.2, 2)
        due[number] = time.perf_counter() + delay
        await ours.enqueue("noop", number, delay=delay)
        due[number] = max(due[number], time.perf_counter())
        await asyncio.sleep(random.uniform(0, 0.05))
    await done.wait()
    await ours.stop()
    found = spread(times)
    return {"value": found["p99"], "p50": found["value"]}


async def killed(ours: Ours, count: int) -> dict[str, float]:
    """Seconds beyond the lease from kill -9 of the worker that has a job to its next start elsewhere; the longest."""
    times: list[float] = []
    again = asyncio.Event()

    def started(number: float) -> None:
        times.append(time.time() - died - LEASE)
        again.set()

    ours.started = started
    for number in range(count):
        id = await ours.enqueue("sleep", number)
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.ours", "child", ours.url), stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        await child.stdout.readline()
        await ours.start()
        await asyncio.sleep(random.uniform(0, 0.3))
        died = time.time()
        again.clear()
        child.kill()
        await child.wait()
        await again.wait()
        await ours.cancel(id)
        await ours.stop()
    return {"value": max(times)}


LEASE = 2.0


def child(url: str) -> None:
    """A worker that takes a job, says so, and is killed."""
    worker = Worker(url, lease=LEASE)

    @worker.handles(QUEUE)
    async def run(job: JobContext[Work]) -> None:
        os.write(1, b"started\n")
        await asyncio.sleep(60)

    worker.run()


async def trips(ours: Ours, count: int) -> dict[str, float]:
    """Writes to the database for each job, enqueue and run, while 50 producers and 50 slots are busy."""
    from tests.faults.links import Proxy

    with Proxy(ours.url) as proxy:
        direct, ours.url = ours.url, proxy.url
        await ours.open()
        done = asyncio.Event()

        def started(number: float) -> None:
            if ours.starts == count:
                done.set()

        ours.started = started
        await ours.start()
        await fill(ours, count)
        await done.wait()
        await ours.stop()
        ours.url = direct
        return {"value": proxy.messages / count}


async def flushes(ours: Ours, count: int) -> dict[str, float]:
    """Flushes a second through one worker: 50 handlers write and wait for each write."""
    worker = Worker(ours.url, emit_interval=0)
    began: list[float] = []

    @worker.handles(Queue("flushes"), concurrency=CONCURRENCY)
    async def run(job: JobContext[Any]) -> None:
        began.append(time.perf_counter())
        for _ in range(count // CONCURRENCY):
            await job.emit("token ")
            await job.flush()

    jobs = AsyncClient(redis_url=ours.url).queue(Queue("flushes"))
    ids = [(await jobs.enqueue(None)).id for _ in range(CONCURRENCY)]
    async with worker:
        for id in ids:
            await jobs.wait(id)
        return {"value": count / (time.perf_counter() - began[0])}


async def stream(ours: Ours, count: int) -> dict[str, float]:
    """Milliseconds from an emit to its viewer: `count` jobs at 100 tokens a second, a viewer for each tenth."""
    worker = Worker(ours.url)
    seconds = 6.0

    @worker.handles(Queue("stream"), concurrency=count)
    async def run(job: JobContext[Any]) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            await job.emit(f"{time.perf_counter()} ")
            await asyncio.sleep(0.01)

    jobs = AsyncClient(redis_url=ours.url).queue(Queue("stream"))
    ids = [(await jobs.enqueue(None)).id for _ in range(count)]
    times: list[float] = []

    async def view(id: str) -> None:
        async for event in jobs.watch(id):
            if event.type == "chunk":
                now = time.perf_counter()
                times.extend((now - float(word)) * 1e3 for word in event.data.split())

    async with worker:
        await asyncio.gather(*(view(id) for id in ids[::10]))
    found = spread(times)
    return {"value": found["p99"], "p50": found["value"]}


MORE: dict[str, tuple[Measure, int]] = {
    "late": (late, 200),
    "killed": (killed, 2),
    "trips": (trips, 3000),
    "flushes": (flushes, 20_000),
    "stream": (stream, 200),
}


if __name__ == "__main__":
    if sys.argv[1] == "child":
        child(sys.argv[2])
    main(Ours, MORE)
