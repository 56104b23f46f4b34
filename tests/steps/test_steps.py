"""What a finished step is worth: no later attempt pays for it again, whatever happened in between."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from functools import partial
from typing import Any

import pytest
import redis
from pydantic import BaseModel
from tests.faults.links import Proxy
from tests.faults.processes import until
from tests.servers import start_valkey

from outlast import (
    AsyncClient,
    InvalidArgumentError,
    JobCancelledError,
    JobFailedError,
    Queue,
    RateLimitedError,
    StepValueError,
    StoreFullError,
    TerminalJobError,
)
from outlast.protocol import Keys, calls
from outlast_worker import JobContext, SyncJobContext, Worker


class Summary(BaseModel):
    text: str
    words: int = 0


class Paid:
    """Counts what ran, by name."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()

    async def call(self, name: str, value: Any = None) -> Any:
        self.runs[name] += 1
        await asyncio.sleep(0)
        return name.upper() if value is None else value


@pytest.fixture
def paid() -> Paid:
    return Paid()


async def test_a_failure_on_chunk_40_of_50_costs_one_chunk(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient, paid: Paid
) -> None:
    worker = Worker(valkey_url)

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> str:
        parts = []
        for n in range(50):
            if n == 40 and job.attempt == 1:
                await job.step(f"chunk-{n}", fails, f"{n}")
            parts.append(await job.step(f"chunk-{n}", paid.call, f"{n}"))
        return "".join(parts)

    async def fails(name: str) -> str:
        await paid.call(name)
        raise ValueError("the model is overloaded")

    async with worker:
        job = await aclient.queue(queue).enqueue(None)
        assert await aclient.queue(queue).wait(job.id, timeout=15) == "".join(str(n) for n in range(50))
    assert paid.runs == {str(n): 2 if n == 40 else 1 for n in range(50)}


async def test_a_plain_handler_has_steps_too(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient, paid: Paid
) -> None:
    worker = Worker(valkey_url)
    threads = set()

    def costs(name: str) -> Summary:
        threads.add(threading.current_thread())
        paid.runs[name] += 1
        return Summary(text=name)

    @worker.handles(queue)
    def run(job: SyncJobContext[Any]) -> list[str]:
        first = job.step("first", costs, "a")
        if job.attempt == 1:
            with pytest.raises(InvalidArgumentError, match="use async def"):
                job.step("async", paid.call, "x")
            raise ValueError
        return [first.text, job.step("second", costs, name="b").text]

    async with worker:
        job = await aclient.queue(queue).enqueue(None)
        assert await aclient.queue(queue).wait(job.id, timeout=15) == ["a", "b"]
    assert paid.runs == {"a": 1, "b": 1}
    assert len(threads) == 2, "it runs in the handler's own thread"


async def test_steps_that_run_at_once_are_each_kept(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient, raw: redis.Redis, paid: Paid
) -> None:
    worker = Worker(valkey_url)

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> list[str]:
        names = [f"n{n}" for n in range(20)]
        if job.attempt == 1:

            async def slow() -> None:
                await asyncio.sleep(0.05)
                raise ValueError

            await asyncio.gather(*(job.step(name, paid.call, name) for name in names[:10]), job.step("x", slow))
        return list(await asyncio.gather(*(job.step(name, paid.call, name) for name in names)))

    async with worker:
        before = raw.info("commandstats").get("cmdstat_hgetall", {"calls": 0})["calls"]
        job = await aclient.queue(queue).enqueue(None)
        assert await aclient.queue(queue).wait(job.id, timeout=15) == [f"N{n}" for n in range(20)]
        assert raw.info("commandstats")["cmdstat_hgetall"]["calls"] == before + 2, "one read an attempt"
    assert set(paid.runs.values()) == {1}


@pytest.mark.parametrize("end", ["retried", "rate limited", "failed for good", "cancelled"])
async def test_steps_under_way_when_another_fails_are_kept_and_run_on_beside_no_other_attempt(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient, end: str
) -> None:
    worker, jobs = Worker(valkey_url), aclient.queue(queue)
    under_way, go = asyncio.Event(), asyncio.Event()
    ran: list[str] = []
    stopped: list[str] = []

    async def fails() -> None:
        await under_way.wait()
        asyncio.get_running_loop().call_later(0.05, go.set)
        if end == "rate limited":
            raise RateLimitedError("slow down", retry_after=0.01)
        raise TerminalJobError("no") if end == "failed for good" else ValueError

    async def slow(name: str) -> str:
        ran.append(name)
        under_way.set()
        try:
            if end == "cancelled":
                await jobs.cancel(job.id)
            await (asyncio.Event() if end in ("failed for good", "cancelled") else go).wait()
        except asyncio.CancelledError:
            stopped.append(name)
            raise
        return name

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> Any:
        async def chunk(name: str) -> str:
            value = await job.step(name, slow, name)
            if job.starts == 1:
                await asyncio.sleep(0)
                await job.step(f"after {name}", slow, f"after {name}")
            return value

        return await asyncio.gather(chunk("a"), chunk("b"), *([job.step("x", fails)] if job.starts == 1 else []))

    job = await jobs.enqueue(None)
    async with worker:
        if end in ("retried", "rate limited"):
            assert await jobs.wait(job.id, timeout=10) == ["a", "b"]
            assert (ran, stopped) == (["a", "b"], [])
        else:
            with pytest.raises(JobCancelledError if end == "cancelled" else JobFailedError):
                await jobs.wait(job.id, timeout=10)
            assert (sorted(set(ran)), sorted(set(stopped))) == (["a", "b"], ["a", "b"])


async def test_values_come_back_as_the_type_that_they_had(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient, paid: Paid
) -> None:
    worker = Worker(valkey_url)
    seen: list[list[Any]] = []

    async def model() -> Summary:
        return Summary(text="é\u2028", words=2)

    def many() -> list[Summary]:
        return [Summary(text="a")]

    async def nothing() -> None: ...

    def later() -> Any:
        return model()

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> str:
        seen.append(
            [
                await job.step("gen", model),
                await job.step("many", many),
                await job.step("nothing", nothing),
                await job.step("partial", partial(paid.call, "p", {"a": [1, 2.5, None, "x", (3, 4)]})),
                await job.step("typed", paid.call, "t", {"text": "t"}, type=Summary),
                await job.step("lambda", lambda: 7),
                await job.step("returns an awaitable", later, type=Summary),
                await job.step("größe ⇒ 50 %", paid.call, "u"),
            ]
        )
        if job.attempt == 1:
            raise ValueError
        return "done"

    async with worker:
        job = await aclient.queue(queue).enqueue(None)
        await aclient.queue(queue).wait(job.id, timeout=15)
    assert seen[0] == seen[1], "whether it ran or was read makes no difference"
    assert seen[0] == [
        Summary(text="é\u2028", words=2),
        [Summary(text="a")],
        None,
        {"a": [1, 2.5, None, "x", [3, 4]]},
        Summary(text="t"),
        7,
        Summary(text="é\u2028", words=2),
        "U",
    ]


async def test_halves_of_surrogate_pairs_are_joined_as_in_emitted_text(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient
) -> None:
    worker = Worker(valkey_url)

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> Any:
        return await job.step("pieces", lambda: {"text": "".join(["\ud83d", "\ude00"]), "rest": ["\ud83d"]})

    jobs = aclient.queue(queue)
    async with worker:
        kept = await jobs.wait((await jobs.enqueue(None)).id, timeout=20)
    assert kept == {"text": "😀", "rest": ["\ufffd"]}


async def test_what_cannot_be_kept_is_refused_before_it_is_paid_for_or_ends_the_job(
    valkey_url: str, queue_name: str, aclient: AsyncClient, paid: Paid
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, max_step=100)
    worker = Worker(valkey_url)
    refused: list[BaseException] = []

    class Opaque:
        pass

    async def opaque() -> Opaque:
        await paid.call("never")
        return Opaque()

    async def unknown() -> Nowhere:  # type: ignore[name-defined]  # noqa: F821
        await paid.call("never")

    async def large() -> str:
        return await paid.call("large", "é" * 60)  # type: ignore[no-any-return]

    async def no_json() -> Any:
        return await paid.call("no json", Summary(text="secret"))

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> None:
        for name, function in (("o", opaque), ("u", unknown), ("", large), ("a\nb", large), ("x" * 513, large)):
            with pytest.raises(InvalidArgumentError) as caught:
                await job.step(name, function)
            refused.append(caught.value)
        assert not paid.runs
        await job.step("twice", paid.call, "twice")
        with pytest.raises(InvalidArgumentError, match="give each step its own name"):
            await job.step("twice", paid.call, "twice")
        await job.step("ends it", {"large": large, "json": no_json}[job.payload])

    jobs = aclient.queue(queue)
    async with worker:
        for payload, why in (("large", "has 122 bytes of JSON; the limit is 100"), ("json", "not JSON")):
            job = await jobs.enqueue(payload)
            async for _ in jobs.watch(job.id):
                pass
            record = await jobs.get(job.id)
            assert record is not None
            assert (record.status, record.attempt) == ("failed", 1), "another attempt would pay for it again"
            assert record.error is not None
            assert record.error.startswith("StepValueError: ")
            assert why in record.error
            assert "secret" not in record.error
            paid.runs.clear()
    assert issubclass(StepValueError, TerminalJobError)
    assert not [error for error in refused if isinstance(error, StepValueError)]


async def test_a_failed_step_may_be_tried_again_in_the_same_attempt(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient, paid: Paid
) -> None:
    worker = Worker(valkey_url)

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> str:
        async def flaky() -> str:
            await paid.call("f")
            if paid.runs["f"] < 3:
                raise ValueError
            return "third"

        for _ in range(2):
            with pytest.raises(ValueError):  # noqa: PT011
                await job.step("f", flaky)
        return await job.step("f", flaky)

    async with worker:
        job = await aclient.queue(queue).enqueue(None)
        assert await aclient.queue(queue).wait(job.id, timeout=15) == "third"


async def test_a_lost_reply_never_runs_a_step_twice(
    valkey_url: str, queue_name: str, aclient: AsyncClient, paid: Paid
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=5)
    with Proxy(valkey_url) as proxy:
        worker = Worker(proxy.url)

        @worker.handles(queue, concurrency=5)
        async def run(job: JobContext[Any]) -> list[str]:
            return [await job.step(f"{n}", paid.call, f"{job.payload}/{n}") for n in range(20)]

        async with worker:
            proxy.drop_every = 4
            jobs = aclient.queue(queue)
            ids = [(await jobs.enqueue(n)).id for n in range(5)]
            for n, id in enumerate(ids):
                assert await jobs.wait(id, timeout=30) == [f"{n}/{i}" for i in range(20)]
            proxy.drop_every = 0
    assert proxy.dropped > 10
    assert paid.runs == {f"{n}/{i}": 1 for n in range(5) for i in range(20)}


async def test_a_step_that_was_paid_for_is_stored_although_its_handler_is_stopped(
    valkey_url: str, queue_name: str, aclient: AsyncClient, paid: Paid
) -> None:
    """The link is down when the value is there, and the worker is told to hand back: it waits for the value."""
    queue: Queue[Any, Any] = Queue(queue_name, lease=5)
    jobs = aclient.queue(queue)
    interrupted: list[str | None] = []
    with Proxy(valkey_url) as proxy:
        worker = Worker(proxy.url)

        async def run(job: JobContext[Any]) -> str:
            async def costs() -> str:
                proxy.down()
                return await paid.call("costs")  # type: ignore[no-any-return]

            try:
                return await job.step("costs", costs)
            except asyncio.CancelledError:
                interrupted.append(job.signal.reason)
                raise

        worker.handles(queue)(run)
        async with worker:
            job = await jobs.enqueue(None)
            await until(lambda: paid.runs["costs"], "it is paid for")
            await asyncio.sleep(0.1)
            worker.stop(now=True)
            await until(lambda: interrupted, "the handler is interrupted")
            proxy.heal()
        second = Worker(valkey_url)
        second.handles(queue)(run)
        async with second:
            assert await jobs.wait(job.id, timeout=15) == "COSTS"
    assert interrupted == ["shutdown"]
    assert paid.runs == {"costs": 1}


async def test_a_holder_that_lost_its_job_keeps_nothing(
    valkey_url: str, queue_name: str, aclient: AsyncClient, raw: redis.Redis, keys: Keys, paid: Paid
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.6)
    jobs = aclient.queue(queue)
    ends: list[str | None] = []
    with Proxy(valkey_url) as proxy:
        cut_off, healthy = Worker(proxy.url), Worker(valkey_url, block=0.2)
        taken = asyncio.Event()

        @cut_off.handles(queue)
        async def run(job: JobContext[Any]) -> str:
            async def costs() -> str:
                proxy.down()
                await taken.wait()
                proxy.heal()
                return "OLD"

            try:
                return await job.step("s", costs)
            finally:
                ends.append(job.signal.reason)

        @healthy.handles(queue)
        async def other(job: JobContext[Any]) -> str:
            taken.set()
            await until(lambda: ends, "the other one is told")
            return await job.step("s", paid.call, "new")  # type: ignore[no-any-return]

        async with cut_off:
            job = await jobs.enqueue(None)
            await until(lambda: raw.hget(keys.job(job.id), "status") == b"active", "it runs")
            async with healthy:
                assert await jobs.wait(job.id, timeout=15) == "NEW"
    assert ends == ["lease_lost"]
    assert raw.hget(keys.steps(job.id), "s:s") == b'"NEW"'


@pytest.mark.parametrize("how", ["released", "reclaimed", "revived", "revived without", "used again", "by another"])
async def test_steps_live_as_long_as_the_life_of_their_job(
    valkey_url: str, queue_name: str, aclient: AsyncClient, raw: redis.Redis, keys: Keys, paid: Paid, how: str
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.5, max_attempts=2)
    jobs = aclient.queue(queue)
    stopped = Worker(valkey_url)
    there, begun = asyncio.Event(), asyncio.Event()

    async def costs(name: str) -> str:
        return await paid.call(name)  # type: ignore[no-any-return]

    @stopped.handles(queue)
    async def first(job: JobContext[Any]) -> str:
        await job.step("a", costs, "a")
        begun.set()
        if how.startswith(("revived", "used")):
            raise TerminalJobError("for good")
        await there.wait()
        return "never"

    async with stopped:
        job = await jobs.enqueue(None, id="own")
        await asyncio.wait_for(begun.wait(), 10)
        match how:
            case "reclaimed":
                raw.hset(keys.job(job.id), "token", "crashed:1")  # as if its process were gone
                there.set()
            case "released":
                stopped.stop(now=True)
            case "by another":
                raw.hset(keys.steps(job.id), "s:old", "1")
                raw.delete(keys.job(job.id), keys.events(job.id))
                raw.zrem(keys.leases, job.id)
                raw.hset(keys.job(job.id), mapping={"id": job.id, "payload": "null"})
                raw.zadd(keys.ready, {job.id: 1})
                stopped.stop(now=True)
            case _:
                await until(lambda: raw.zscore(keys.dead, job.id), "it is dead")
                assert 0 < raw.pttl(keys.steps(job.id)) <= raw.pttl(keys.job(job.id)) + 50
    match how:
        case "revived":
            assert await jobs.retry_dead(job.id)
        case "revived without":
            assert await jobs.retry_dead(job.id, keep_steps=False)
        case "used again":
            await jobs.enqueue(None, id="own")
            assert not raw.exists(keys.steps(job.id))
    second = Worker(valkey_url, block=0.2)

    @second.handles(queue)
    async def run(job: JobContext[Any]) -> list[str]:
        return [await job.step("a", costs, "a"), await job.step("b", costs, "b")]

    async with second:
        assert await jobs.wait(job.id, timeout=15) == ["A", "B"]
    kept = how in ("released", "reclaimed", "revived")
    assert paid.runs == {"a": 1 if kept else 2, "b": 1}
    assert raw.hget(keys.steps(job.id), "gen") == raw.hget(keys.job(job.id), "gen")
    assert raw.hlen(keys.steps(job.id)) == 3, "those of another life are dropped"
    assert 0 < raw.pttl(keys.steps(job.id)) <= queue.result_ttl_ms


async def test_steps_of_a_job_that_a_foreign_worker_ends_do_not_stay_for_ever(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient, raw: redis.Redis, keys: Keys
) -> None:
    worker, hold = Worker(valkey_url), asyncio.Event()

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> None:
        await job.step("a", int)
        await hold.wait()

    async with worker:
        job = await aclient.queue(queue).enqueue(None)
        await until(lambda: raw.exists(keys.steps(job.id)), "a step is kept")
        assert queue.result_ttl_ms < raw.pttl(keys.steps(job.id)) <= calls.STEPS_TTL_MS
        hold.set()


async def test_a_step_in_a_thread_that_blocks_does_not_block_its_neighbours(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient
) -> None:
    worker = Worker(valkey_url)

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> float:
        began = time.monotonic()
        await asyncio.gather(job.step("a", time.sleep, 0.3), job.step("b", time.sleep, 0.3))
        return time.monotonic() - began

    async with worker:
        job = await aclient.queue(queue).enqueue(None)
        assert await aclient.queue(queue).wait(job.id, timeout=15) < 0.6


async def test_a_full_database_is_told_to_whoever_waits_for_the_step(
    queue_name: str, monkeypatch: pytest.MonkeyPatch, paid: Paid
) -> None:
    monkeypatch.setattr("outlast_worker.steps.PATIENCE", 0.2)
    monkeypatch.setattr("outlast_worker.engine.FULL_PAUSE", 0.1)
    queue: Queue[Any, Any] = Queue(queue_name, lease=5)
    with start_valkey() as server, redis.Redis(port=server.port) as raw:
        worker = Worker(server.connection_url)

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> str:
            raw.config_set("maxmemory", 1)
            with pytest.raises(StoreFullError):
                await job.step("a", paid.call, "a")
            raw.config_set("maxmemory", 0)
            return await job.step("a", paid.call, "a")  # type: ignore[no-any-return]

        async with AsyncClient(redis_url=server.connection_url) as client, worker:
            job = await client.queue(queue).enqueue(None)
            assert await client.queue(queue).wait(job.id, timeout=15) == "A"
    assert paid.runs == {"a": 2}
