"""What a job uses is added up over its attempts, counted by day, and held against its budget."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime
from typing import Any

import pytest
import redis
from tests.protocol.lab import Lab

from outlast import AsyncClient, BudgetExceededError, InvalidArgumentError, Queue, RateLimitedError, TerminalJobError
from outlast.protocol import Keys
from outlast_worker import JobContext, SyncJobContext, Worker


async def ended(client: AsyncClient, queue: Queue[Any, Any], id: str) -> Any:
    async for _ in client.queue(queue).watch(id, timeout=20):
        pass
    return await client.queue(queue).get(id)


async def test_usage_adds_up_over_attempts_and_over_the_jobs_of_a_day(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient
) -> None:
    worker = Worker(valkey_url)
    sums: list[dict[str, float]] = []

    @worker.handles(queue, concurrency=2)
    async def run(job: JobContext[Any]) -> None:
        sums.append(job.usage(input_tokens=100, output_tokens=20, cost=0.1, llm_calls=1))
        if job.starts == 1:
            raise RateLimitedError(retry_after=0.01)
        if job.attempt == 1:
            raise ValueError
        job.usage(cost=0.2)
        assert job.usage() == sums[-1] | {"cost": 0.5}

    today = str(datetime.now(UTC).date())
    jobs = aclient.queue(queue)
    async with worker:
        record = await ended(aclient, queue, (await jobs.enqueue(None)).id)
        whole = {"input_tokens": 300, "output_tokens": 60, "cost": 0.5, "llm_calls": 3}
        assert record.usage == whole
        assert [each["input_tokens"] for each in sums] == [100, 200, 300]
        assert record.starts == 3
        await ended(aclient, queue, (await jobs.enqueue(None)).id)
    assert list((await jobs.usage()).values()) == [{name: 2 * amount for name, amount in whole.items()}]
    assert set(await jobs.usage(days=2)) <= {today, str(datetime.now(UTC).date())}
    assert (await jobs.get((await jobs.enqueue(None)).id)).usage == {}  # type: ignore[union-attr]


async def test_usage_of_a_crashed_attempt_counts_once_it_was_written(
    valkey_url: str, queue_name: str, aclient: AsyncClient, raw: redis.Redis, keys: Keys
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.6)
    first, hold = Worker(valkey_url), asyncio.Event()

    @first.handles(queue)
    async def dies(job: JobContext[Any]) -> None:
        job.usage(cost=1)
        await job.flush()
        raw.hset(keys.job(job.id), "token", "crashed:1")
        hold.set()
        await asyncio.sleep(60)  # until it learns that the lease is lost

    second = Worker(valkey_url, block=0.2)

    @second.handles(queue)
    async def run(job: JobContext[Any]) -> None:
        job.usage(cost=2)

    jobs = aclient.queue(queue)
    async with first:
        job = await jobs.enqueue(None)
        await hold.wait()
        first.stop()
        async with second:
            assert (await ended(aclient, queue, job.id)).usage == {"cost": 3}
    assert list((await jobs.usage()).values()) == [{"cost": 3}]


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_usage_of_a_job_that_a_crash_ends_is_in_the_totals_once(lab: Lab, end: str) -> None:
    """What an earlier attempt counted is not counted again; what the last one wrote is not lost with its worker."""
    day = lab.keys.usage("2026-12-01")
    first = lab.running(max_attempts=2).uses("2026-12-01", tokens=10, cost=0.1)
    first.retry()
    assert lab.raw("HGETALL", day) == ["tokens", "10", "cost", "0.1"]
    lab.now = int(datetime(2028, 2, 29, 23, 50, tzinfo=UTC).timestamp() * 1000)
    lab.reserve(0)  # promoted
    second = lab.one()
    lab.send(second.flush_call(usage='{"tokens":15,"cost":0.3,"a b:1":2e-7}'))
    if end == "cancelled":
        lab.cancel()
    lab.lapse()
    lab.reserve(0)
    lab.reserve(0)
    record = lab.record()
    assert (record["status"], record["counted"]) == (end, record["usage"])
    assert lab.raw("HGETALL", lab.keys.usage("2028-02-29")) == ["tokens", "5", "cost", "0.2", "a b:1", "2e-07"]
    assert lab.raw("HGETALL", day) == ["tokens", "10", "cost", "0.1"]


@pytest.mark.parametrize(
    "day", ["1999-12-31", "2000-02-29", "2000-03-01", "2026-11-30", "2027-01-01", "2027-02-28", "2100-03-01"]
)
def test_the_day_of_a_crash_is_that_of_the_calendar(lab: Lab, day: str) -> None:
    lab.now = int(datetime.fromisoformat(f"{day}T23:00:00+00:00").timestamp() * 1000)
    job = lab.running(max_attempts=1)
    lab.send(job.flush_call(usage='{"cost":1}'))
    lab.lapse()
    lab.reserve(0)
    assert lab.raw("HGETALL", lab.keys.usage(day)) == ["cost", "1"]


async def test_what_a_step_used_is_on_the_record_before_the_step_is(
    valkey_url: str, queue_name: str, aclient: AsyncClient, raw: redis.Redis, keys: Keys
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, max_attempts=1)
    worker = Worker(valkey_url, emit_interval=60)  # nothing is written by itself for a minute

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> Any:
        await job.emit("starts the interval")

        def costs() -> str:
            job.usage(cost=0.25)  # from the thread of the step
            return threading.current_thread().name

        await job.step("costs", costs)
        return raw.hget(keys.job(job.id), "usage").decode()

    async with worker:
        job = await aclient.queue(queue).enqueue(None)
        assert await aclient.queue(queue).wait(job.id, timeout=10) == '{"cost":0.25}'


@pytest.mark.parametrize("kind", ["async", "plain", "swallowed", "retried"])
async def test_exceeding_the_budget_ends_the_job_for_good(
    valkey_url: str, queue_name: str, aclient: AsyncClient, kind: str
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, budget={"cost": 1, "output_tokens": 100}, backoff=0.01)
    worker = Worker(valkey_url, is_retryable=lambda error: True)

    async def run(job: JobContext[Any]) -> str:
        job.usage(cost=1, output_tokens=60)
        if kind == "swallowed":
            with pytest.raises(BudgetExceededError):
                job.usage(output_tokens=41)
            return "over budget"
        if kind == "retried":
            raise ValueError  # the second attempt goes over it
        job.usage(output_tokens=41)
        return "over budget"

    def plain(job: SyncJobContext[Any]) -> str:
        job.usage(output_tokens=101)
        return "over budget"

    worker.handles(queue)(plain if kind == "plain" else run)
    async with worker:
        record = await ended(aclient, queue, (await aclient.queue(queue).enqueue(None)).id)
    assert record.status == "failed"
    assert record.attempt == (2 if kind == "retried" else 1)
    used, counter = ("2", "cost") if kind == "retried" else ("101", "output_tokens")
    budget = {"cost": "1", "output_tokens": "100"}[counter]
    assert record.error == f"BudgetExceededError: the job has used {used} {counter}; its budget is {budget}"
    assert issubclass(BudgetExceededError, TerminalJobError)


async def test_a_request_may_only_lower_the_budget(valkey_url: str, queue_name: str, aclient: AsyncClient) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, budget={"cost": 1})
    worker = Worker(valkey_url)

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> None:
        job.usage(**job.payload)

    jobs = aclient.queue(queue)
    async with worker:
        for budget, payload, status in (
            ({"cost": 5}, {"cost": 2}, "failed"),
            ({"cost": 0.5}, {"cost": 0.75}, "failed"),
            ({"cost": 0.5}, {"cost": 0.5}, "completed"),
            ({"tools": 1}, {"cost": 1, "tools": 2}, "failed"),
            ({"tools": 0}, {"cost": 1}, "completed"),
        ):
            job = await jobs.enqueue(payload, budget=budget)
            assert (await ended(aclient, queue, job.id)).status == status, (budget, payload)


async def test_a_job_that_is_over_its_budget_does_not_run_again(
    valkey_url: str, queue_name: str, aclient: AsyncClient, raw: redis.Redis, keys: Keys
) -> None:
    """Its worker died between the write and the end."""
    queue: Queue[Any, Any] = Queue(queue_name, budget={"cost": 1})
    worker, ran = Worker(valkey_url), []
    job = await aclient.queue(queue).enqueue(None)
    raw.hset(keys.job(job.id), "usage", '{"cost":1.5}')

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> None:
        ran.append(job.id)

    async with worker:
        record = await ended(aclient, queue, job.id)
    assert record.error == "BudgetExceededError: the job has used 1.5 cost; its budget is 1"
    assert not ran


@pytest.mark.parametrize("amounts", [{"cost": -1}, {"cost": float("nan")}, {"n": True}, {"n": "1"}, {"a\nb": 1}])
async def test_amounts_that_are_none_are_refused(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient, amounts: Any
) -> None:
    with pytest.raises(InvalidArgumentError):
        Queue("q", budget=amounts)
    with pytest.raises(InvalidArgumentError):
        await aclient.queue(queue).enqueue(None, budget=amounts)
    worker, refused = Worker(valkey_url), asyncio.Event()

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> None:
        with pytest.raises(InvalidArgumentError):
            job.usage(**amounts)
        refused.set()

    async with worker:
        record = await ended(aclient, queue, (await aclient.queue(queue).enqueue(None)).id)
    assert refused.is_set()
    assert record.usage == {}


async def test_a_job_has_fifty_counters_at_most_however_many_calls_they_come_in(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient
) -> None:
    worker = Worker(valkey_url)

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> None:
        for n in range(50):
            job.usage(**{f"counter-{n}": 1})
        with pytest.raises(InvalidArgumentError, match="51 counters in this job"):
            job.usage(**{"counter-0": 1, "one-more": 1})
        job.usage(**{"counter-0": 1})

    async with worker:
        record = await ended(aclient, queue, (await aclient.queue(queue).enqueue(None)).id)
    assert (len(record.usage), record.usage["counter-0"]) == (50, 2)


async def test_a_record_of_nonsense_reads_as_no_usage(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient, raw: redis.Redis, keys: Keys
) -> None:
    jobs = aclient.queue(queue)
    job = await jobs.enqueue(None)
    for text in ("", "x", "[1]", '{"a":"b","c":true}'):
        raw.hset(keys.job(job.id), "usage", text)
        assert (await jobs.get(job.id)).usage == {}  # type: ignore[union-attr]
