"""What a database may lose, and clocks that disagree with it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import redis
from tests.faults.audit import audit_keys
from tests.faults.links import Proxy
from tests.faults.processes import Process, until
from tests.faults.servers import journalled, promote, replicated, restart

from outlast import AsyncClient, Enqueued, Queue
from outlast_worker import JobContext, Worker


async def test_h08_a_failover_that_loses_the_last_writes(queue_name: str) -> None:
    """The replica hears nothing of a settle and an enqueue that the primary had answered."""
    queue: Queue[Any, Any] = Queue(queue_name, lease=1.0)
    starts: list[tuple[str, int]] = []
    go = asyncio.Event()
    with replicated() as (primary, replica), Proxy(primary.connection_url) as address:
        worker = Worker(address.url, concurrency=4)

        @worker.handles(queue, concurrency=4)
        async def run(job: JobContext[Any]) -> str:
            starts.append((job.id, job.attempt))
            await job.emit("text")
            await job.flush()
            await go.wait()
            return "R"

        async with AsyncClient(redis_url=address.url) as client, worker:
            jobs = client.queue(queue)
            first = await jobs.enqueue(1)
            await until(lambda: starts, "the first job runs")
            with redis.Redis(port=primary.port) as raw:
                assert raw.wait(1, 5000) == 1  # so far the replica has everything
            promote(replica)
            go.set()
            assert await jobs.wait(first.id, timeout=10) == "R"
            lost = await jobs.enqueue(2, idempotency_key="two")
            assert await jobs.wait(lost.id, timeout=10) == "R"
            primary.terminate()
            await asyncio.to_thread(address.redirect, replica.connection_url)

            # What had completed is active again; its lease runs out, and it is run again.
            async def again() -> bool:
                return (first.id, 2) in starts

            await until(again, "the first job is run again", 30)
            assert await jobs.wait(first.id, timeout=10) == "R"
            # What was lost is absent, and the same call makes it again.
            assert await jobs.get(lost.id) is None
            made = await jobs.enqueue(2, idempotency_key="two")
            assert not made.deduplicated
            assert await jobs.wait(made.id, timeout=10) == "R"
            events = [event.type async for event in jobs.watch(first.id)]
        assert events == ["restarted", "chunk", "completed"]
        with redis.Redis(port=replica.port) as raw:
            assert audit_keys(raw, queue_name, {first.id, made.id}, at_rest=True) == []


async def test_a_server_that_comes_back_empty_has_no_halves_of_what_it_lost(queue_name: str) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=1.0)
    running: list[str] = []
    ended: list[str | None] = []
    with journalled() as server:
        worker = Worker(server.connection_url)

        @worker.handles(queue, concurrency=2)
        async def run(job: JobContext[Any]) -> str:
            if job.payload == "after":
                return "R"
            running.append(job.id)
            try:
                while True:
                    await job.emit("x")
                    await asyncio.sleep(0.02)
            finally:
                ended.append(job.signal.reason)

        async with AsyncClient(redis_url=server.connection_url) as client, worker:
            jobs = client.queue(queue)
            lost = await jobs.enqueue("before", idempotency_key="one")
            await until(lambda: running, "it runs")
            await asyncio.to_thread(restart, server, keep=False)
            await until(lambda: ended, "the handler is told that its job is gone", 30)
            assert await jobs.get(lost.id) is None
            job = await jobs.enqueue("after", idempotency_key="one")
            assert await jobs.wait(job.id, timeout=20) == "R"
        with redis.Redis(port=server.port) as raw:
            assert audit_keys(raw, queue_name, {job.id}, at_rest=True) == []
    assert ended == ["lease_lost"]


async def test_workers_whose_clocks_are_hours_off_neither_steal_nor_hurry_nor_expire(
    valkey_url: str, queue_name: str, raw: redis.Redis
) -> None:
    """The server's clock is the only one that counts."""
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.8, backoff=0.02)
    workers = [
        Process(valkey_url, queue_name, "sleep", clock=hours * 3600, queue={"lease": 0.8}, concurrency=4)
        for hours in (-5, 0, 5)
    ]
    try:
        for worker in workers:
            await worker.wait_for("up")
        async with AsyncClient(redis_url=valkey_url) as client:
            jobs = client.queue(queue)
            silent = [await jobs.enqueue(2.5) for _ in range(3)]
            delayed = await jobs.enqueue(0, delay=1.5)
            dated: list[Enqueued] = []

            def has_one(worker: Process) -> bool:
                return any(line["id"] == each.id for line in worker.said("start") for each in dated)

            while not all(map(has_one, workers)):
                assert len(dated) < 100, "each of them starts one"
                dated.append(await jobs.enqueue(0, expires=60, deadline=90))
                assert await jobs.wait(dated[-1].id, timeout=30) == "slept"
            for each in (*silent, delayed):
                assert await jobs.wait(each.id, timeout=30) == "slept"
            record = await jobs.get(delayed.id)
        starts = [line["id"] for worker in workers for line in worker.said("start")]
        assert sorted(starts) == sorted(each.id for each in (*silent, delayed, *dated))
        assert record is not None
        assert record.started_at is not None
        assert (record.started_at - record.created_at).total_seconds() >= 1.5
        assert abs(record.started_at.timestamp() - time.time()) < 60
        accepted = {each.id for each in (*silent, delayed, *dated)}
        assert audit_keys(raw, queue_name, accepted, at_rest=True) == []
    finally:
        for worker in workers:
            worker.close()
