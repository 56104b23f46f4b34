"""Three workers behind links that are cut, held and swallow replies: every stream is whole, every job ends."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import Any

import redis
from tests.faults.links import Proxy

from outlast import AsyncClient, Queue
from outlast.protocol import Keys
from outlast_worker import JobContext, Worker

SECONDS = 4.0


async def disturb(proxy: Proxy, rng: random.Random) -> None:
    match rng.choice(("cut", "drop", "hold", "down")):
        case "cut":
            await asyncio.to_thread(proxy.cut)
        case "drop":
            proxy.drop_next = 2
        case "hold":
            await asyncio.to_thread(proxy.hold, new=rng.random() < 0.5)
        case _:
            await asyncio.to_thread(proxy.down)
    await asyncio.sleep(rng.random() * rng.choice((0.1, 1.2)))
    await asyncio.to_thread(proxy.heal)


async def test_random_faults_lose_and_repeat_nothing(
    valkey_url: str, queue_name: str, aclient: AsyncClient, raw: redis.Redis, keys: Keys
) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)  # shown when it fails
    rng = random.Random(seed)
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.8, max_attempts=1000, backoff=0.01, max_backoff=0.05)
    jobs = aclient.queue(queue)
    whole = "".join(f"{n}," for n in range(10))

    async def one() -> None:
        job = await jobs.enqueue(None)
        text = ""
        async for event in jobs.watch(job.id):
            if event.type == "restarted":
                text = ""
            elif event.type == "chunk":
                text += event.data
        assert (event.type, text) == ("completed", whole)

    async with AsyncExitStack() as stack:
        proxies = [stack.enter_context(Proxy(valkey_url)) for _ in range(3)]
        for proxy in proxies:
            worker = Worker(proxy.url + "?socket_timeout=0.4", emit_interval=0.01)

            @worker.handles(queue, concurrency=5)
            async def run(job: JobContext[Any]) -> str:
                for n in range(10):
                    await job.emit(f"{n},")
                    await asyncio.sleep(rng.random() * 0.02)
                if rng.random() < 0.1:
                    raise ValueError
                return "R"

            await stack.enter_async_context(worker)
        end = asyncio.get_running_loop().time() + SECONDS
        watching: set[asyncio.Task[None]] = set()
        while asyncio.get_running_loop().time() < end:
            watching |= {asyncio.create_task(one()) for _ in range(25 - sum(not task.done() for task in watching))}
            await disturb(rng.choice(proxies), rng)
        for proxy in proxies:
            proxy.drop_next = 0
        await asyncio.wait_for(asyncio.gather(*watching), 30)
    assert len(watching) > 50
    assert raw.zcard(keys.leases) == raw.zcard(keys.ready) == raw.zcard(keys.scheduled) == 0
