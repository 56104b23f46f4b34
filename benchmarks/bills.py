"""Billed commands, counted by the server itself: every command of a client and every call inside a script."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import redis
from tests.servers import start_valkey

from outlast import AsyncClient, Queue
from outlast_worker import JobContext, Worker
from outlast_worker.costs import idle_month
from outlast_worker.gateway import Database, GatewayConfig, GatewayServer
from outlast_worker.registration import PROMPT, THRIFTY

FREE = {"info", "config|resetstat", "hello", "auth", "select", "client|setinfo", "client|setname", "ping", "monitor"}
DAY = 86_400
QUIET = 30.0
"""Seconds of doing nothing that are counted: 60 of a worker's blocks, which are shortened for that."""


class Counter:
    def __init__(self, url: str) -> None:
        self._raw = redis.Redis.from_url(url)

    def reset(self) -> None:
        self._raw.config_resetstat()

    def _calls(self) -> dict[str, int]:
        stats: dict[str, dict[str, int]] = self._raw.info("commandstats")
        return {name.removeprefix("cmdstat_").lower(): value["calls"] for name, value in stats.items()}

    def of(self, command: str) -> int:
        return self._calls().get(command, 0)

    def total(self) -> int:
        return sum(calls for name, calls in self._calls().items() if name not in FREE)


async def enqueue(url: str, count: Counter, **options: Any) -> float:
    jobs = AsyncClient(redis_url=url).queue(Queue("bill"))
    await jobs.enqueue(None)
    count.reset()
    for n in range(100):
        await jobs.enqueue(None, **({"idempotency_key": f"k{n}"} if options.get("key") else {}))
    return count.total() / 100


async def generation(url: str, count: Counter, **options: Any) -> float:
    """A job of 200 tokens over 5 s, from its enqueue to its end, nobody watching."""
    ended = asyncio.Event()
    queue: Queue[Any, Any] = Queue("bill")
    worker = Worker(url, **options)

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> str:
        began = time.monotonic()
        for n in range(200):
            await job.emit("token ")
            await asyncio.sleep(max(0, began + (n + 1) * 0.025 - time.monotonic()))
        ended.set()
        return "token " * 200

    jobs = AsyncClient(redis_url=url).queue(queue)
    async with worker:
        await asyncio.sleep(0.5)
        count.reset()
        job = await jobs.enqueue(None)
        await ended.wait()
        await asyncio.sleep(0.5)
        total = count.total()
        assert (await jobs.get(job.id)).status == "completed"  # type: ignore[union-attr]
    return total


async def idle(url: str, count: Counter, **options: Any) -> float:
    """What a block costs, counted over enough of them for what only some of them do, and as many as a month has."""
    worker = Worker(url, block=0.5, **options)
    worker.handles(Queue("bill"))(lambda job: None)
    async with worker:
        await asyncio.sleep(2)
        count.reset()
        await asyncio.sleep(QUIET)
        blocks = count.of("blpop")
        signs = count.of("hset")
        per_block = (count.total() - signs) / blocks
    pace = THRIFTY if options.get("economy") else PROMPT
    return idle_month(pace, min(pace.block, 60 * pace.share), per_block)


async def viewer(url: str, count: Counter, **options: Any) -> float:
    """A watch over HTTP of a job that says nothing."""
    config = GatewayConfig(databases=[Database(redis_url=url, token="bill")])
    async with GatewayServer(config) as gateway, AsyncClient(url=gateway.url, token="bill") as client:
        jobs = client.queue(Queue("bill"))
        job = await jobs.enqueue(None)

        async def watch() -> None:
            async for _ in jobs.watch(job.id):
                pass

        watching = asyncio.create_task(watch())
        await asyncio.sleep(15)  # it has backed off by then
        count.reset()
        await asyncio.sleep(30)
        total = count.total()
        watching.cancel()
        await asyncio.wait([watching])
    return total * DAY / 30


Bill = Callable[..., Awaitable[float]]
BILLS: tuple[tuple[str, Bill, dict[str, Any], float | None, str], ...] = (
    ("enqueue", enqueue, {}, 8, "14"),
    ("enqueue with a key", enqueue, {"key": True}, 10, "16"),
    ("a 200-token job over 5 s, default interval", generation, {}, 350, "1,249"),
    ("the same in economy mode", generation, {"economy": True}, 100, "–"),
    ("an idle worker, a month, in economy mode, as by itself on Upstash", idle, {"economy": True}, 350_000, "3.6 M"),
    ("the same at the pace of a database that bills nothing", idle, {}, None, "–"),
    ("a quiet viewer over HTTP, a day", viewer, {}, 45_000, "172,800"),
)


async def bill(measure: Bill, options: dict[str, Any]) -> float:
    with start_valkey(config={"save": ""}) as server:
        url = f"redis://127.0.0.1:{server.port}"
        return await measure(url, Counter(url), **options)


async def table() -> list[str]:
    """Each on a server of its own, all at the same time: they wait more than they work."""
    found = await asyncio.gather(*(bill(measure, options) for _, measure, options, _, _ in BILLS))
    lines = ["| | outlast | reach | reached | benni (quoted) |", "|---|---|---|---|---|"]
    for (title, _, _, reach, quoted), value in zip(BILLS, found, strict=True):
        wanted = "– | –" if reach is None else f"≤ {reach:,.0f} | {'yes' if value <= reach else '**no**'}"
        lines.append(f"| {title} | {value:,.0f} | {wanted} | {quoted} |")
    return lines
