"""A thousand to a million waiting jobs.

A database for each size, all filled before and side by side, so that the rounds can go from one to the other. They are
filled by two processes that call `enqueue_many` over TCP. Each operation is then called one at a time on one
connection: what the server used for all of them by its own account (INFO cpu), and how long each took.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from typing import Any

from benchmarks.growth.common import Column, Found, Part, Points, percentile, server, server_cpu, thousands
from benchmarks.plots import Panel
from outlast import AsyncClient, Client, Queue
from outlast.listing import JobState
from outlast.protocol import Keys, holding
from outlast.protocol.holding import Reserved
from outlast.transport import adrive
from outlast_edge.dashboard import _reads as dashboard
from outlast_worker.tcp import AsyncTcpTransport

SIZES = (1_000, 10_000, 100_000, 1_000_000)
QUEUE: Queue[Any, Any] = Queue("waiting")
KEYS = Keys("waiting")
PAYLOAD = "x" * 98
BATCH = 10_000
EACH = 100
"""Calls of an operation before it is another database's turn."""
TTL = 600_000
PURGE = 2.0
"""Seconds for which each queue is purged in the end, or until it is empty."""
OPERATIONS = {
    "enqueue": "enqueue",
    "reserve": "reserve of 10",
    "settle": "settle",
    "cancel": "cancel",
    "get": "`get`",
    "stats": "`stats`",
    "dead": "`dead(20)`",
    "page": "dashboard page",
}
SLOW = 50_000
"""µs from which on a command counts as slow."""


def _enqueue(url: str, count: int) -> None:
    jobs = Client(url).queue(QUEUE)
    for at in range(0, count, BATCH):
        jobs.enqueue_many([PAYLOAD] * min(BATCH, count - at))


def fill(url: str, count: int, pool: ProcessPoolExecutor) -> None:
    shares = [pool.submit(_enqueue, url, count // 2), pool.submit(_enqueue, url, count - count // 2)]
    for share in shares:
        share.result()


class Site:
    """One of the databases, and who works with it."""

    def __init__(self, url: str, raw: Any) -> None:
        self.raw = raw
        self.client = AsyncClient(url)
        self.jobs = self.client.queue(QUEUE)
        self.transport = AsyncTcpTransport(url)
        self.requests = 0
        self.held: list[Reserved] = []
        self.made: list[str] = []
        self.ids: list[str] = []
        self.took: dict[str, list[float]] = {name: [] for name in OPERATIONS}

    async def enqueue(self) -> None:
        self.made.append((await self.jobs.enqueue(PAYLOAD)).id)

    async def reserve(self) -> None:
        self.requests += 1
        call = holding.reserve(
            KEYS, worker="w", request=self.requests, k=10, lease_ms=TTL, result_ttl_ms=TTL, dead_ttl_ms=TTL
        )
        self.held += (await self.transport.send(call)).jobs

    async def settle(self) -> None:
        job = self.held.pop()
        status: Any = "failed" if len(self.held) % 2 else "completed"
        await self.transport.send(
            holding.settle(KEYS, job, status=status, body='"x"', ttl_ms=TTL, cancel_ttl_ms=TTL, count=0)
        )

    async def cancel(self) -> None:
        assert await self.jobs.cancel(self.made.pop())

    async def get(self) -> None:
        assert await self.jobs.get(self.ids.pop()) is not None

    async def page(self) -> None:
        state: JobState = "waiting"
        await adrive(self.transport, dashboard.queue("waiting", KEYS, state, False, dashboard.History()))

    def draw(self) -> None:
        """Ids from anywhere in the queue: neighbours would be in the processor's cache."""
        mark = KEYS.job("")
        while len(self.ids) < EACH:
            key = self.raw.randomkey().decode()
            if key.startswith(mark):
                self.ids.append(key.removeprefix(mark))
        random.shuffle(self.made)

    async def time(self, name: str) -> dict[str, float]:
        """Microseconds of the server for one call. All operations together leave as many jobs waiting as before."""
        operations: dict[str, tuple[int, Callable[[], Awaitable[Any]]]] = {
            "enqueue": (2 * EACH, self.enqueue),
            "reserve": (EACH // 10, self.reserve),
            "settle": (EACH, self.settle),
            "cancel": (EACH, self.cancel),
            "get": (EACH, self.get),
            "stats": (EACH, self.jobs.stats),
            "dead": (EACH, lambda: self.jobs.dead(count=20)),
            "page": (EACH // 5, self.page),
        }
        count, operation = operations[name]
        self.draw()
        if name == "enqueue":
            self.made.clear()  # those that are left may have been taken when it is time to cancel
        before = server_cpu(self.raw)
        for _ in range(count):
            began = time.perf_counter()
            await operation()
            self.took[name].append(time.perf_counter() - began)
        return {name: (server_cpu(self.raw) - before) / count * 1e6}

    async def purge(self) -> dict[str, float]:
        """Jobs a second that a purge ends, and how long others then wait for an answer."""
        waiting, began = (await self.jobs.stats()).waiting, time.perf_counter()
        purging = asyncio.create_task(self.jobs.purge("waiting"))
        times: list[float] = []
        async with AsyncExitStack() as stack:
            other = (await stack.enter_async_context(AsyncClient(self.url))).queue(QUEUE)
            while not purging.done() and time.perf_counter() - began < PURGE:
                asked = time.perf_counter()
                await other.stats()
                times.append((time.perf_counter() - asked) * 1e3)
                await asyncio.sleep(0.002)
            purging.cancel()
            await asyncio.wait([purging])
            took = time.perf_counter() - began
            gone = waiting - (await other.stats()).waiting
        return {"purged": gone / took, "meanwhile": percentile(times, 0.99)}

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.raw.connection_pool.connection_kwargs['port']}"

    async def close(self) -> None:
        await self.client.aclose()
        await self.transport.aclose()


async def _rounds(sites: dict[float, Site], rounds: int, found: Found) -> None:
    for _ in range(4 * rounds):
        for name in OPERATIONS:
            for size in random.sample(list(sites), len(sites)):
                found.add(size, await sites[size].time(name))
    for size, site in sites.items():
        found.add(size, {f"{name}_p99": percentile(site.took[name], 0.99) * 1e3 for name in OPERATIONS})
        found.add(size, await site.purge())
        found.add(size, {"slow": site.raw.slowlog_len()})
        await site.close()


def measure(rounds: int) -> Points:
    found = Found(SIZES)
    with ExitStack() as stack:
        pool = stack.enter_context(ProcessPoolExecutor(2, multiprocessing.get_context("spawn")))
        sites: dict[float, Site] = {}
        for size in SIZES:
            url, raw = stack.enter_context(server())
            before, began = raw.info("memory")["used_memory"], time.perf_counter()
            fill(url, size, pool)
            print(f"  {size:,} enqueued in {time.perf_counter() - began:.1f} s", file=sys.stderr)
            memory = raw.info("memory")["used_memory"] - before
            stats: dict[str, Any] = raw.memory_stats()
            record = raw.memory_usage(KEYS.job(raw.zrange(KEYS.ready, 0, 0)[0].decode()), samples=0)
            found.add(
                size,
                {
                    "bytes": memory / size,
                    "record": record,
                    "ready": raw.memory_usage(KEYS.ready, samples=0) / size,
                    "table": stats["db.0"]["overhead.hashtable.main"] / size,
                },
            )
            raw.config_set("slowlog-log-slower-than", SLOW)
            raw.slowlog_reset()
            sites[size] = Site(url, raw)
        asyncio.run(_rounds(sites, rounds, found))
    return found.medians()


PART = Part(
    "waiting",
    "waiting jobs",
    thousands,
    measure,
    [
        [*(Column(name, title, "µs") for name, title in OPERATIONS.items()), Column("bytes", "bytes a job")],
        [
            *(Column(f"{name}_p99", f"{title}, p99", "ms") for name, title in OPERATIONS.items() if name != "dead"),
            Column("purged", "purged", "/s"),
            Column("meanwhile", "`stats` meanwhile, p99", "ms"),
            Column("slow", "commands over 50 ms"),
        ],
    ],
    [
        Panel(
            "server CPU for one call",
            "µs",
            {name: title.strip("`") for name, title in OPERATIONS.items() if name != "dead"},
            log=True,
        ),
        Panel(
            "memory",
            "bytes a job",
            {
                "bytes": "in all",
                "record": "its record",
                "ready": "its place in the queue",
                "table": "its place among the keys",
            },
        ),
    ],
)
