"""How an attempt ends: result, retry, dead letter, give-back; and what is never retried."""

from __future__ import annotations

import asyncio
import logging
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis
from pydantic import BaseModel
from tests.faults.processes import Process, until

from outlast import (
    AsyncClient,
    JobFailedError,
    Queue,
    RateLimitedError,
    RetryJobError,
    TerminalJobError,
)
from outlast.protocol import Keys
from outlast_worker import JobContext, SyncJobContext, Worker


class Prompt(BaseModel):
    prompt: str


class Needy(Exception):
    def __init__(self, *, code: int) -> None:
        self.code = code


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError


async def settled(aclient: AsyncClient, queue: Queue[Any, Any], id: str) -> Any:
    """The record once the job has ended."""
    jobs = aclient.queue(queue)
    async for _ in jobs.watch(id, timeout=20):
        pass
    record = await jobs.get(id)
    assert record is not None
    return record


@pytest.mark.parametrize("kind", ["timeout", "leak"])
async def test_h19_a_timeout_inside_the_handler_is_not_a_cancel(
    valkey_url: str, queue_name: str, aclient: AsyncClient, kind: str
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, max_attempts=2, backoff=0.01)
    worker = Worker(valkey_url)
    starts = 0

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> None:
        nonlocal starts
        starts += 1
        if kind == "timeout":
            await asyncio.wait_for(asyncio.sleep(30), 0.02)
        raise asyncio.CancelledError

    async with worker:
        job = await aclient.queue(queue).enqueue(None)
        record = await settled(aclient, queue, job.id)
        second = await aclient.queue(queue).enqueue(None)
        await settled(aclient, queue, second.id)
    assert record.status == "failed"
    assert record.attempt == 2
    assert not record.cancel_requested
    assert record.error.startswith("TimeoutError" if kind == "timeout" else "CancelledError: raised inside the handler")
    assert starts == 4


@pytest.mark.parametrize("value", [0, 0.3, 864_000])
async def test_h21_the_next_run_is_when_the_handler_said(
    valkey_url: str, keys: Keys, aclient: AsyncClient, raw: redis.Redis, value: float
) -> None:
    queue: Queue[Any, Any] = Queue(keys.name, lease=60)
    worker = Worker(valkey_url)
    starts: list[float] = []

    @worker.handles(queue, concurrency=2)  # a slot is left, so nothing but a timer makes it look again
    async def run(job: JobContext[Any]) -> str:
        starts.append(time.monotonic())
        if job.attempt == 1:
            raise RetryJobError("not now", retry_after=value)
        return "done"

    async with worker:
        job = await aclient.queue(queue).enqueue(None)
        if value < 10:
            assert await aclient.queue(queue).wait(job.id, timeout=10) == "done"
            assert value <= starts[1] - starts[0] < value + 2
        else:
            await until(lambda: raw.zscore(keys.scheduled, job.id), "the retry is scheduled")
            assert raw.zscore(keys.scheduled, job.id) / 1000 - time.time() == pytest.approx(value, abs=10)
            record = await aclient.queue(queue).get(job.id)
            assert record is not None
            assert (record.status, record.error) == ("scheduled", "RetryJobError: not now")


async def test_h22_a_job_that_kills_its_process_dies_after_its_attempts_and_others_live(
    valkey_url: str, queue_name: str, aclient: AsyncClient, spawn: Any
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.5, max_attempts=3)
    jobs = aclient.queue(queue)
    poison = await jobs.enqueue("poison", priority=5)
    others = [await jobs.enqueue(n) for n in range(30)]
    workers: list[Process] = [spawn("poison", queue={"lease": 0.5}, worker={"block": 0.5}) for _ in range(4)]
    seen = [event async for event in jobs.watch(poison.id, timeout=30)]
    assert seen[-1].type == "failed"
    assert "lease expired" in seen[-1].error
    starts = [line for process in workers for line in process.said("start") if line["id"] == poison.id]
    assert sorted(line["attempt"] for line in starts) == [1, 2, 3]
    times = sorted(line["at"] for line in starts)
    assert all(later - earlier > 0.5 for earlier, later in pairwise(times))
    assert [await jobs.wait(job.id, timeout=15) for job in others] == ["fine"] * 30


async def test_h23_payloads_that_cannot_be_decoded_are_dead_at_once(
    valkey_url: str,
    queue_name: str,
    aclient: AsyncClient,
    raw: redis.Redis,
    keys: Keys,
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = Queue(queue_name, payload=Prompt, result=str)
    jobs = aclient.queue(queue)
    bad = [b"secret prompt, not JSON", b"", b'{"prompt":"secret', b'["secret"]', b'{"prompt":"secret \xff\xfe"}']
    ids = []
    for payload in bad:
        job = await jobs.enqueue(Prompt(prompt="x"))
        raw.hset(keys.job(job.id), "payload", payload)
        ids.append(job.id)
    good = [await jobs.enqueue(Prompt(prompt=str(n))) for n in range(10)]
    worker = Worker(valkey_url)
    ran: list[str] = []

    @worker.handles(queue)
    async def run(job: JobContext[Prompt]) -> str:
        ran.append(job.id)
        return job.payload.prompt

    async with worker:
        results = [await jobs.wait(job.id, timeout=10) for job in good]
    assert results == [str(n) for n in range(10)]
    assert not set(ids) & set(ran)
    assert set(await jobs.dead()) == set(ids)
    for id in ids:
        record = await jobs.get(id)
        assert record is not None
        assert record.status == "failed"
        assert record.attempt == 1
        assert record.error is not None
        assert "payload of queue" in record.error
        assert ("not UTF-8" in record.error) == (id == ids[4])
        assert "secret" not in record.error
    assert "secret" not in caplog.text


@pytest.mark.parametrize("what", ["set", "file", "object", "large", "nan", "coroutine"])
async def test_h24_a_result_that_cannot_be_stored_fails_for_good(
    valkey_url: str, queue_name: str, aclient: AsyncClient, what: str
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, max_result=1000)
    worker = Worker(valkey_url)
    starts = 0

    @worker.handles(queue)
    def run(job: SyncJobContext[Any]) -> Any:
        nonlocal starts
        starts += 1
        if job.payload == "next":
            return "fine"
        with Path(__file__).open() as file:
            results = {"set": {1}, "file": file, "object": object(), "large": "x" * 2000, "nan": float("nan")}
            return results.get(what) or asyncio.sleep(0)

    async with worker:
        job = await aclient.queue(queue).enqueue(None)
        record = await settled(aclient, queue, job.id)
        following = await aclient.queue(queue).enqueue("next")
        assert await aclient.queue(queue).wait(following.id, timeout=10) == "fine"
    assert starts == 2
    assert (record.status, record.attempt) == ("failed", 1)
    assert record.error.startswith("InvalidArgumentError: ")
    assert what != "coroutine" or record.error.endswith("write async def, and await it")


@pytest.mark.parametrize("error", [Rude(), Needy(code=3), SystemExit(3), GeneratorExit()])
async def test_h24_strange_exceptions_fail_the_attempt_and_nothing_else(
    valkey_url: str, queue_name: str, aclient: AsyncClient, error: BaseException
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, max_attempts=1)
    worker = Worker(valkey_url)

    @worker.handles(queue, concurrency=2)
    async def run(job: JobContext[Any]) -> str:
        if job.payload:
            raise error
        return "fine"

    async with worker:
        job = await aclient.queue(queue).enqueue(1)
        record = await settled(aclient, queue, job.id)
        following = await aclient.queue(queue).enqueue(0)
        assert await aclient.queue(queue).wait(following.id, timeout=10) == "fine"
    assert record.status == "failed"
    assert record.error.startswith(type(error).__name__)


async def test_h25_retry_dead_runs_once_with_the_whole_payload(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, max_attempts=1, lease=1.0)
    jobs = aclient.queue(queue)
    payload = "x" * 100_000
    worker = Worker(valkey_url)
    runs: list[tuple[int, bool]] = []
    running, go = asyncio.Event(), asyncio.Event()

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> str:
        runs.append((job.attempt, job.payload == payload))
        if len(runs) == 1:
            for n in range(50):
                await job.emit({"old": n})
            raise TerminalJobError("no")
        running.set()
        await go.wait()
        await job.emit("new")
        return "done"

    async with worker:
        job = await jobs.enqueue(payload)
        old = [event async for event in jobs.watch(job.id)]
        answers = await asyncio.gather(jobs.retry_dead(job.id), jobs.retry_dead(job.id))
        watch = jobs.watch(job.id, after=old[-2].id)
        await asyncio.wait_for(running.wait(), 10)
        assert await jobs.retry_dead(job.id) is False
        go.set()
        seen = [event async for event in watch]
        assert await jobs.retry_dead(job.id) is False
    assert sorted(answers) == [False, True]
    assert runs == [(1, True), (1, True)]
    assert [event.type for event in seen] == ["restarted", "chunk", "completed"]


async def test_the_longest_time_of_an_attempt_ends_it_and_the_job_is_tried_again(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, timeout=0.1, backoff=0.01)
    worker = Worker(valkey_url)
    reasons: list[str | None] = []

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> str:
        if job.attempt > 1:
            return "quick"
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            reasons.append(job.signal.reason)
        return "swallowed, which changes nothing"

    jobs = aclient.queue(queue)
    async with worker:
        job = await jobs.enqueue(None)
        assert await jobs.wait(job.id, timeout=10) == "quick"
        record = await jobs.get(job.id)
        assert record is not None
        assert record.error == "TimeoutError: the attempt ran longer than 0.1 s"
        longer = await jobs.enqueue(None, timeout=0.05, max_attempts=1)
        with pytest.raises(JobFailedError, match=r"longer than 0\.05 s"):
            await jobs.wait(longer.id, timeout=10)
    assert reasons == ["timeout", "timeout"]


async def test_a_job_runs_as_often_as_it_may_and_no_more(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient
) -> None:
    worker = Worker(valkey_url)
    attempts: list[int] = []

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> str:
        attempts.append(job.attempt)
        raise RuntimeError("never")

    async with worker:
        job = await aclient.queue(queue).enqueue(None, max_attempts=2)
        with pytest.raises(JobFailedError, match="never"):
            await aclient.queue(queue).wait(job.id, timeout=10)
    assert attempts == [1, 2]


async def test_an_expired_job_is_not_run(valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient) -> None:
    jobs = aclient.queue(queue)
    job = await jobs.enqueue(None, expires=0.05)
    late = await jobs.enqueue(None, deadline=0.05)
    await asyncio.sleep(0.1)
    worker = Worker(valkey_url)

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> None:
        raise AssertionError

    async with worker:
        assert (await settled(aclient, queue, job.id)).error == "JobExpiredError: the job expired before it could start"
        assert "deadline" in (await settled(aclient, queue, late.id)).error


async def test_a_deadline_ends_the_attempt_and_the_retries(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient
) -> None:
    jobs = aclient.queue(queue)
    worker = Worker(valkey_url)

    @worker.handles(queue, concurrency=2)
    async def run(job: JobContext[Any]) -> None:
        if job.payload == "slow":
            await asyncio.sleep(30)
        raise RetryJobError("again", retry_after=60)

    async with worker:
        slow = await settled(aclient, queue, (await jobs.enqueue("slow", deadline=0.3)).id)
        failing = await settled(aclient, queue, (await jobs.enqueue("failing", deadline=5)).id)
    assert (slow.status, slow.attempt) == ("failed", 1)
    assert slow.error.startswith("TimeoutError")
    assert (failing.status, failing.attempt, failing.error) == ("failed", 1, "RetryJobError: again")


async def test_a_rate_limit_gives_the_attempt_back_and_pauses_the_queue(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient
) -> None:
    jobs = aclient.queue(queue)
    worker = Worker(valkey_url)
    starts: list[tuple[float, int, int]] = []

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> str:
        starts.append((time.monotonic(), job.attempt, job.starts))
        if len(starts) == 1:
            await job.emit("partial")
            raise RateLimitedError("slow down", retry_after=0.4)
        return "done"

    async with worker:
        job = await jobs.enqueue(None)
        other = await jobs.enqueue(None)
        events = [event async for event in jobs.watch(job.id)]
        await jobs.wait(other.id, timeout=10)
    assert [(attempt, count) for _, attempt, count in starts] == [(1, 1), (1, 2), (1, 1)]
    assert starts[1][0] - starts[0][0] >= 0.39
    assert [event.type for event in events if event.type != "chunk"] == ["restarted", "completed"]


async def test_is_retryable_replaces_the_classification(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient
) -> None:
    asked: list[BaseException] = []

    def only_terminal(error: BaseException) -> bool:
        asked.append(error)
        return isinstance(error, TerminalJobError)

    worker = Worker(valkey_url, is_retryable=only_terminal)

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> str:
        if job.attempt == 2:
            return "second"
        raise {"terminal": TerminalJobError, "value": ValueError}[job.payload]("x")

    jobs = aclient.queue(queue)
    async with worker:
        terminal = await jobs.enqueue("terminal")
        assert await jobs.wait(terminal.id, timeout=10) == "second"
        value = await settled(aclient, queue, (await jobs.enqueue("value")).id)
    assert (value.status, value.attempt) == ("failed", 1)
    assert [type(error) for error in asked] == [TerminalJobError, ValueError]


async def test_a_failed_attempt_is_logged_with_its_traceback_and_told_to_on_error(
    valkey_url: str, queue_name: str, aclient: AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    queue = Queue(queue_name, payload=Prompt, max_attempts=1)
    told: list[tuple[BaseException, Any]] = []

    def on_error(error: BaseException, job: Any) -> None:
        told.append((error, job))
        raise RuntimeError("must not matter")

    worker = Worker(valkey_url, on_error=on_error)

    @worker.handles(queue)
    async def run(job: JobContext[Prompt]) -> None:
        if job.payload.prompt != "x":
            Prompt.model_validate({"prompt": [job.payload.prompt]})
        raise LookupError("in_the_handler")

    jobs = aclient.queue(queue)
    caplog.set_level(logging.WARNING)
    async with worker:
        job = await jobs.enqueue(Prompt(prompt="x"))
        await settled(aclient, queue, job.id)
        secret = await settled(aclient, queue, (await jobs.enqueue(Prompt(prompt="top secret"))).id)
    [record] = [record for record in caplog.records if "in_the_handler" in record.getMessage()]
    assert record.name == "outlast.worker"
    assert repr(job.id) in record.getMessage()
    assert record.exc_info is not None
    assert "raise LookupError" in caplog.text
    assert [(type(error).__name__, context.id) for error, context in told] == [
        ("LookupError", job.id),
        ("ValidationError", secret.id),
    ]
    assert "model_validate" in caplog.text
    assert "top secret" not in caplog.text + secret.error
