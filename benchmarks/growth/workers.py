"""One to sixteen worker processes that drain one queue of jobs that do nothing.

The workers are up and the queue is full before it is resumed. A reserve that took nothing is known from the server's
counts: each that looks for jobs pops once (ZPOPMIN), and one that took some notes which (SET).
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

from benchmarks.growth.common import (
    CONCURRENCY,
    Column,
    Found,
    Part,
    Points,
    child,
    count_of,
    process_cpu,
    server,
    server_cpu,
)
from benchmarks.plots import Panel
from outlast import Client, Queue
from outlast.protocol import Keys
from outlast_worker import JobContext, Worker

COUNTS = (1, 2, 4, 8, 16)
JOBS = 20_000
QUEUE: Queue[Any, Any] = Queue("workers")
KEYS = Keys("workers")


def work(url: str) -> None:
    worker = Worker(url)

    @worker.handles(QUEUE, concurrency=CONCURRENCY)
    async def run(job: JobContext[Any]) -> None: ...

    worker.run()


def one(count: int) -> dict[str, float]:
    with server() as (url, raw), Client(url) as client:
        jobs = client.queue(QUEUE)
        jobs.pause()
        for _ in range(0, JOBS, 10_000):
            jobs.enqueue_many([None] * 10_000)
        workers = [child("workers", url) for _ in range(count)]
        while raw.hlen(KEYS.workers) < count:
            time.sleep(0.05)
        time.sleep(0.5)
        looks, hits = count_of(raw, "zpopmin"), count_of(raw, "set")
        server_before, worker_before = server_cpu(raw), sum(process_cpu(worker.pid) for worker in workers)
        began = time.perf_counter()
        jobs.resume()
        while raw.zcard(KEYS.ready) or raw.zcard(KEYS.leases):
            time.sleep(0.005)
        wall = time.perf_counter() - began
        server_used = server_cpu(raw) - server_before
        worker_used = sum(process_cpu(worker.pid) for worker in workers) - worker_before
        looks, hits = count_of(raw, "zpopmin") - looks, count_of(raw, "set") - hits
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()
    return {
        "drain": JOBS / wall,
        "server": server_used / JOBS * 1e6,
        "worker": worker_used / JOBS * 1e6,
        "server_share": server_used / wall * 100,
        "worker_share": worker_used / wall * 100,
        "take": JOBS / hits,
        "wasted": (looks - hits) / JOBS,
    }


def measure(rounds: int) -> Points:
    found = Found(COUNTS)
    for _ in range(rounds):
        for count in random.sample(COUNTS, len(COUNTS)):
            found.add(count, one(count))
    return found.medians()


PART = Part(
    "workers",
    "workers",
    lambda x: f"{x:g}",
    measure,
    [
        [
            Column("drain", "jobs a second, all", "/s"),
            Column("server", "server CPU a job", "µs"),
            Column("worker", "worker CPU a job", "µs"),
            Column("server_share", "server: of one core", "%"),
            Column("worker_share", "workers: of one core", "%"),
            Column("take", "jobs a reserve"),
            Column("wasted", "reserves in vain a job"),
        ]
    ],
    [
        Panel("jobs a second, all workers", "jobs a second", {"drain": "drained"}),
        Panel("CPU for one job", "µs", {"server": "server", "worker": "worker"}),
    ],
)

if __name__ == "__main__":
    work(sys.argv[1])
