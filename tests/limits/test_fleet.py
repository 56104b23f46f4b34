"""Limits of the whole fleet, under load, through crashes and pauses, with real workers."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest
import redis
from tests.faults.processes import Process, until

from outlast import AsyncClient, ConfigurationError, Queue, RateLimitedError
from outlast.protocol import Keys
from outlast_worker import JobContext, Worker


def worker_of(url: str, queue: Queue[Any, Any], spans: list[tuple[float, float]], slots: int, **options: Any) -> Worker:
    """A worker that notes from when to when each job ran."""
    worker = Worker(url, **options)

    @worker.handles(queue, concurrency=slots)
    async def run(job: JobContext[Any]) -> None:
        began = time.monotonic()
        await asyncio.sleep(0.05 if job.payload is None else job.payload)
        spans.append((began, time.monotonic()))

    return worker


def peak(spans: list[tuple[float, float]]) -> int:
    return max(sum(began <= at < ended for began, ended in spans) for at, _ in spans)


async def test_a_limit_is_used_up_and_never_exceeded(valkey_url: str, queue_name: str, aclient: AsyncClient) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)
    jobs = aclient.queue(queue)
    await jobs.set_rules(concurrency=3)
    spans: list[tuple[float, float]] = []
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(worker_of(valkey_url, queue, spans, 4))
        ids = [(await jobs.enqueue(None)).id for _ in range(30)]
        began = time.monotonic()
        for id in ids:
            await jobs.wait(id, timeout=20)
        took = time.monotonic() - began
        assert peak(spans) == 3
        assert took < 3, f"{took}: the limit is {30 * 0.05 / 3} s of work"
        # An idle fleet does not stay deaf: the next burst is served at once, by both.
        again = [(await jobs.enqueue(None)).id for _ in range(6)]
        for id in again:
            await jobs.wait(id, timeout=5)


async def test_eight_workers_a_limit_of_three_and_kills(
    valkey_url: str, queue_name: str, aclient: AsyncClient, spawn: Any
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.8, max_attempts=10)
    jobs = aclient.queue(queue)
    await jobs.set_rules(concurrency=3)
    options = {"queue": {"lease": 0.8, "max_attempts": 10}, "concurrency": 2, "seconds": 0.2}
    workers: list[Process] = [spawn("sleep", **options) for _ in range(8)]
    for each in workers:
        await each.wait_for("up")
    ids = [(await jobs.enqueue(None)).id for _ in range(45)]
    await until(lambda: sum(len(each.said("end")) for each in workers) >= 9, "some are done")
    killed: dict[int, float] = {}

    busy: list[int] = []

    def somebody_is_at_work() -> bool:
        alive = [(n, each) for n, each in enumerate(workers) if n not in killed]
        busy[:] = [n for n, each in alive if len(each.said("start")) > len(each.said("end"))]
        return bool(busy)

    for _ in range(2):
        await until(somebody_is_at_work, "somebody is at work")
        victim = busy[0]
        workers[victim].kill()
        killed[victim] = time.time()
        await asyncio.sleep(0.7)
    for id in ids:
        assert await jobs.wait(id, timeout=30) == "slept"
    spans = []
    for n, each in enumerate(workers):
        ends = {line["id"]: line["at"] for line in each.said("end")}
        spans += [(line["at"], ends.get(line["id"], killed.get(n, 0.0))) for line in each.said("start")]
    assert all(ended >= began for began, ended in spans)
    assert peak(spans) == 3
    assert len(spans) > 45, "the killed jobs ran again"


async def test_thirty_starts_in_three_seconds_over_four_workers(
    valkey_url: str, queue_name: str, aclient: AsyncClient, raw: redis.Redis, keys: Keys
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)
    jobs = aclient.queue(queue)
    await jobs.set_rules(rate="30/3s")
    spans: list[tuple[float, float]] = []
    async with AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(worker_of(valkey_url, queue, spans, 10))
        ids = [(await jobs.enqueue(0.0)).id for _ in range(60)]
        for id in ids:
            await jobs.wait(id, timeout=30)
    starts = sorted(int(raw.hget(keys.job(id), "startedAt")) for id in ids)
    assert max(sum(at <= start < at + 3000 for start in starts) for at in starts) <= 30
    assert starts[-1] - starts[0] < 5900 * 1.4, "nor much less than it allows"


async def test_a_rate_that_the_provider_sets_pauses_everybody_and_costs_no_attempt(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)
    jobs = aclient.queue(queue)
    starts: list[tuple[Any, float]] = []
    workers = [Worker(valkey_url) for _ in range(3)]
    for each in workers:

        @each.handles(queue)
        async def run(job: JobContext[Any]) -> str:
            starts.append((job.payload, time.monotonic()))
            if job.payload == 0 and job.starts == 1:
                raise RateLimitedError("429", retry_after=1.0)
            return f"{job.attempt}/{job.starts}"

    async with workers[0], workers[1], workers[2]:
        first = await jobs.enqueue(0, priority=9)
        await until(lambda: starts, "it is limited")
        ids = [first.id] + [(await jobs.enqueue(n)).id for n in range(1, 6)]
        assert await jobs.wait(ids[0], timeout=10) == "1/2"
        for id in ids[1:]:
            assert await jobs.wait(id, timeout=10) == "1/1"
    [(_, limited), *rest] = starts
    assert min(at for _, at in rest) - limited >= 0.99
    assert max(at for _, at in rest) - limited < 2.5, "it wakes on time"
    # By the server's clock: the replies of three workers reach this one process in any order.
    records = [await jobs.get(id) for id in ids]
    taken = [record.started_at for record in records if record is not None and record.started_at is not None]
    assert len(taken) == len(ids)
    assert taken[0] == min(taken), "the order is kept"


async def test_a_paused_queue_costs_nothing_to_wait_on_and_wakes_on_time(queue_name: str, own_valkey: Any) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=60)
    url = own_valkey.connection_url
    spans: list[tuple[float, float]] = []
    async with AsyncClient(redis_url=url) as client, AsyncExitStack() as stack:
        with redis.Redis.from_url(url) as raw:
            jobs = client.queue(queue)
            await jobs.pause()
            for _ in range(3):
                await stack.enter_async_context(worker_of(url, queue, spans, 1, block=0.3))
            ids = [(await jobs.enqueue(0.0)).id for _ in range(6)]
            await asyncio.sleep(0.3)
            before = raw.info("commandstats")
            await asyncio.sleep(1.5)
            after = raw.info("commandstats")
            spent = {
                name: stat["calls"] - before.get(name, {"calls": 0})["calls"]
                for name, stat in after.items()
                if stat["calls"] > before.get(name, {"calls": 0})["calls"]
            }
            assert set(spent) <= {"cmdstat_info", "cmdstat_blpop"}, spent
            assert spent["cmdstat_blpop"] <= 3 * 6
            assert not spans
            resumed = time.monotonic()
            await jobs.resume()
            for id in ids:
                await jobs.wait(id, timeout=5)
            assert min(began for began, _ in spans) - resumed < 0.25, "at once, not when a read times out"
            await jobs.pause(0.8)
            paused = time.monotonic()
            job = await jobs.enqueue(0.0)
            await jobs.wait(job.id, timeout=5)
            assert 0.75 < spans[-1][0] - paused < 1.5


async def test_a_draining_worker_hands_its_room_to_another(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)
    jobs = aclient.queue(queue)
    await jobs.set_rules(concurrency=1)
    first, second = [], []
    draining = worker_of(valkey_url, queue, first, 1)
    other = worker_of(valkey_url, queue, second, 1)
    async with draining:
        long = await jobs.enqueue(0.6)
        await until(lambda: draining._engine and draining._engine._attempts, "it runs")
        async with other:
            next_one = await jobs.enqueue(0.0)
            await asyncio.sleep(0.2)
            draining.stop()
            await jobs.wait(long.id, timeout=5)
            await jobs.wait(next_one.id, timeout=5)
    assert second[0][0] - first[0][1] < 0.3


async def test_two_queues_of_one_process_leave_no_room_unused(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    """The slot that a limited queue frees goes to the other queue, so another worker must learn of the room."""
    one: Queue[Any, Any] = Queue(queue_name + "-one")
    two: Queue[Any, Any] = Queue(queue_name + "-two")
    await aclient.queue(one).set_rules(concurrency=1)
    spans: list[tuple[float, float]] = []
    shared = Worker(valkey_url, concurrency=1)
    lone = worker_of(valkey_url, one, spans, 1)
    begun = asyncio.Event()

    @shared.handles(two)
    async def long(job: JobContext[Any]) -> None:
        await asyncio.sleep(2)

    @shared.handles(one)
    async def short(job: JobContext[Any]) -> None:
        begun.set()
        await asyncio.sleep(0.3)

    async with shared:
        await aclient.queue(one).enqueue(None)
        await begun.wait()
        async with lone:
            await aclient.queue(two).enqueue(None)
            job = await aclient.queue(one).enqueue(0.0)
            began = time.monotonic()
            await aclient.queue(one).wait(job.id, timeout=10)
            assert time.monotonic() - began < 1.5


async def test_rules_reach_running_workers(
    valkey_url: str, queue_name: str, aclient: AsyncClient, raw: redis.Redis, keys: Keys
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=60, timeout=60, backoff=0.01, max_attempts=1)
    jobs = aclient.queue(queue)
    worker = Worker(valkey_url)
    running = asyncio.Event()

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> None:
        running.set()
        if job.payload == "fail":
            raise ValueError
        await asyncio.sleep(job.payload)

    async with worker:
        await jobs.set_rules(lease=1.2, timeout=0.3, max_attempts=2, result_ttl=50, max_payload=16_384)
        job = await jobs.enqueue(60)
        await running.wait()
        assert raw.zscore(keys.leases, job.id) / 1000 - time.time() < 30, "the lease of the rule"
        async for event in jobs.watch(job.id, timeout=10):
            last = event
        assert "TimeoutError: the attempt ran longer than 0.3 s" in str(last)
        record = await jobs.get(job.id)
        assert record is not None
        assert (record.attempt, record.max_attempts) == (2, 2)
        slow = await jobs.enqueue(0.0, result_ttl=70)
        await jobs.wait((await jobs.enqueue(0.0)).id, timeout=5)
        await jobs.wait(slow.id, timeout=5)
        assert 60 < raw.ttl(keys.job(slow.id)) <= 70, "a time of its own counts over the rule"
        done = await jobs.enqueue(0.0)
        await jobs.wait(done.id, timeout=5)
        assert 40 < raw.ttl(keys.job(done.id)) <= 50
        # A payload that no producer of ours let through.
        large = await jobs.enqueue(0.0, delay=60)
        raw.hset(keys.job(large.id), "payload", '"' + "é" * 9000 + '"')
        raw.zadd(keys.scheduled, {large.id: 1})
        await jobs.enqueue(0.0)
        async for event in jobs.watch(large.id, timeout=10):
            last = event
        assert "the payload has 18002 bytes of JSON; the queue's limit is 16384" in str(last)


@pytest.mark.parametrize("limit", ["concurrency", "rate"])
async def test_limits_that_change_reach_workers_that_wait_for_them(
    valkey_url: str, queue_name: str, aclient: AsyncClient, raw: redis.Redis, keys: Keys, limit: str
) -> None:
    """Limited workers are deaf to the doorbell; a change wakes them, long before a read of theirs times out."""
    queue: Queue[Any, Any] = Queue(queue_name)
    jobs = aclient.queue(queue)
    running, most = 0, 0
    release = asyncio.Event()
    workers = [Worker(valkey_url) for _ in range(2)]
    for each in workers:

        @each.handles(queue, concurrency=4)
        async def run(job: JobContext[Any]) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await release.wait()
            running -= 1

    async def settles_at(count: int, why: str) -> None:
        await until(lambda: running == count, why, 4)
        await asyncio.sleep(0.15)
        assert running == count, why

    first, second, none = {"concurrency": (1, 3, None), "rate": ("1/1000s", "2/1000s", None)}[limit]
    await jobs.set_rules(**{limit: first})
    async with workers[0], workers[1]:
        await until(lambda: raw.hlen(keys.workers) == 2, "both are there")
        ids = [(await jobs.enqueue(None)).id for _ in range(12)]
        try:
            await settles_at(1, "one at once")
            await jobs.set_rules(**{limit: second})
            if limit == "concurrency":
                await settles_at(3, "three at once")
            await jobs.set_rules(**{limit: none})
            await settles_at(8, "no limit but the slots, of both")
        finally:
            release.set()
        for id in ids:
            await jobs.wait(id, timeout=10)
    assert most == 8


async def test_an_owners_jobs_run_under_the_cap_and_in_order(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)
    jobs = aclient.queue(queue)
    await jobs.set_rules(owner_cap=2)
    running: dict[str, int] = {"big": 0, "small": 0}
    most = dict(running)
    order: list[tuple[str, int]] = []
    workers = [Worker(valkey_url) for _ in range(3)]
    for each in workers:

        @each.handles(queue, concurrency=4)
        async def run(job: JobContext[Any]) -> None:
            owner, n = job.payload
            order.append((owner, n))
            running[owner] += 1
            most[owner] = max(most[owner], running[owner])
            await asyncio.sleep(0.01)
            running[owner] -= 1
            if n == 7 and job.attempt == 1:
                raise ValueError  # a retry goes to the back, and lets the next one in

    ids = [(await jobs.enqueue(["big", n], owner="big", max_attempts=2)).id for n in range(150)]
    ids += [(await jobs.enqueue(["small", n], owner="small")).id for n in range(2)]
    async with workers[0], workers[1], workers[2]:
        for id in ids:
            await jobs.wait(id, timeout=20)
    assert most == {"big": 2, "small": 2}
    assert max(n for n, (owner, _) in enumerate(order) if owner == "small") < 20
    numbers = [n for owner, n in order if owner == "big"]
    first = [n for i, n in enumerate(numbers) if n not in numbers[:i]]
    assert all(abs(n - at) <= 2 for at, n in enumerate(first)), "two at a time, in their order"


async def test_a_worker_may_demand_that_its_queue_was_set_up(
    valkey_url: str, queue_name: str, aclient: AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)
    spans: list[tuple[float, float]] = []
    worker = worker_of(valkey_url, queue, spans, 1, require_queue=True)
    await aclient.queue(queue).pause(0.01)  # leaves something in the hash, but sets nothing up
    with pytest.raises(ConfigurationError, match=f"run: outlast queue set {queue_name}"):
        await worker.serve()
    await aclient.queue(queue).set_rules(concurrency=3, rate="30/60s", lease=20)
    caplog.set_level("INFO", logger="outlast.worker")
    async with worker_of(valkey_url, queue, spans, 1, require_queue=True):
        await aclient.queue(queue).wait((await aclient.queue(queue).enqueue(0.0)).id, timeout=5)
    assert f"{queue_name} (1 at a time here; at most 3 at once, rate 30/60s, lease 20 s)" in caplog.text
