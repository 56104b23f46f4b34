"""Cancelling: in every state, at once, final, and seen by the provider."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from contextlib import AsyncExitStack, suppress
from typing import Any

import httpx
import pytest
import redis
from tests.faults.links import Provider
from tests.faults.processes import Process, until

from outlast import AsyncClient, JobInUseError, JobStopped, Queue
from outlast.protocol import Keys
from outlast_worker import JobContext, SyncJobContext, Worker

from .conftest import sleeper


async def test_h14_cancel_in_every_state(
    valkey_url: str, queue_name: str, aclient: AsyncClient, raw: redis.Redis, keys: Keys
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, max_attempts=2, backoff=60, max_backoff=60)
    jobs = aclient.queue(queue)
    worker = Worker(valkey_url)
    runs: list[str] = []

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> str:
        runs.append(job.payload)
        if job.payload == "retry":
            raise ValueError
        if job.payload == "dead":
            raise asyncio.CancelledError
        if job.payload == "running":
            await asyncio.sleep(60)
        return "R"

    async with worker:
        ids = {
            "completed": (await jobs.enqueue("completed")).id,
            "retry": (await jobs.enqueue("retry")).id,
            "dead": (await jobs.enqueue("dead", max_attempts=1)).id,
            "running": (await jobs.enqueue("running")).id,
        }
        await until(lambda: "running" in runs, "the last one runs")
        ids["waiting"] = (await jobs.enqueue("waiting")).id
        ids["delayed"] = (await jobs.enqueue("delayed", delay=60)).id
        watching = {
            name: asyncio.ensure_future(_last(jobs.watch(id))) for name, id in ids.items() if name not in ("completed",)
        }
        await asyncio.sleep(0.05)
        began = time.monotonic()
        # The running one last: it frees the slot that the waiting one waits for.
        order = sorted(ids, key=lambda name: name == "running")
        answers = {name: await jobs.cancel(ids[name]) for name in order}
        answers["unknown"] = await jobs.cancel("nobody")
        assert time.monotonic() - began < 5
        assert answers == {
            "completed": False,
            "retry": True,
            "dead": False,
            "running": True,
            "waiting": True,
            "delayed": True,
            "unknown": False,
        }
        for name in ("retry", "running", "waiting", "delayed"):
            assert (await asyncio.wait_for(watching[name], 10)).type == "cancelled"
            assert await jobs.cancel(ids[name]) is True
        assert (await watching["dead"]).type == "failed"
    assert runs.count("waiting") == runs.count("delayed") == 0
    assert raw.zcard(keys.ready) == raw.zcard(keys.scheduled) == raw.zcard(keys.leases) == 0
    assert not raw.exists(keys.job("nobody"), keys.events("nobody"))


async def _last(events: Any) -> Any:
    return [event async for event in events][-1]


async def test_h15_the_id_is_free_once_the_first_run_has_wound_down(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient
) -> None:
    jobs = aclient.queue(queue)
    worker = Worker(valkey_url)
    running = asyncio.Event()
    wound_down = False
    seen: list[tuple[int, bool]] = []

    @worker.handles(queue, concurrency=2)
    async def run(job: JobContext[Any]) -> str:
        nonlocal wound_down
        seen.append((job.attempt, job.signal.is_set()))
        if job.payload == 1:
            running.set()
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(1.2)  # longer than the lease
                wound_down = True
        await job.emit("second")
        return "second"

    async with worker:
        await jobs.enqueue(1, id="x")
        await running.wait()
        assert await jobs.cancel("x") is True
        with pytest.raises(JobInUseError):
            await jobs.enqueue(2, id="x")
        accepted = False
        while not accepted:
            await asyncio.sleep(0.05)
            with suppress(JobInUseError):
                accepted = bool(await jobs.enqueue(2, id="x"))
        assert wound_down
        events = [event async for event in jobs.watch("x")]
    assert [event.type for event in events if event.type != "restarted"] == ["chunk", "completed"]
    assert seen == [(1, False), (1, False)]
    record = await jobs.get("x")
    assert record is not None
    assert (record.attempt, record.cancel_requested, record.result) == (1, False, "second")


@pytest.mark.parametrize("others", [True, False])
async def test_h16_cancel_while_the_owner_is_dead(
    valkey_url: str, queue_name: str, aclient: AsyncClient, spawn: Any, others: bool
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.6)
    jobs = aclient.queue(queue)
    starts: list[tuple[float, int]] = []
    owner: Process = spawn("sleep", seconds=60, queue={"lease": 0.6})
    job = await jobs.enqueue(None)
    await owner.wait_for("start")
    async with AsyncExitStack() as stack:
        if others:
            await stack.enter_async_context(sleeper(valkey_url, queue, starts))
        owner.kill()
        watcher = asyncio.ensure_future(_last(jobs.watch(job.id)))
        assert await jobs.cancel(job.id) is True
        if not others:
            await asyncio.sleep(1)
            await stack.enter_async_context(sleeper(valkey_url, queue, starts))
        assert (await asyncio.wait_for(watcher, 15)).type == "cancelled"
    record = await jobs.get(job.id)
    assert record is not None
    assert (record.status, record.attempt) == ("cancelled", 1)
    assert not starts


async def test_h17_a_silent_handler_is_interrupted_at_once(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=60)
    jobs = aclient.queue(queue)
    worker = Worker(valkey_url)
    interrupted: list[tuple[float, str | None]] = []

    @worker.handles(queue, concurrency=2)
    async def run(job: JobContext[Any]) -> str:
        async with httpx.AsyncClient(timeout=60) as http:
            try:
                return (await http.get(provider.url)).text
            except asyncio.CancelledError:
                interrupted.append((time.monotonic(), job.signal.reason))
                raise

    with Provider(every=30) as provider:
        async with worker:
            for n in range(2):
                provider.called.clear()
                provider.left.clear()
                job = await jobs.enqueue(None)
                await until(provider.called.is_set, "the provider is called")
                cancelled = time.monotonic()
                assert await jobs.cancel(job.id) is True
                assert (await _last(jobs.watch(job.id))).type == "cancelled"
                assert time.monotonic() - cancelled < 3
                await until(provider.left.is_set, "the provider sees its caller leave", 2)
                assert interrupted[n][0] - cancelled < 1
                assert interrupted[n][1] == "cancelled"


@pytest.mark.parametrize("how", ["cancelled", "lease_lost"])
async def test_h17_what_nobody_tells_a_silent_handler_is_noticed_with_the_next_renewal(
    valkey_url: str, keys: Keys, aclient: AsyncClient, raw: redis.Redis, how: str
) -> None:
    """A foreign client flags the job and no more; a foreign worker that takes it tells nobody."""
    queue: Queue[Any, Any] = Queue(keys.name, lease=0.8)
    worker = Worker(valkey_url)
    started, reasons = asyncio.Event(), []

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> str:
        started.set()
        try:
            await asyncio.sleep(30)
        finally:
            reasons.append(job.signal.reason)
        return "R"

    async with worker:
        job = await aclient.queue(queue).enqueue(None)
        await asyncio.wait_for(started.wait(), 10)
        raw.hset(keys.job(job.id), *(("cancelRequested", "1") if how == "cancelled" else ("token", "somebody:1")))
        await until(lambda: reasons == [how], "it is told")
        if how == "cancelled":
            assert (await _last(aclient.queue(queue).watch(job.id))).type == "cancelled"


async def test_h17_a_saturated_worker_hears_cancels_too(valkey_url: str, queue_name: str, aclient: AsyncClient) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=60)
    jobs = aclient.queue(queue)
    worker = Worker(valkey_url)
    running: asyncio.Queue[str] = asyncio.Queue()

    @worker.handles(queue, concurrency=2)
    async def run(job: JobContext[Any]) -> None:
        running.put_nowait(job.id)
        await asyncio.sleep(60)

    async with worker:
        ids = [(await jobs.enqueue(n)).id for n in range(4)]
        cancelled: list[str] = []
        for _ in range(4):
            cancelled.append(await asyncio.wait_for(running.get(), 5))
            began = time.monotonic()
            await jobs.cancel(cancelled[-1])
            await _last(jobs.watch(cancelled[-1]))
            assert time.monotonic() - began < 2
        assert sorted(cancelled) == sorted(ids)


async def test_h18_cancel_races_with_the_take(
    valkey_url: str, queue_name: str, aclient: AsyncClient, raw: redis.Redis, keys: Keys
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=5)
    jobs = aclient.queue(queue)
    workers = [Worker(valkey_url) for _ in range(4)]
    for worker in workers:

        @worker.handles(queue, concurrency=4)
        async def run(job: JobContext[Any]) -> str:
            await asyncio.sleep(random.random() * 0.002)
            return "R"

    async def one(n: int) -> None:
        rng = random.Random(n)
        job = await jobs.enqueue(n)
        await asyncio.sleep(rng.random() * rng.choice((0.002, 0.005, 0.2)))
        will_not_complete = await jobs.cancel(job.id)
        event = await _last(jobs.watch(job.id))
        record = await jobs.get(job.id)
        assert record is not None
        assert event.type == record.status == ("cancelled" if will_not_complete else "completed")
        assert record.result == (None if will_not_complete else "R")
        outcomes.append(will_not_complete)

    outcomes: list[bool] = []
    for worker in workers:
        await worker.__aenter__()
    for batch in range(20):
        await asyncio.gather(*(one(batch * 30 + n) for n in range(30)))
    for worker in workers:
        await worker.__aexit__(None, None, None)
    assert 0 < sum(outcomes) < 600
    assert raw.zcard(keys.leases) == raw.zcard(keys.ready) == 0


@pytest.mark.parametrize("where", ["stream", "emit", "cycle"])
async def test_h20_the_provider_sees_the_close_even_without_a_garbage_collector(
    valkey_url: str, queue_name: str, aclient: AsyncClient, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=60)
    jobs = aclient.queue(queue)
    worker = Worker(valkey_url)
    in_emit = asyncio.Event()

    async def tokens(url: str) -> Any:
        # An async generator that nobody closes: the frame of the handler is all that holds it.
        async with httpx.AsyncClient(timeout=60) as http, http.stream("GET", url) as response:
            async for token in response.aiter_text():
                yield token

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> None:
        stream = tokens(provider.url)
        try:
            await copy(job, stream)
        except BaseException as error:
            kept = error if where == "cycle" else None  # error, traceback, frame, error: only a collector ends this
            assert kept is None or kept
            raise

    async def copy(job: JobContext[Any], stream: Any) -> None:
        async for token in stream:
            await job.emit(token)
            if where != "stream" and not in_emit.is_set():
                # As if the buffer were full: the cancel lands while the handler is suspended in emit().
                monkeypatch.setattr(job._output, "room", asyncio.Event().wait)
                monkeypatch.setattr(type(job._output), "full", property(lambda _: True))
                in_emit.set()

    with Provider(every=0.05) as provider:
        gc.disable()
        try:
            async with worker:
                job = await jobs.enqueue(None)
                await until(provider.called.is_set, "the provider is called")
                if where != "stream":
                    await in_emit.wait()
                await asyncio.sleep(0.2)
                await jobs.cancel(job.id)
                await until(provider.left.is_set, "the provider sees its caller leave", 2)
                assert (await _last(jobs.watch(job.id))).type == "cancelled"
        finally:
            gc.enable()


async def test_a_swallowed_cancel_changes_nothing_and_is_no_failure(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[BaseException] = []
    worker = Worker(valkey_url, on_error=lambda error, job: errors.append(error))
    running = asyncio.Event()
    again: list[str] = []

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> str:
        running.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        for act in (lambda: job.emit("x"), lambda: job.progress(1), job.flush, job.heartbeat):
            try:
                await act()
            except asyncio.CancelledError as error:
                again.append(str(error))
        raise ValueError("whatever it ends with")

    jobs = aclient.queue(queue)
    async with worker:
        job = await jobs.enqueue(None)
        await running.wait()
        await jobs.cancel(job.id)
        assert (await _last(jobs.watch(job.id))).type == "cancelled"
    record = await jobs.get(job.id)
    assert record is not None
    assert record.result is None
    assert again == [f"job {job.id!r} was stopped: cancelled"] * 4
    assert not errors
    assert "whatever" not in caplog.text


async def test_a_handler_that_ignores_its_stop_is_named_in_the_log(
    valkey_url: str,
    queue: Queue[Any, Any],
    aclient: AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("outlast_worker.attempt.NAG_AFTER", 0.1)
    worker = Worker(valkey_url)
    running = threading.Event()

    @worker.handles(queue)
    def run(job: SyncJobContext[Any]) -> None:
        running.set()
        time.sleep(0.5)

    jobs = aclient.queue(queue)
    async with worker:
        job = await jobs.enqueue(None)
        await until(running.is_set, "it runs")
        await jobs.cancel(job.id)
        assert (await _last(jobs.watch(job.id))).type == "cancelled"
    assert f"job {job.id!r} of queue {queue.name!r} was stopped (cancelled) 0.1 s ago" in caplog.text


async def test_a_plain_handler_is_told_by_its_signal_and_by_emit(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient
) -> None:
    worker = Worker(valkey_url)
    running = threading.Event()
    told: list[object] = []

    @worker.handles(queue)
    def run(job: SyncJobContext[Any]) -> str:
        job.signal.on_set(lambda: told.append("callback"))
        job.signal.on_set(lambda: 1 / 0)
        running.set()
        told.append(job.signal.wait(10))
        told.append(job.signal.reason)
        job.signal.on_set(lambda: told.append("late"))
        for act in (lambda: job.emit("x"), lambda: job.progress(1), job.flush, job.heartbeat):
            try:
                act()
            except JobStopped as stopped:
                told.append(stopped.reason)
        try:
            job.emit("x")
        except Exception:
            told.append("except Exception must not see it")
        return "unreachable"

    jobs = aclient.queue(queue)
    async with worker:
        job = await jobs.enqueue(None)
        await until(running.is_set, "it runs")
        await jobs.cancel(job.id)
        assert (await _last(jobs.watch(job.id))).type == "cancelled"
    assert told == ["callback", True, "cancelled", "late", *["cancelled"] * 4]
