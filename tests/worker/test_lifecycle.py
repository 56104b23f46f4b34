"""Starting, stopping, signals, embedding, and what is refused before anything starts."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import redis
from tests.faults.links import Canned, Proxy
from tests.faults.processes import ROOT, Process, until
from tests.servers import start_valkey

from outlast import AsyncClient, AuthError, ConfigurationError, InvalidArgumentError, Queue, TransportError
from outlast.protocol import Keys
from outlast_worker import JobContext, SyncJobContext, Worker

from .conftest import sleeper


async def noop(job: JobContext[Any]) -> None: ...


# -- signals -----------------------------------------------------------------------------------------------------------


async def test_h62_one_signal_lets_jobs_finish(queue_name: str, aclient: AsyncClient, spawn: Any) -> None:
    jobs = aclient.queue(Queue(queue_name))
    process: Process = spawn("sleep", seconds=0.8, concurrency=2)
    running = [await jobs.enqueue(None) for _ in range(2)]
    await process.wait_for("start", 2)
    process.signal(signal.SIGTERM)
    await asyncio.sleep(0.1)
    later = await jobs.enqueue(None)
    assert await process.exit_code() == 0
    for job in running:
        record = await jobs.get(job.id)
        assert record is not None
        assert (record.status, record.attempt) == ("completed", 1)
    record = await jobs.get(later.id)
    assert record is not None
    assert record.status == "waiting"


async def test_h66_a_worker_that_stops_says_so_while_its_jobs_finish(
    valkey_url: str, queue_name: str, keys: Keys, raw: redis.Redis, aclient: AsyncClient
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)
    worker, running, go = Worker(valkey_url), asyncio.Event(), asyncio.Event()

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> None:
        running.set()
        await go.wait()

    def states() -> list[str]:
        return [json.loads(text)["state"] for text in raw.hvals(keys.workers)]

    async with worker:
        await aclient.queue(queue).enqueue(None)
        await running.wait()
        await until(lambda: states() == ["running"], "it is listed")
        worker.stop()
        await until(lambda: states() == ["stopping"], "it is listed as stopping")
        go.set()
    assert states() == []


@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM)])
async def test_h62_the_second_signal_hands_jobs_back(
    valkey_url: str, queue_name: str, aclient: AsyncClient, spawn: Any, signals: tuple[int, int]
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)
    jobs = aclient.queue(queue)
    process: Process = spawn("sleep", seconds=60, concurrency=2, queue={"lease": 60})
    running = [await jobs.enqueue(None) for _ in range(2)]
    await process.wait_for("start", 2)
    starts: list[tuple[float, int]] = []
    async with sleeper(valkey_url, queue, starts, block=60):
        process.signal(signals[0])
        await asyncio.sleep(0.2)
        assert process.popen.poll() is None
        handed_back = time.time()
        process.signal(signals[1])
        assert await process.exit_code(5) == 1
        assert time.time() - handed_back < 2.5
        for job in running:
            assert await jobs.wait(job.id, timeout=10) == "slept"
            record = await jobs.get(job.id)
            assert record is not None
            assert (record.attempt, record.starts, record.cancel_requested) == (1, 2, False)
    assert {line["reason"] for line in process.said("cancelled")} == {"shutdown"}
    assert max(at for at, _ in starts) - handed_back < 1.5


async def test_h62_a_signal_right_after_the_start_or_without_a_database(spawn: Any) -> None:
    with Canned() as gone:
        dead = gone.url
    for url in ({}, {"url": dead}):
        process: Process = spawn("sleep", **url)
        await process.wait_for("up")  # run() is next
        await asyncio.sleep(0.05)
        began = time.monotonic()
        process.signal(signal.SIGTERM)
        assert await process.exit_code() in (0, -signal.SIGTERM)
        assert time.monotonic() - began < 5


async def test_the_grace_ends_in_a_hand_back(queue_name: str, aclient: AsyncClient, spawn: Any) -> None:
    jobs = aclient.queue(Queue(queue_name))
    process: Process = spawn("sleep", seconds=60, worker={"grace": 0.3})
    job = await jobs.enqueue(None)
    await process.wait_for("start")
    process.signal(signal.SIGTERM)
    assert await process.exit_code(5) == 1
    record = await jobs.get(job.id)
    assert record is not None
    assert (record.status, record.attempt, record.starts) == ("waiting", 0, 1)


async def test_a_handler_that_ignores_its_stop_does_not_hold_the_process(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    script = f"""
import os, signal, threading, time
from outlast import Queue
from outlast_worker import SyncJobContext, Worker
worker = Worker({valkey_url!r})
@worker.handles(Queue({queue_name!r}))
def run(job: SyncJobContext) -> None:
    print("start", flush=True)
    time.sleep(60)
worker.run()
"""
    jobs = aclient.queue(Queue(queue_name))
    job = await jobs.enqueue(None)
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"start\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert await asyncio.to_thread(process.wait, 10) == 1
        assert time.monotonic() - began < 4
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    record = await jobs.get(job.id)
    assert record is not None
    assert record.status == "waiting"


def test_h63_run_puts_the_signal_handlers_back(valkey_url: str, queue_name: str) -> None:
    worker = Worker(valkey_url)
    worker.handles(Queue(queue_name))(noop)
    mine = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        worker.run(burst=True)
        assert {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)} == before
        threading.Timer(0.2, worker.stop).start()
        worker.run()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        worker.run()
    finally:
        signal.signal(signal.SIGTERM, mine)


# -- stopping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("polling", [False, True])
async def test_h63_an_idle_worker_stops_quickly(queue_name: str, polling: bool) -> None:
    with start_valkey() as server, redis.Redis(port=server.port) as raw:
        if polling:
            raw.execute_command("ACL", "SETUSER", "default", "-blpop")
        worker = Worker(server.connection_url, poll=30)
        worker.handles(Queue(queue_name))(noop)
        before = len(raw.client_list())
        for how in ("stop", "cancel"):
            task = asyncio.create_task(worker.serve())
            await asyncio.sleep(0.3)
            began = time.monotonic()
            if how == "stop":
                worker.stop()
                await task
            else:
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert time.monotonic() - began < 2
            await until(lambda: len(raw.client_list()) <= before, "its connections are closed")
            assert raw.hlen(Keys(queue_name).workers) == 0


async def test_h63_many_rounds_leave_nothing(valkey_url: str, queue_name: str, aclient: AsyncClient) -> None:
    jobs = aclient.queue(Queue(queue_name))
    await jobs.stats()
    worker = Worker(valkey_url, block=5)
    done: list[str] = []

    @worker.handles(Queue(queue_name), concurrency=3)
    async def run(job: JobContext[Any]) -> None:
        done.append(job.id)

    descriptors = tasks = threads = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for round in range(200):
            if round == 5:
                gc.collect()
                descriptors, tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
                threads = threading.active_count()
            if round % 2:
                await jobs.enqueue(round)
            async with worker:
                if round % 3 == 0:
                    await asyncio.sleep(random_pause(round))
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert len(asyncio.all_tasks()) <= tasks
    assert threading.active_count() <= threads
    # What was taken has run, what was not is waiting still: nothing was taken and dropped.
    stats = await jobs.stats()
    assert stats.active == 0
    assert stats.waiting + len(done) == 100


def random_pause(round: int) -> float:
    return (round * 7919 % 13) / 2000


async def test_h63_a_doorbell_that_a_stopping_worker_heard_is_passed_on(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=60)
    jobs = aclient.queue(queue)
    starts: list[tuple[float, int]] = []
    for _ in range(5):
        # The one that stops has waited for longer, so the doorbell is his.
        async with sleeper(valkey_url, queue, starts) as stopping, sleeper(valkey_url, queue, starts):
            await asyncio.sleep(0.1)
            job = asyncio.ensure_future(jobs.enqueue(None))
            await asyncio.sleep(0)
            stopping.stop()
            assert await jobs.wait((await job).id, timeout=5) == "slept"


@pytest.mark.parametrize("stopping", [False, True])
async def test_cancelling_serve_hands_the_running_job_back(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient, stopping: bool
) -> None:
    jobs = aclient.queue(queue)
    worker = Worker(valkey_url)
    running = asyncio.Event()

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> None:
        await job.emit("partial")
        running.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(worker.serve())
    job = await jobs.enqueue(None)
    await asyncio.wait_for(running.wait(), 5)
    if stopping:
        worker.stop()
        await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    record = await jobs.get(job.id)
    assert record is not None
    assert (record.status, record.attempt, record.starts) == ("waiting", 0, 1)


async def test_a_retry_by_a_worker_that_stops_rings_for_the_others(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, backoff=0.3, max_backoff=0.3)
    jobs = aclient.queue(queue)
    stopping, other = Worker(valkey_url), Worker(valkey_url)
    running, stopped = asyncio.Event(), asyncio.Event()

    @stopping.handles(queue)
    async def run(job: JobContext[Any]) -> None:
        running.set()
        await stopped.wait()
        raise ValueError

    @other.handles(queue)
    async def again(job: JobContext[Any]) -> int:
        return job.attempt

    async with stopping:
        job = await jobs.enqueue(None)
        await running.wait()
        async with other:
            await asyncio.sleep(0.1)
            stopping.stop()
            await asyncio.sleep(0.1)
            stopped.set()
            began = time.monotonic()
            assert await jobs.wait(job.id, timeout=10) == 2
            assert time.monotonic() - began < 2


async def test_a_finished_result_outlives_a_short_outage_at_the_stop(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=20)
    jobs = aclient.queue(queue)
    with Proxy(valkey_url) as proxy:
        worker = Worker(proxy.url)

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> str:
            proxy.down()
            worker.stop()
            return "paid for"

        async with AsyncClient(redis_url=valkey_url) as client:
            async with worker:
                job = await client.queue(queue).enqueue(None)
                await until(lambda: proxy._down, "the link goes down")
                await asyncio.sleep(0.3)
                proxy.heal()
            assert await jobs.wait(job.id, timeout=5) == "paid for"


# -- starting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["password", "tls"])
async def test_h51_what_waiting_cannot_mend_ends_the_worker_at_once(queue_name: str, fault: str) -> None:
    with start_valkey() as server, redis.Redis(port=server.port) as raw:
        url = f"redis://:wr0ng@127.0.0.1:{server.port}"
        if fault == "password":
            raw.config_set("requirepass", "right")
        else:
            url = url.replace("redis:", "rediss:")
        worker = Worker(url)
        worker.handles(Queue(queue_name))(noop)
        began = time.monotonic()
        with pytest.raises((AuthError, TransportError)) as caught:
            await worker.serve()
        if fault == "password":
            with pytest.raises(AuthError):
                async with worker:
                    pass
    assert time.monotonic() - began < 6
    assert ("refused user or password" if fault == "password" else "does not speak TLS") in str(caught.value)
    assert "wr0ng" not in str(caught.value)


async def test_h51_a_database_that_comes_later_is_waited_for(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = aclient.queue(queue)
    with Proxy(valkey_url) as proxy:
        proxy.down()
        worker = Worker(proxy.url)

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> str:
            return "R"

        async with worker:
            job = await jobs.enqueue(None)
            await asyncio.sleep(0.5)
            proxy.heal()
            assert await jobs.wait(job.id, timeout=15) == "R"
    assert caplog.text.count("trouble with the database") == 1


async def test_an_idle_worker_survives_a_cut(valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient) -> None:
    jobs = aclient.queue(queue)
    with Proxy(valkey_url) as proxy:
        worker = Worker(proxy.url)

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> str:
            return "R"

        async with worker:
            for _ in range(3):
                assert await jobs.wait((await jobs.enqueue(None)).id, timeout=10) == "R"
                proxy.cut()


async def test_the_environment_is_read_at_the_start_and_not_before(
    valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OUTLAST_REDIS_URL", "REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    worker = Worker()
    with pytest.raises(ConfigurationError, match="no handlers"):
        await worker.serve()
    worker.handles(Queue(queue_name))(noop)
    with pytest.raises(ConfigurationError, match="OUTLAST_REDIS_URL"):
        await worker.serve()
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")
    monkeypatch.setenv("OUTLAST_REDIS_URL", valkey_url)
    async with worker:
        with pytest.raises(ConfigurationError, match="running already"):
            await worker.serve()
    assert "redis" not in repr(worker)


# -- refused when declared ---------------------------------------------------------------------------------------------


async def generator(job: JobContext[Any]) -> AsyncIterator[str]:
    yield ""


def plain_generator(job: SyncJobContext[Any]) -> Iterator[str]:
    yield ""


async def two(job: JobContext[Any], more: int) -> None: ...


async def none() -> None: ...


async def wrong_async(job: SyncJobContext[Any]) -> None: ...


def wrong_plain(job: JobContext[Any]) -> None: ...


class Handler:
    async def __call__(self, job: JobContext[Any]) -> None: ...


@pytest.mark.parametrize(
    "handler", [generator, plain_generator, two, none, wrong_async, wrong_plain, Handler, None, "x"]
)
def test_what_cannot_be_a_handler_is_refused_when_decorated(handler: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="handler"):
        Worker().handles(Queue("q"))(handler)


def test_what_can_be_a_handler() -> None:
    def untyped(job, more=1): ...  # type: ignore[no-untyped-def]

    for handler in (noop, Handler(), functools.partial(two, more=1), untyped, lambda job: None):
        worker = Worker()
        assert worker.handles(Queue("q"))(handler) is handler
    with pytest.raises(InvalidArgumentError, match="'q' has a handler already"):
        worker.handles(Queue("q"))(noop)
    with pytest.raises(InvalidArgumentError, match="give a Queue"):
        worker.handles("q")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"queue is str; give a Queue, as in Queue\('name'\)"):
        worker.schedule("q", 1, name="s", at=datetime.now(UTC))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": 0},
        {"concurrency": True},
        {"concurrency": 1.5},
        {"lease": 0},
        {"lease": -1},
        {"lease": 2, "heartbeat": 1.5},
        {"heartbeat": 40},
        {"poll": 0},
        {"poll": "1"},
        {"block": float("inf")},
        {"grace": -1},
        {"emit_interval": -0.1},
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(reversed(options))):
        Worker(**options).handles(Queue("q"))(noop)


async def test_the_end_of_a_job_costs_a_stopping_worker_no_more_when_thousands_still_run(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    used: dict[int, float] = {}
    for count in (50, 3_000):
        queue: Queue[Any, Any] = Queue(f"{queue_name}-{count}")
        gates, running = [asyncio.Event() for _ in range(21)], itertools.count()
        started = asyncio.Semaphore(0)
        worker = Worker(valkey_url, concurrency=count)

        async def run(job: JobContext[Any], gates: Any = gates, running: Any = running, started: Any = started) -> None:
            number = next(running)
            started.release()
            await gates[min(number, 20)].wait()

        worker.handles(queue, concurrency=count)(run)
        await aclient.queue(queue).enqueue_many([None] * count)
        serving = asyncio.create_task(worker.serve())
        for _ in range(count):
            await started.acquire()
        worker.stop()
        await asyncio.sleep(0.2)
        before = time.process_time()
        for gate in gates[:20]:
            gate.set()
            await asyncio.sleep(0.01)
        used[count] = time.process_time() - before
        gates[20].set()
        await serving
    assert used[3_000] < 3 * used[50]
