"""Time limits: of an attempt, of the wait before it, of the whole job; and code that does not mind them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import redis
from tests.faults.processes import until

from outlast import (
    AsyncClient,
    JobFailedError,
    JobStopped,
    Queue,
    RateLimitedError,
    RetryJobError,
    TerminalJobError,
)
from outlast.protocol import Keys
from outlast_worker import JobContext, SyncJobContext, Worker


@pytest.mark.parametrize("kind", ["a plain handler", "a step in a thread", "a coroutine that does not mind"])
async def test_the_attempt_ends_and_what_goes_on_keeps_its_slot_until_it_returns(
    valkey_url: str,
    queue_name: str,
    aclient: AsyncClient,
    raw: redis.Redis,
    keys: Keys,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("outlast_worker.attempt.WIND_DOWN", 0.2)
    monkeypatch.setattr("outlast_worker.attempt.NAG_AFTER", 0.4)
    queue: Queue[Any, Any] = Queue(queue_name, timeout=0.2, backoff=0.01, max_backoff=0.01)
    stuck, other = Worker(valkey_url), Worker(valkey_url)
    go = threading.Event()
    ended: list[str] = []
    starts: list[int] = []

    def blocks() -> str:
        go.wait(20)
        ended.append("returned")
        return "late"

    def plain(job: SyncJobContext[Any]) -> str:
        starts.append(job.attempt)
        if job.payload == "next":
            return "next"
        blocks()
        try:
            job.emit("late")
        except JobStopped as stopped:
            ended.append(stopped.reason)
        return "late"

    async def coroutine(job: JobContext[Any]) -> str:
        starts.append(job.attempt)
        if job.payload == "next":
            return "next"
        if kind == "a step in a thread":
            return await job.step("blocks", blocks)
        while not go.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                ended.append("interrupted")
        with pytest.raises(asyncio.CancelledError):
            await job.emit("late")
        ended.append("returned")
        return "late"

    stuck.handles(queue)(plain if kind == "a plain handler" else coroutine)

    @other.handles(queue)
    async def run(job: JobContext[Any]) -> str:
        return f"attempt {job.attempt}"

    jobs = aclient.queue(queue)
    async with stuck:
        job = await jobs.enqueue(None)
        await until(lambda: starts, "it runs")
        began = time.monotonic()
        await until(lambda: raw.hget(keys.job(job.id), "attempt") == b"1" and not raw.zcard(keys.leases), "it ended")
        assert time.monotonic() - began < 3
        next_one = await jobs.enqueue("next")
        await until(
            lambda: [json.loads(text)["stuck"] for text in raw.hvals(keys.workers)] == [1], "it is counted, and told"
        )
        await until(lambda: "its handler still runs; it keeps its slot" in caplog.text, "it is logged")
        await asyncio.sleep(0.1)
        assert starts == [1], "its slot is taken"
        async with other:
            assert await jobs.wait(job.id, timeout=10) == "attempt 2"
            assert await jobs.wait(next_one.id, timeout=10) == "attempt 1"
        go.set()
        await until(lambda: "returned" in ended, "it returns")
        last = await jobs.enqueue("next")
        assert await jobs.wait(last.id, timeout=10) == "next", "its slot is free again"
        await until(
            lambda: [json.loads(text)["stuck"] for text in raw.hvals(keys.workers)] == [0], "and nothing is stuck"
        )
    if kind == "a plain handler":
        assert ended == ["returned", "timeout"]
    record = await jobs.get(job.id)
    assert record is not None
    assert record.result == "attempt 2"
    assert not [event async for event in jobs.watch(job.id) if event.type == "chunk"]


async def test_a_worker_that_stops_does_not_wait_for_what_is_stuck(
    valkey_url: str, queue_name: str, aclient: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outlast_worker.attempt.WIND_DOWN", 0.1)
    queue: Queue[Any, Any] = Queue(queue_name, timeout=0.1, max_attempts=1)
    worker, go = Worker(valkey_url), threading.Event()

    @worker.handles(queue)
    def run(job: SyncJobContext[Any]) -> None:
        go.wait(20)

    async with worker:
        job = await aclient.queue(queue).enqueue(None)
        with pytest.raises(JobFailedError, match=r"longer than 0\.1 s"):
            await aclient.queue(queue).wait(job.id, timeout=10)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    go.set()


async def test_a_job_that_started_in_time_may_start_again_later(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)
    worker = Worker(valkey_url)
    late = 0.6
    ends = {
        "retried": RetryJobError("no", retry_after=late),
        "limited": RateLimitedError("slow down", retry_after=late),
        "dead": TerminalJobError("no"),
    }

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> int:
        if job.starts == 1:
            raise ends[job.payload]
        return job.starts

    jobs = aclient.queue(queue)
    async with worker:
        for how in ends:
            job = await jobs.enqueue(how, expires=0.5)
            if how == "dead":
                with pytest.raises(JobFailedError):
                    await jobs.wait(job.id, timeout=10)
                await asyncio.sleep(late)
                assert await jobs.retry_dead(job.id)
            assert await jobs.wait(job.id, timeout=10) == 2


async def test_a_start_that_comes_too_late_and_an_end_that_does(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, backoff=0.05, max_backoff=0.05, max_attempts=100)
    worker = Worker(valkey_url)
    ran: list[Any] = []

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> None:
        ran.append(job.payload)
        if job.payload == "fails":
            raise ValueError
        await asyncio.sleep(60)

    jobs = aclient.queue(queue)
    expired = await jobs.enqueue("never", expires=0.05)
    await asyncio.sleep(0.1)
    async with worker:
        began = time.monotonic()
        for payload, options, error in (
            (None, {}, "JobExpiredError: the job expired before it could start"),
            ("hangs", {"deadline": 0.3}, "TimeoutError: the job reached its deadline"),
            ("hangs", {"timeout": 0.2, "deadline": 5, "max_attempts": 1}, "longer than 0.2 s"),
            ("fails", {"deadline": 1.5}, "ValueError"),
        ):
            job = expired if payload is None else await jobs.enqueue(payload, **options)
            with pytest.raises(JobFailedError) as failed:
                await jobs.wait(job.id, timeout=10)
            assert error in failed.value.error
        assert time.monotonic() - began < 8
    assert "never" not in ran
    assert ran.count("hangs") == 2
    assert 2 < ran.count("fails") < 100, "it was tried until the deadline left no time for another"


async def test_a_blocked_loop_is_named_and_turns_health_off_until_it_goes_on(
    valkey_url: str,
    queue_name: str,
    aclient: AsyncClient,
    raw: redis.Redis,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("outlast_worker.leases.BLOCKED", 0.5)
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.8)
    worker = Worker(valkey_url)
    go = threading.Event()

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> str:
        blocking_code(go)
        return "R"

    def healthy() -> bool:
        check = [sys.executable, "-m", "outlast_worker", "workers", queue_name, "--redis-url", valkey_url]
        done = subprocess.run([*check, "--host", host], capture_output=True, text=True)
        assert done.returncode in (0, 1), done.stderr
        return done.returncode == 0

    finished = threading.Event()

    async def work() -> None:
        async with worker:
            await asyncio.to_thread(finished.wait, 60)

    thread = threading.Thread(target=asyncio.run, args=(work(),))
    thread.start()
    try:
        await until(lambda: raw.hlen(keys.workers) == 1, "it is up")
        host = json.loads(raw.hvals(keys.workers)[0])["host"]
        assert await asyncio.to_thread(healthy)
        job = await aclient.queue(queue).enqueue(None)
        await until(lambda: json.loads(raw.hvals(keys.workers)[0])["state"] == "blocked", "it is told")
        assert not await asyncio.to_thread(healthy)
        assert "the event loop has been blocked for" in caplog.text
        assert "s in blocking_code (" in caplog.text, "it says where"
        go.set()
        assert await aclient.queue(queue).wait(job.id, timeout=10) == "R", "and yet it kept its lease"
        await until(lambda: json.loads(raw.hvals(keys.workers)[0])["state"] == "running", "it is well again")
        assert await asyncio.to_thread(healthy)
    finally:
        go.set()
        finished.set()
        await asyncio.to_thread(thread.join)


def blocking_code(go: threading.Event) -> None:
    go.wait(30)
