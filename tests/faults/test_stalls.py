"""What a worker does while its database stands still, is full, or is out of its reach."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest
import redis
from tests.faults.links import Provider, Proxy
from tests.faults.processes import until
from tests.faults.servers import full, promote, stalled
from tests.servers import free_port, start_valkey

from outlast import AsyncClient, Client, Queue, RateLimitedError
from outlast_worker import JobContext, SyncJobContext, Worker
from outlast_worker.tcp import AsyncTcpTransport


@pytest.mark.parametrize("connected", [False, True])
async def test_h11_a_job_stops_spending_when_its_lease_runs_out_unrenewed(
    valkey_url: str, queue_name: str, connected: bool
) -> None:
    """Cut off: with the lease. Connected and silent, as everybody else may be: after three leases more."""
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.6)
    with Provider() as provider, Proxy(valkey_url) as proxy, Client(redis_url=valkey_url) as client:
        worker = Worker(proxy.url)
        reasons: list[str | None] = []

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> str:
            if job.attempt > 1:
                return "again"
            try:
                async with httpx.AsyncClient(timeout=60) as http:
                    return (await http.get(provider.url)).text
            finally:
                reasons.append(job.signal.reason)

        jobs = client.queue(queue)
        async with worker:
            job = await asyncio.to_thread(jobs.enqueue, None)
            await until(provider.called.is_set, "the provider is called")
            (proxy.hold if connected else proxy.down)()
            cut = time.monotonic()
            await until(provider.left.is_set, "the provider sees its caller leave", 30)
            lasted = time.monotonic() - cut
            proxy.heal()
            assert await asyncio.to_thread(jobs.wait, job.id, timeout=20) == "again"
    assert reasons == ["lease_lost"]
    # The latest renewal lies up to a quarter of a lease back; a busy machine is late.
    least = 0.6 * (4 if connected else 1)
    assert 0.7 * least < lasted < least + 1.5


def test_h11_a_plain_handler_is_told_too(valkey_url: str, queue_name: str) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.6, max_attempts=1)
    reasons: list[str | None] = []

    async def main() -> None:
        with Proxy(valkey_url) as proxy, Client(redis_url=valkey_url) as client:
            worker = Worker(proxy.url)

            @worker.handles(queue)
            def run(job: SyncJobContext[Any]) -> None:
                proxy.down()
                job.signal.wait(20)
                reasons.append(job.signal.reason)

            async with worker:
                await asyncio.to_thread(client.queue(queue).enqueue, None)
                await until(lambda: reasons, "the handler is told", 30)
                proxy.heal()

    asyncio.run(main())
    assert reasons == ["lease_lost"]


async def test_h12_a_server_that_stands_still_for_longer_than_every_lease_hands_nothing_out_twice(
    queue_name: str,
) -> None:
    """The whole process is stopped, so that new connections are accepted and silent. Idle workers wait to pounce."""
    queue: Queue[Any, Any] = Queue(queue_name, lease=1.0, max_attempts=2)
    starts: list[str] = []
    with start_valkey() as server:
        url = server.connection_url
        busy, *idle = [Worker(url, block=0.2) for _ in range(3)]
        for each in (busy, *idle):

            @each.handles(queue, concurrency=20)
            async def run(job: JobContext[Any]) -> str:
                starts.append(job.id)
                for n in range(20):
                    await job.emit(f"{n},")
                    await asyncio.sleep(0.25)
                return "R"

        async with AsyncClient(redis_url=url) as client:
            jobs = client.queue(queue)
            ids = [(await jobs.enqueue(n)).id for n in range(20)]
            async with busy:
                await until(lambda: len(starts) == 20, "all run")
                async with idle[0], idle[1]:
                    with stalled(server):
                        await asyncio.sleep(3.2)
                    assert [await jobs.wait(id, timeout=30) for id in ids] == ["R"] * 20
    assert sorted(starts) == sorted(ids)


@pytest.mark.parametrize("way", ["hold", "down"])
async def test_h55_a_finished_result_is_kept_for_as_long_as_nobody_else_takes_the_job(
    valkey_url: str, queue_name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three leases and more without a database, the handler at its end: nothing is spent, so nothing is given up."""
    # A call gives up long before the outage ends; what it was for does not.
    monkeypatch.setattr("outlast_worker.engine.AsyncTcpTransport", partial(AsyncTcpTransport, timeout=1.0))
    queue: Queue[Any, Any] = Queue(queue_name, lease=1.0)
    starts: list[int] = []
    with Proxy(valkey_url) as proxy, Client(redis_url=valkey_url) as client:
        worker = Worker(proxy.url)

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> str:
            starts.append(job.starts)
            await job.emit("text")
            await job.flush()
            getattr(proxy, way)()
            return "R"

        jobs = client.queue(queue)
        async with worker:
            job = await asyncio.to_thread(jobs.enqueue, None)
            await until(lambda: starts, "it runs")
            await asyncio.sleep(3.5)
            assert jobs.get(job.id).status == "active"  # type: ignore[union-attr]
            proxy.heal()
            assert await asyncio.to_thread(jobs.wait, job.id, timeout=20) == "R"
            events = await asyncio.to_thread(lambda: [event.type for event in jobs.watch(job.id)])
    assert starts == [1]
    assert events == ["chunk", "completed"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outlast_worker.output.PATIENCE", 0.3)
    monkeypatch.setattr("outlast_worker.steps.PATIENCE", 0.3)
    monkeypatch.setattr("outlast_worker.engine.FULL_PAUSE", 0.2)


async def _step(job: JobContext[Any]) -> None:
    await job.step("paid", lambda: "x")


async def _text(job: JobContext[Any]) -> None:
    await job.emit("x")
    await job.flush()


async def _wrapped(job: JobContext[Any]) -> None:
    try:
        await _text(job)
    except Exception as error:
        raise ValueError("as handlers do") from error


@pytest.mark.parametrize("write", [_step, _text, _wrapped])
async def test_h49_a_full_database_burns_no_attempts_and_starts_nothing_that_could_not_be_shown(
    queue_name: str, impatient: None, write: Callable[[JobContext[Any]], Any]
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=5, max_attempts=1)
    attempts: list[tuple[int, int]] = []
    with start_valkey() as server:
        url = server.connection_url
        worker = Worker(url)
        began, go = asyncio.Event(), asyncio.Event()

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> str:
            attempts.append((job.attempt, job.starts))
            began.set()
            await go.wait()
            await write(job)
            return "R"

        async with AsyncClient(redis_url=url) as client, worker:
            jobs = client.queue(queue)
            job, second = await jobs.enqueue(1), await jobs.enqueue(2)
            await began.wait()
            with full(server.port):
                go.set()

                async def handed_back() -> bool:
                    return (await jobs.stats()).waiting == 2

                await until(handed_back, "the job is handed back")
                await asyncio.sleep(1)  # five looks for memory
                assert attempts == [(1, 1)]
            assert [await jobs.wait(each.id, timeout=20) for each in (job, second)] == ["R", "R"]
    assert attempts == [(1, 1), (1, 2), (1, 1)]


async def test_h49_text_waits_for_memory_and_none_is_lost(queue_name: str) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=2)
    with start_valkey() as server:
        worker = Worker(server.connection_url)
        filled, go = asyncio.Event(), asyncio.Event()

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> str:
            for n in range(100):
                if n == 50:
                    filled.set()
                    await go.wait()
                await job.emit(f"{n},")
                await asyncio.sleep(0.02)
            return "R"

        async with AsyncClient(redis_url=server.connection_url) as client, worker:
            jobs = client.queue(queue)
            job = await jobs.enqueue(None)
            await filled.wait()
            with full(server.port):
                go.set()
                await asyncio.sleep(3)  # the handler ends, and the lease is renewed all the same
                assert (await jobs.get(job.id)).status == "active"  # type: ignore[union-attr]
            events = [event async for event in jobs.watch(job.id)]
    assert "".join(event.data for event in events if event.type == "chunk") == "".join(f"{n}," for n in range(100))
    assert [event.type for event in events if event.type != "chunk"] == ["completed"]
    assert events[-1].attempt == 1


async def test_a_worker_that_starts_while_the_database_is_full_stops_in_time(queue_name: str) -> None:
    with start_valkey() as server, full(server.port):
        worker = Worker(server.connection_url)
        worker.handles(Queue(queue_name))(_text)
        async with worker:
            await asyncio.sleep(0.3)
            began = time.monotonic()
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("write", [_step, _text])
async def test_h47_h50_what_a_server_is_not_ready_to_write_is_written_once_it_is(
    queue_name: str, monkeypatch: pytest.MonkeyPatch, write: Callable[[JobContext[Any]], Any]
) -> None:
    """Read-only in the middle of a failover, or loading its data, for longer than one call takes with its repeats."""
    monkeypatch.setitem(AsyncTcpTransport.__init__.__kwdefaults__, "timeout", 0.3)  # type: ignore[index]
    queue: Queue[Any, Any] = Queue(queue_name, lease=5, max_attempts=1)
    with start_valkey() as server, redis.Redis(port=server.port) as raw:
        worker = Worker(server.connection_url)
        began, go = asyncio.Event(), asyncio.Event()

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> str:
            began.set()
            await go.wait()
            await write(job)
            return "R"

        async with AsyncClient(redis_url=server.connection_url) as client, worker:
            jobs = client.queue(queue)
            job = await jobs.enqueue(None)
            await began.wait()
            raw.replicaof("127.0.0.1", free_port())
            go.set()
            await asyncio.sleep(1.5)
            promote(server)
            events = [event.type async for event in jobs.watch(job.id)]
    assert events == (["chunk", "completed"] if write is _text else ["completed"])


async def test_a_handler_that_has_ended_is_not_said_to_run_on(
    valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its settle waits for the database, and meanwhile the job is taken by another."""
    monkeypatch.setattr("outlast_worker.attempt.NAG_AFTER", 0.2)
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.6)
    with Proxy(valkey_url) as proxy, Client(redis_url=valkey_url) as client:
        first, second = Worker(proxy.url), Worker(valkey_url, block=0.2)

        @first.handles(queue)
        async def run(job: JobContext[Any]) -> str:
            proxy.hold()
            return "FIRST"

        @second.handles(queue)
        async def other(job: JobContext[Any]) -> str:
            return "SECOND"

        jobs = client.queue(queue)
        async with first:
            job = await asyncio.to_thread(jobs.enqueue, None)
            async with second:
                assert await asyncio.to_thread(jobs.wait, job.id, timeout=20) == "SECOND"
            proxy.heal()
            await until(lambda: "its result is dropped" in caplog.text, "the first worker learns of it")
            await asyncio.sleep(0.5)
    assert "its handler still runs" not in caplog.text


@pytest.mark.parametrize("words", [80, 8])
async def test_text_of_a_worker_that_stops_is_whole_after_an_outage_longer_than_the_lease(
    valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch, words: int
) -> None:
    """Whether the handler still runs then (80 words), or has ended with text unwritten (8): no gap, no tail cut off.

    One that still runs goes on. Of one that has ended, text and result are given up together, for another to make.
    """
    monkeypatch.setitem(AsyncTcpTransport.__init__.__kwdefaults__, "timeout", 0.3)  # type: ignore[index]
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.8)
    whole = "".join(f"{n}," for n in range(words))
    with Proxy(valkey_url) as proxy, Client(redis_url=valkey_url) as client:
        first, second = Worker(proxy.url), Worker(valkey_url, block=0.2)
        started = asyncio.Event()

        async def run(job: JobContext[Any]) -> str:
            for n in range(words):
                await job.emit(f"{n},")
                await asyncio.sleep(0.03)
                if n == 5:
                    started.set()
            return whole

        first.handles(queue)(run)
        second.handles(queue)(run)
        jobs = client.queue(queue)
        async with first:
            job = await asyncio.to_thread(jobs.enqueue, None)
            await started.wait()
            first.stop()
            proxy.hold()
            await asyncio.sleep(1.6)
            proxy.heal()
        async with second:
            events = await asyncio.to_thread(lambda: list(jobs.watch(job.id)))
    text = ""
    for event in events:
        assert event.type != "gap"
        text = "" if event.type == "restarted" else text + (event.data if event.type == "chunk" else "")
    assert (events[-1].type, text) == ("completed", whole)
    if words == 80:
        assert events[-1].attempt == 1


@pytest.mark.parametrize("end", ["retried", "handed back"])
async def test_a_cancel_during_an_outage_ends_the_text_without_a_gap(
    valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Its last text never arrives, and the attempt ends: who watches keeps what there is, up to the cancel."""
    monkeypatch.setitem(AsyncTcpTransport.__init__.__kwdefaults__, "timeout", 0.3)  # type: ignore[index]
    queue: Queue[Any, Any] = Queue(queue_name, lease=30)
    with Proxy(valkey_url) as proxy, Client(redis_url=valkey_url) as client:
        worker = Worker(proxy.url, emit_interval=0.01)
        cut_off = asyncio.Event()

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> str:
            await job.emit("whole")
            await job.flush()
            proxy.down()
            await job.emit("lost")
            await asyncio.sleep(0.05)
            cut_off.set()
            if end == "retried":
                raise ConnectionError("the provider hung up")
            raise RateLimitedError("later", retry_after=5)

        jobs = client.queue(queue)
        async with worker:
            job = await asyncio.to_thread(jobs.enqueue, None)
            await cut_off.wait()
            assert await asyncio.to_thread(jobs.cancel, job.id)
            await asyncio.sleep(1.5)
            proxy.heal()
            events = await asyncio.to_thread(lambda: list(jobs.watch(job.id)))
    assert [event.type for event in events] == ["chunk", "cancelled"]
