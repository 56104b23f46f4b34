"""One to ten thousand jobs that one worker holds, whose handlers wait.

The worker is a process of its own with a heartbeat of 1 s, a fifteenth of the default, so that a short look sees
several renewals. First nobody disturbs it: its CPU and the commands that reach the server. Then the oldest lease is
looked at again and again, and jobs are cancelled. In the end the worker is told to stop: in one round its handlers
then end, the first ones one by one, in the next it is told a second time and hands all of them back.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from benchmarks.growth.common import (
    Column,
    Found,
    Part,
    Points,
    child,
    percentile,
    process_cpu,
    server,
    server_cpu,
    thousands,
)
from benchmarks.plots import Panel
from outlast import Client, Queue
from outlast.protocol import Keys
from outlast_worker import JobContext, Worker

COUNTS = (1, 10, 100, 1_000, 10_000)
LEASE = 4.0
BEAT = LEASE / 4
QUEUE: Queue[Any, Any] = Queue("active", lease=LEASE, timeout=600)
KEYS = Keys("active")
QUIET = 3 * BEAT
CANCELS = 20
FEW, APART = 20, 0.02
"""So many handlers end one after the other once the worker stops, seconds apart; then all others."""
READS = ("time", "info", "zrange", "zcard")
"""Commands of the one who looks."""


def work(url: str, count: int) -> None:
    """The worker. It prints when a handler is interrupted, and what the first ends cost while it stops."""
    worker = Worker(url, concurrency=count)
    gates: list[asyncio.Event] = []
    numbers = itertools.count()
    ending: list[asyncio.Task[None]] = []

    @worker.handles(QUEUE, concurrency=count)
    async def run(job: JobContext[Any]) -> None:
        number = next(numbers)
        if number == 0:
            gates.extend(asyncio.Event() for _ in range(FEW + 1))
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGUSR1, lambda: ending.append(loop.create_task(end())))
        try:
            await gates[min(number, FEW)].wait()
        except asyncio.CancelledError:
            if job.signal.reason == "cancelled":
                print("cancelled", job.id, time.monotonic(), flush=True)
            raise

    async def end() -> None:
        before = time.process_time()
        for gate in gates[:FEW]:
            gate.set()
            await asyncio.sleep(APART)
        print("ended", time.process_time() - before, flush=True)
        gates[FEW].set()

    with suppress(SystemExit):
        worker.run()


def _now(raw: Any) -> float:
    seconds, micros = raw.time()
    return float(seconds * 1000 + micros / 1000)


def one(count: int, hand_back: bool) -> dict[str, float]:
    with server() as (url, raw), Client(url) as client:
        jobs = client.queue(QUEUE)
        ids = [made.id for made in jobs.enqueue_many([None] * count)]
        worker = child("active", url, count)
        assert worker.stdout is not None
        while not raw.zcard(KEYS.leases):
            time.sleep(0.001)
        began = time.monotonic()
        while raw.zcard(KEYS.leases) < count:
            time.sleep(0.001)
        figures = {"start": (time.monotonic() - began) / count * 1e6} if count > 100 else {}
        time.sleep(1.5 * BEAT)

        def commands() -> int:
            stats: dict[str, dict[str, int]] = raw.info("commandstats")
            return sum(s["calls"] for name, s in stats.items() if name[8:] not in READS)

        before = process_cpu(worker.pid), server_cpu(raw), commands(), time.monotonic()
        time.sleep(QUIET)
        after = process_cpu(worker.pid), server_cpu(raw), commands(), time.monotonic()
        passed = after[3] - before[3]
        figures["cpu"] = (after[0] - before[0]) / passed * 1e3
        figures["cpu_job"] = figures["cpu"] / count * BEAT * 1e3
        figures["server"] = (after[1] - before[1]) / passed * 1e3
        figures["commands"] = (after[2] - before[2]) / passed

        asked: dict[str, float] = {}
        ages: list[float] = []
        interrupted: dict[str, float] = {}

        def listen() -> None:
            for line in worker.stdout or ():
                match line.split():
                    case ["cancelled", id, at]:
                        interrupted[id] = float(at)
                    case ["ended", cpu]:
                        figures["end_cpu"] = float(cpu)

        listener = threading.Thread(target=listen)
        listener.start()
        chosen = random.sample(ids, min(CANCELS, count // 2))
        end = time.monotonic() + 2 * BEAT
        while time.monotonic() < end:
            [(_, score)] = raw.zrange(KEYS.leases, 0, 0, withscores=True)
            ages.append(_now(raw) - (score - LEASE * 1000))
            if chosen:
                asked[id := chosen.pop()] = time.monotonic()
                jobs.cancel(id)
            time.sleep(random.uniform(0.5, 1.5) * 2 * BEAT / CANCELS)
        figures["age"] = max(ages)
        while len(interrupted) < len(asked):
            time.sleep(0.01)
        times = [(interrupted[id] - asked[id]) * 1e3 for id in asked]
        if times:
            figures |= {"cancel": percentile(times, 0.5), "cancel_max": max(times)}
        left = count - len(asked)
        began = time.monotonic()
        worker.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        if hand_back:
            began = time.monotonic()
            worker.send_signal(signal.SIGTERM)
            worker.wait()
            figures["handed_back"] = raw.zcard(KEYS.ready) / left * 100
            figures["hand_back"] = time.monotonic() - began
        else:
            began = time.monotonic()
            worker.send_signal(signal.SIGUSR1)
            worker.wait()
            figures["end"] = time.monotonic() - began
        listener.join()
        if (cpu := figures.pop("end_cpu", 0.0)) and not hand_back:
            figures["end_job"] = cpu / min(FEW, left) * 1e6
        return figures


def measure(rounds: int) -> Points:
    found = Found(COUNTS)
    for round in range(max(2, rounds)):
        for count in random.sample(COUNTS, len(COUNTS)):
            found.add(count, one(count, hand_back=round % 2 == 1))
    return found.medians()


PART = Part(
    "active",
    "active jobs",
    thousands,
    measure,
    [
        [
            Column("cpu", "worker CPU a second", "ms"),
            Column("cpu_job", "for a renewal", "µs"),
            Column("server", "server CPU a second", "ms"),
            Column("commands", "commands a second", ""),
            Column("age", "longest without renewal", "ms"),
            Column("cancel", "cancel, p50", "ms"),
            Column("cancel_max", "cancel, longest", "ms"),
        ],
        [
            Column("start", "time to start one", "µs"),
            Column("end_job", "worker CPU for one that ends while it stops", "µs"),
            Column("hand_back", "second signal to exit", "s"),
            Column("handed_back", "handed back by then", "%"),
        ],
    ],
    [
        Panel("CPU while nothing happens", "ms a second", {"cpu": "worker", "server": "server"}, log=True),
        Panel("CPU for one job", "µs", {"cpu_job": "a renewal", "end_job": "its end, while stopping"}, log=True),
        Panel("longest without renewal, heartbeat 1 s", "ms", {"age": "oldest lease"}),
        Panel("cancel to interruption", "ms", {"cancel": "p50", "cancel_max": "longest"}),
    ],
)

if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]))
