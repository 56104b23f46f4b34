"""Which job is next, and who takes it."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest
from tests.faults.processes import Process, until

from outlast import AsyncClient, Queue
from outlast.protocol import Keys, calls
from outlast_worker import JobContext, Worker
from outlast_worker.gateway import GatewayServer
from outlast_worker.tcp import AsyncTcpTransport

from .conftest import TOKEN


async def fill(url: str, queue_name: str, count: int, **options: Any) -> list[str]:
    """Many small jobs, a thousand in one pipeline."""
    ids = [f"job-{n}" for n in range(count)]
    transport, keys = AsyncTcpTransport(url), Keys(queue_name)
    for at in range(0, count, 1000):
        await transport.send_many(
            [
                calls.enqueue(keys, id=id, nonce=id, payload="0", max_attempts=3, key_ttl_ms=1000, **options)
                for id in ids[at : at + 1000]
            ]
        )
    await transport.aclose()
    return ids


@pytest.mark.parametrize("producer", ["tcp", "rest"])
async def test_h26_an_urgent_job_starts_next_in_front_of_ten_thousand(
    valkey_url: str, gateway: GatewayServer, queue_name: str, producer: str
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)
    await fill(valkey_url, queue_name, 10_000)
    order: list[Any] = []
    workers = [Worker(valkey_url), Worker(valkey_url)]
    for worker in workers:

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> None:
            order.append(job.payload)
            await asyncio.sleep(0.02)

    client = AsyncClient(valkey_url) if producer == "tcp" else AsyncClient(gateway.url, TOKEN)
    async with client, AsyncExitStack() as stack:
        jobs = client.queue(queue)
        for worker in workers:
            await stack.enter_async_context(worker)
        await until(lambda: len(order) > 4, "both are busy")
        await jobs.enqueue("now", priority=9)
        before = len(order)
        await until(lambda: "now" in order, "the urgent job starts")
        # Each of the two may have taken one more while the answer was on its way.
        assert order.index("now") <= before + 4
        due = asyncio.get_running_loop().time() + 0.5
        await jobs.enqueue("later", priority=9, delay=0.5)
        await until(lambda: "later" in order, "the delayed one starts")
        assert asyncio.get_running_loop().time() - due < 1
        for worker in workers:
            worker.stop(now=True)


async def test_h30_work_spreads_and_a_killed_worker_held_no_more_than_it_ran(
    queue_name: str, aclient: AsyncClient, spawn: Any
) -> None:
    jobs = aclient.queue(Queue[Any, Any](queue_name))
    workers: list[Process] = [spawn("sleep", seconds=0.15, queue={"lease": 0.8}) for _ in range(4)]
    for worker in workers:
        await worker.wait_for("up")
    await asyncio.sleep(0.3)
    ids = [(await jobs.enqueue(None)).id for _ in range(40)]
    await workers[0].wait_for("start", 3)
    workers[0].kill()
    for id in ids:
        assert await jobs.wait(id, timeout=30) == "slept"
    started = [[line["id"] for line in worker.said("start")] for worker in workers]
    ended = [line["id"] for line in workers[0].said("end")]
    assert len(started[0]) - len(ended) <= 1
    assert sum(len(each) for each in started) <= 41
    assert {id for id, times in Counter(itertools.chain(*started)).items() if times > 1} == set(started[0]) - set(ended)
    assert all(8 <= len(each) <= 17 for each in started[1:]), [len(each) for each in started]
