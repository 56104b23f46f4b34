"""Who owns a job, through silence, death, freezing, blocked loops and cut links."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from typing import Any

import httpx
import pytest
import redis
from tests.faults.links import Provider, Proxy
from tests.faults.processes import Process, until
from tests.servers import start_valkey

from outlast import AsyncClient, JobLeaseLostError, Queue
from outlast.protocol import Keys, calls, holding
from outlast_worker import JobContext, SyncJobContext, Worker

from .conftest import sleeper


async def test_h05_a_healthy_silent_job_is_not_handed_out_again(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.5)
    jobs = aclient.queue(queue)
    starts: list[int] = []
    workers = [Worker(valkey_url, block=0.2) for _ in range(4)]
    for worker in workers:

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> str:
            starts.append(job.attempt)
            await asyncio.sleep(3)
            return "R"

    async with workers[0], workers[1], workers[2], workers[3]:
        job = await jobs.enqueue(None)
        events = [event async for event in jobs.watch(job.id)]
    assert starts == [1]
    assert [event.type for event in events] == ["completed"]


async def test_a_thread_that_cannot_be_started_costs_its_job_an_attempt_and_the_worker_nothing(
    valkey_url: str, queue_name: str, aclient: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.4)
    jobs = aclient.queue(queue)
    worker = Worker(valkey_url, concurrency=2)
    refused = ["outlast leases", "outlast job b"]
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name in refused:
            refused.remove(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    @worker.handles(queue)
    def run(job: SyncJobContext[Any]) -> int:
        if job.attempt == 2:
            time.sleep(1)  # longer than its lease, which is renewed
        return job.attempt

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for id in "ab":
        await jobs.enqueue(None, id=id)
    async with worker:
        assert [await jobs.wait(id, timeout=10) for id in "ab"] == [2, 2]
    assert not refused


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_h65_code_that_blocks_the_loop_keeps_its_lease_and_its_neighbours_too(
    valkey_url: str, queue_name: str, aclient: AsyncClient, kind: str
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.6)
    jobs = aclient.queue(queue)
    starts: list[tuple[str, int]] = []
    blocking, idle = Worker(valkey_url), Worker(valkey_url, block=0.2)

    async def idle_run(job: JobContext[Any]) -> str:
        starts.append(("idle", job.attempt))
        return "R"

    async def run(job: JobContext[Any]) -> str:
        starts.append(("blocking", job.attempt))
        if job.payload == "block":
            time.sleep(2)  # noqa: ASYNC251  # that is the point
        else:
            await asyncio.sleep(0.5)
        return "R"

    def plain(job: SyncJobContext[Any]) -> str:
        starts.append(("blocking", job.attempt))
        time.sleep(2)
        return "R"

    blocking.handles(queue, concurrency=2)(run if kind == "async" else plain)
    idle.handles(queue)(idle_run)
    async with blocking:
        ids = [(await jobs.enqueue(payload)).id for payload in ("wait", "block")]
        await until(lambda: len(starts) == 2, "both run")
        other = asyncio.create_task(asyncio.to_thread(asyncio.run, _run_for(idle, 2.5)))
        for id in ids:
            assert await jobs.wait(id, timeout=10) == "R"
        await other
    assert starts == [("blocking", 1), ("blocking", 1)]


async def _run_for(worker: Worker, seconds: float) -> None:
    async with worker:
        await asyncio.sleep(seconds)


async def test_h65_blocking_code_holds_its_job_no_longer_than_an_attempt_may_take(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    """The thread that renews leases outlives a loop that is stuck for good; the attempt's time ends all the same."""
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.6, timeout=1.0)
    jobs = aclient.queue(queue)
    stuck, well = Worker(valkey_url), Worker(valkey_url, block=0.2)
    blocked, go, over = threading.Event(), threading.Event(), threading.Event()

    @stuck.handles(queue)
    async def never(job: JobContext[Any]) -> str:
        blocked.set()
        go.wait(30)
        return "STUCK"

    @well.handles(queue)
    async def run(job: JobContext[Any]) -> str:
        return "WELL"

    async def work() -> None:
        async with stuck:
            await asyncio.to_thread(over.wait, 60)

    thread = threading.Thread(target=asyncio.run, args=(work(),))
    thread.start()
    try:
        job = await jobs.enqueue(None)
        assert await asyncio.to_thread(blocked.wait, 10)
        async with well:
            assert await jobs.wait(job.id, timeout=15) == "WELL"
    finally:
        go.set()
        over.set()
        await asyncio.to_thread(thread.join)
    record = await jobs.get(job.id)
    assert record is not None
    assert (record.attempt, record.result) == (2, "WELL")


async def test_h06_killed_in_mid_job(valkey_url: str, queue_name: str, aclient: AsyncClient, spawn: Any) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=1.0)
    jobs = aclient.queue(queue)
    first: Process = spawn("count_up", letters="ab", hang=60, queue={"lease": 1.0})
    job = await jobs.enqueue(None)
    await first.wait_for("emitted", 2)
    second = Worker(valkey_url)
    again: list[tuple[float, int]] = []

    @second.handles(queue)
    async def run(job: JobContext[Any]) -> str:
        again.append((time.time(), job.attempt))
        await job.emit("cd")
        return "cd"

    events: list[tuple[str, Any]] = []
    async with second:
        async for event in jobs.watch(job.id):
            events.append((event.type, getattr(event, "data", None)))
            if event.type == "chunk" and first.popen.poll() is None:
                first.kill()
                killed = time.time()
    assert events == [
        *[event for event in events[:-3] if event in (("chunk", "a"), ("chunk", "b"))],
        ("restarted", None),
        ("chunk", "cd"),
        ("completed", None),
    ]
    [(at, attempt)] = again
    assert attempt == 2
    assert at - killed < 1.0 + 1.0 / 3 + 2  # lease, grace, and a busy machine


async def test_h07_the_only_worker_was_down_for_long(
    valkey_url: str, queue_name: str, aclient: AsyncClient, spawn: Any
) -> None:
    jobs = aclient.queue(Queue(queue_name))
    first: Process = spawn("sleep", seconds=60, queue={"lease": 0.5})
    job = await jobs.enqueue(None)
    await first.wait_for("start")
    first.kill()
    await asyncio.sleep(1)
    # The new worker's own lease is long: nothing but its first look finds the job.
    starts: list[tuple[float, int]] = []
    began = time.time()
    async with sleeper(valkey_url, Queue(queue_name, lease=60), starts):
        assert await jobs.wait(job.id, timeout=10) == "slept"
    [(at, attempt)] = starts
    assert attempt == 2
    assert at - began < 2


async def test_h10_frozen_past_its_lease_and_back(
    valkey_url: str, queue_name: str, aclient: AsyncClient, spawn: Any
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.8)
    jobs = aclient.queue(queue)
    first: Process = spawn("stubborn", queue={"lease": 0.8}, first="old1", freeze=1.0)
    job = await jobs.enqueue(None)
    await first.wait_for("emitted")
    first.signal(signal.SIGSTOP)
    second = Worker(valkey_url)
    taken, go = asyncio.Event(), asyncio.Event()

    @second.handles(queue)
    async def run(job: JobContext[Any]) -> str:
        await job.emit("new1")
        taken.set()
        await go.wait()
        return "NEW"

    async with second:
        await asyncio.wait_for(taken.wait(), 10)
        first.signal(signal.SIGCONT)
        await first.wait_for("lost", 2)
        await first.wait_for("end")
        go.set()
        events = [event async for event in jobs.watch(job.id)]
    assert [event.type for event in events][-1] == "completed"
    assert "old2" not in [getattr(event, "data", None) for event in events]
    assert {line["by"] for line in first.said("lost")} == {"emit", "progress"}
    assert not first.said("emitted old2")
    record = await jobs.get(job.id)
    assert record is not None
    assert (record.status, record.result, record.attempt) == ("completed", "NEW", 2)


async def test_h11_a_lost_lease_stops_the_spending(valkey_url: str, queue_name: str, aclient: AsyncClient) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.6)
    jobs = aclient.queue(queue)
    interrupted: list[str | None] = []
    with Provider() as provider, Proxy(valkey_url) as proxy:
        cut_off, healthy = Worker(proxy.url), Worker(valkey_url, block=0.2)

        @cut_off.handles(queue)
        async def run(job: JobContext[Any]) -> str:
            if job.payload == "next":
                return "free again"
            try:
                async with httpx.AsyncClient(timeout=60) as http:
                    return (await http.get(provider.url)).text
            except asyncio.CancelledError:
                interrupted.append(job.signal.reason)
                with pytest.raises(JobLeaseLostError):
                    await job.emit("x")
                raise

        @healthy.handles(queue)
        async def other(job: JobContext[Any]) -> str:
            await asyncio.sleep(60 if job.payload == "occupy" else 0)
            return "theirs"

        async with cut_off:
            job = await jobs.enqueue(None)
            await until(provider.called.is_set, "the provider is called")
            proxy.down()
            async with healthy:
                assert await jobs.wait(job.id, timeout=10) == "theirs"
                await until(provider.left.is_set, "the provider sees its caller leave", 5)
                proxy.heal()
            assert await jobs.wait((await jobs.enqueue("next")).id, timeout=10) == "free again"
    assert interrupted == ["lease_lost"]


async def test_h12_a_pause_of_the_whole_database_hands_nothing_out_twice(queue_name: str) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=1.0, max_attempts=2)
    starts: list[str] = []
    with start_valkey(config={"enable-debug-command": "yes"}) as server:
        url = server.connection_url
        worker, idle = Worker(url), Worker(url, block=0.2)
        for each in (worker, idle):

            @each.handles(queue, concurrency=10)
            async def run(job: JobContext[Any]) -> str:
                starts.append(job.id)
                await asyncio.sleep(4)
                return "R"

        async with AsyncClient(redis_url=url) as client, worker:
            jobs = client.queue(queue)
            ids = [(await jobs.enqueue(n)).id for n in range(10)]
            await until(lambda: len(starts) == 10, "all run")
            async with idle:
                with redis.Redis(port=server.port) as raw:
                    await asyncio.to_thread(raw.execute_command, "DEBUG", "SLEEP", "2.5")
                assert [await jobs.wait(id, timeout=15) for id in ids] == ["R"] * 10
    assert sorted(starts) == sorted(ids)


@pytest.mark.parametrize("healed_in_time", [True, False])
async def test_h55_the_job_is_done_but_the_link_is_down_at_that_moment(
    valkey_url: str, queue_name: str, aclient: AsyncClient, healed_in_time: bool, caplog: pytest.LogCaptureFixture
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=4.0 if healed_in_time else 0.8)
    jobs = aclient.queue(queue)
    starts: list[str] = []
    with Proxy(valkey_url) as proxy:
        worker, second = Worker(proxy.url), Worker(valkey_url, block=0.2)

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> str:
            starts.append("first")
            await asyncio.sleep(0.2)
            proxy.hold()
            return "FIRST"

        @second.handles(queue)
        async def other(job: JobContext[Any]) -> str:
            starts.append("second")
            return "SECOND"

        async with worker:
            job = await jobs.enqueue(None)
            await until(lambda: starts, "it runs")
            async with second:
                if healed_in_time:
                    await asyncio.sleep(1)
                    proxy.heal()
                result = await jobs.wait(job.id, timeout=15)
                record = await jobs.get(job.id)
                proxy.heal()
                if not healed_in_time:
                    await until(lambda: "its result is dropped" in caplog.text, "the late settle is refused, and said")
    assert record is not None
    assert (result, record.attempt) == (("FIRST", 1) if healed_in_time else ("SECOND", 2))
    assert starts == (["first"] if healed_in_time else ["first", "second"])


async def test_jobs_taken_by_a_reserve_whose_reply_was_lost_are_run(
    valkey_url: str, queue_name: str, aclient: AsyncClient, raw: redis.Redis, keys: Keys
) -> None:
    """The second answer of a request equals its first: nothing waits for its lease to run out."""
    queue: Queue[Any, Any] = Queue(queue_name, lease=60)
    jobs = aclient.queue(queue)
    attempts: list[int] = []
    with Proxy(valkey_url) as proxy:
        worker = Worker(proxy.url)

        @worker.handles(queue, concurrency=5)
        async def run(job: JobContext[Any]) -> str:
            attempts.append(job.attempt)
            return "R"

        async with worker:
            await until(lambda: raw.hlen(keys.workers) == 1, "it is up")
            await asyncio.sleep(0.1)
            proxy.drop_next = 1
            ids = [(await jobs.enqueue(n)).id for n in range(5)]
            assert [await jobs.wait(id, timeout=10) for id in ids] == ["R"] * 5
    assert proxy.dropped == 1
    assert attempts == [1] * 5


async def test_a_request_that_arrives_after_its_repeat_takes_nothing(
    valkey_url: str, queue_name: str, aclient: AsyncClient, raw: redis.Redis, keys: Keys
) -> None:
    """It lay in a dead connection's buffer. What it took would wait for a lease of a minute."""
    queue: Queue[Any, Any] = Queue(queue_name, lease=60)
    jobs = aclient.queue(queue)
    go = asyncio.Event()
    running: list[str] = []
    with Proxy(valkey_url) as proxy:
        worker = Worker(proxy.url + "?socket_timeout=0.3", block=0.3)

        @worker.handles(queue, concurrency=2)
        async def run(job: JobContext[Any]) -> str:
            running.append(job.id)
            await go.wait()
            return "R"

        async with worker:
            await until(lambda: raw.hlen(keys.workers) == 1, "it is up")
            proxy.hold(new=False)
            ids = [(await jobs.enqueue(n)).id for n in range(6)]
            await until(lambda: len(running) == 2, "the repeat takes two, on a new connection")
            proxy.heal()
            await asyncio.sleep(0.3)
            assert sorted(raw.zrange(keys.leases, 0, -1)) == sorted(id.encode() for id in running)
            go.set()
            assert [await jobs.wait(id, timeout=10) for id in ids] == ["R"] * 6


async def test_a_lease_that_the_handlers_own_write_finds_lost(
    valkey_url: str, queue_name: str, aclient: AsyncClient, raw: redis.Redis, keys: Keys
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=60)
    worker = Worker(valkey_url)
    after: list[str] = []

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> None:
        raw.hset(keys.job(job.id), "token", "somebody else")
        await job.emit("x")
        with pytest.raises(JobLeaseLostError) as caught:
            await job.flush()
        assert caught.value.job_id == job.id
        # The handler has been told, by name; its task is not left half cancelled.
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0.01)
        after.append("went on")

    async with worker:
        job = await aclient.queue(queue).enqueue(None)
        await until(lambda: after, "the handler goes on")
    assert raw.xlen(keys.events(job.id)) == 0


async def test_an_idle_worker_finds_the_job_of_a_dead_one_that_it_never_heard_of(
    valkey_url: str, queue_name: str, aclient: AsyncClient, raw: redis.Redis, keys: Keys
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.8)
    starts: list[tuple[float, int]] = []
    enqueue = calls.enqueue(keys, id="j", nonce="n", payload="null", max_attempts=3, key_ttl_ms=1000)
    times = {"lease_ms": 800, "result_ttl_ms": 60_000, "dead_ttl_ms": 60_000}
    async with sleeper(valkey_url, queue, starts):
        await until(lambda: raw.hlen(keys.workers) == 1, "it is up")
        taken = time.time()
        with raw.pipeline() as unheard:
            unheard.execute_command(*enqueue.command(source=True))
            unheard.delete(keys.signal)
            take = holding.reserve(keys, worker="dead", request=1, k=1, **times)
            unheard.execute_command(*take.command(source=True))
            unheard.execute()
        assert await aclient.queue(queue).wait("j", timeout=10) == "slept"
    [(at, attempt)] = starts
    assert attempt == 2
    assert at - taken < 0.8 + 0.8 / 3 + 1.5


async def test_the_worker_says_in_the_registry_that_it_lives(
    valkey_url: str, queue: Queue[Any, Any], raw: redis.Redis, keys: Keys
) -> None:
    worker = Worker(valkey_url, name="vm-1")

    @worker.handles(queue, concurrency=3)
    async def run(job: JobContext[Any]) -> None: ...

    async with worker:
        await until(lambda: raw.hlen(keys.workers) == 1, "it is listed")
        [info] = [json.loads(text) for text in raw.hvals(keys.workers)]
        assert info["name"] == "vm-1"
        assert info["concurrency"] == 3
        assert info["active"] == 0
        assert abs(info["at"] / 1000 - time.time()) < 60
        assert {"host", "pid", "version", "started", "state"} <= info.keys()
    assert raw.hlen(keys.workers) == 0
    assert not [key for key in raw.scan_iter(keys.base + "*") if b":ctl:" in key]
