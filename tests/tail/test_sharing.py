"""How little it takes: connections, requests, commands."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from tests.conformance.conftest import Hand
from tests.faults.processes import until
from tests.servers import start_cluster

import outlast
from outlast import AsyncClient, AsyncJobs, Queue
from outlast.protocol import Keys
from outlast_worker.gateway import GatewayServer
from outlast_worker.tcp import TcpTransport

from .conftest import TOKEN, Viewer, connections


async def test_300_viewers_of_30_jobs_take_three_connections(
    over_tcp: AsyncJobs[Any, Any], raw: redis.Redis, valkey_url: str, keys: Keys
) -> None:
    jobs = over_tcp
    hand = Hand(TcpTransport(valkey_url), keys)
    made = [(await jobs.enqueue(n)).id for n in range(30)]
    held = {job.id: job for job in hand.reserve(30)}
    before = connections(raw)
    viewers: list[Viewer] = []
    most = 0
    for n in range(300):
        viewers.append(Viewer(jobs, made[n % 30]))
        if n % 10 == 0:
            await asyncio.sleep(0.01)
            most = max(most, len(connections(raw) - before))
    for n in range(10):
        for job in held.values():
            hand.say(job, f"{n} ")
        await until(lambda n=n: all(len(v.events) == n + 1 for v in viewers), "all have it")  # type: ignore[misc]
        most = max(most, len(connections(raw) - before))
    assert len(connections(raw, blocked=True)) == 1
    assert most <= 3, "one for calls, one that waits, one while a new stream is taken in"
    for job in held.values():
        hand.settle(job)
    await asyncio.gather(*(viewer.task for viewer in viewers))
    assert {viewer.text for viewer in viewers} == {"".join(f"{n} " for n in range(10))}
    hand._transport.close()


async def test_a_new_viewer_does_not_wait_for_the_read_under_way(
    over_tcp: AsyncJobs[Any, Any], hand: Hand, raw: redis.Redis
) -> None:
    """It lasts 10 s when nothing is said; the newcomer's first event comes at once all the same."""
    jobs = over_tcp
    quiet = Viewer(jobs, (await jobs.enqueue("quiet")).id)
    await asyncio.to_thread(hand.take)
    await until(lambda: len(connections(raw, blocked=True)) == 1, "the read is under way")
    id = (await jobs.enqueue("x")).id
    job = await asyncio.to_thread(hand.take)
    viewer = Viewer(jobs, id)
    await asyncio.sleep(0.3)
    begin = time.monotonic()
    await asyncio.to_thread(hand.say, job, "a")
    await until(lambda: len(viewer.events) == 1, "the newcomer has it", 5)
    assert viewer.at[0] - begin < 1
    for task in (viewer.task, quiet.task):
        task.cancel()


async def test_the_last_viewer_closes_the_read_behind_him(
    over_tcp: AsyncJobs[Any, Any], raw: redis.Redis, hand: Hand
) -> None:
    jobs = over_tcp
    viewers = [Viewer(jobs, (await jobs.enqueue(n)).id) for n in range(3)]
    await until(lambda: len(connections(raw, blocked=True)) == 1, "they wait on one read")
    for viewer in viewers:
        viewer.task.cancel()
    await until(lambda: not connections(raw, blocked=True), "the read is over", 5)
    await until(lambda: "outlast-reads" not in {task.get_name() for task in asyncio.all_tasks()}, "so is its task", 5)
    id = (await jobs.enqueue("again")).id
    again = Viewer(jobs, id)
    await until(lambda: len(connections(raw, blocked=True)) == 1, "a later viewer has a new one")
    assert await jobs.cancel(id)
    await again.task
    assert [event.type for event in again.events] == ["cancelled"]


async def test_without_the_right_to_end_a_read_its_connection_is_replaced(
    valkey_url: str, raw: redis.Redis, queue: Queue[Any, Any], hand: Hand
) -> None:
    name = f"user-of-{queue.name}"
    raw.acl_setuser(name, enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-client|unblock"])
    async with AsyncClient(valkey_url.replace("//", f"//{name}:pw@")) as client:
        jobs = client.queue(queue)
        before = connections(raw)
        viewers = []
        for n in range(5):
            viewers.append(Viewer(jobs, (await jobs.enqueue(n)).id))
            await asyncio.sleep(0.05)
        for job in await asyncio.to_thread(hand.reserve, 5):
            await asyncio.to_thread(hand.say, job, "a")
        await until(lambda: all(viewer.events for viewer in viewers), "everybody has something", 5)
        assert len(connections(raw) - before) <= 3
        for viewer in viewers:
            viewer.task.cancel()
    raw.acl_deluser(name)


def xreads(raw: redis.Redis) -> int:
    calls: int = raw.info("commandstats").get("cmdstat_xread", {}).get("calls", 0)  # type: ignore[union-attr]
    return calls


async def test_over_http_one_request_asks_for_all(
    gateway: GatewayServer, queue: Queue[Any, Any], raw: redis.Redis, hand: Hand
) -> None:
    """Six viewers of six quiet jobs ask as often as one of them would: each request names all the streams."""
    async with AsyncClient(gateway.url, TOKEN) as client:
        jobs = client.queue(queue)
        ids = [(await jobs.enqueue(n)).id for n in range(6)]
        held = await asyncio.to_thread(hand.reserve, 6)
        viewers = [Viewer(jobs, id, poll=0.2) for id in ids]
        await asyncio.sleep(0.5)
        before = xreads(raw)
        await asyncio.sleep(2)
        asked = xreads(raw) - before
        assert 4 <= asked <= 15, "10 reads of one viewer, not 60 of six"
        for job in held:
            await asyncio.to_thread(hand.say, job, "a")
            await asyncio.to_thread(hand.settle, job)
        await asyncio.gather(*(viewer.task for viewer in viewers))
        assert [viewer.text for viewer in viewers] == ["a"] * 6


async def test_over_http_the_smallest_interval_is_everybodys(
    gateway: GatewayServer, queue: Queue[Any, Any], hand: Hand
) -> None:
    async with AsyncClient(gateway.url, TOKEN) as client:
        jobs = client.queue(queue)
        ids = [(await jobs.enqueue(n)).id for n in range(2)]
        held = {job.id: job for job in await asyncio.to_thread(hand.reserve, 2)}
        patient, hasty = Viewer(jobs, ids[0], poll=20), Viewer(jobs, ids[1], poll=0.1)
        await asyncio.to_thread(hand.say, held[ids[0]], "a")
        await until(lambda: bool(patient.events), "the patient one is taken along", 10)
        for viewer in (patient, hasty):
            viewer.task.cancel()


def test_threads_share_a_read_too(valkey_url: str, queue: Queue[Any, Any], raw: redis.Redis, hand: Hand) -> None:
    """What a newcomer takes of his own is given up within a second."""
    with outlast.Client(valkey_url) as client:
        jobs = client.queue(queue)
        ids = [jobs.enqueue(n).id for n in range(12)]
        held = hand.reserve(12)
        got: list[list[Any]] = []
        threads = [threading.Thread(target=lambda id=id: got.append(list(jobs.watch(id)))) for id in ids]  # type: ignore[misc]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 20
        while time.monotonic() < end and len(connections(raw, blocked=True)) != 1:
            for job in held:
                hand.say(job, "a")
            time.sleep(0.3)
        assert len(connections(raw, blocked=True)) <= 2
        for job in held:
            hand.settle(job)
        for thread in threads:
            thread.join(30)
        assert len(got) == 12
        assert len({"".join(e.type for e in events) for events in got}) == 1


def test_threads_share_requests_too(
    gateway: GatewayServer, queue: Queue[Any, Any], raw: redis.Redis, hand: Hand
) -> None:
    with outlast.Client(gateway.url, TOKEN) as client:
        jobs = client.queue(queue)
        ids = [jobs.enqueue(n).id for n in range(6)]
        held = hand.reserve(6)
        got: list[list[Any]] = []

        def view(id: str) -> None:
            got.append(list(jobs.watch(id, poll=0.2)))

        threads = [threading.Thread(target=view, args=(id,)) for id in ids]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        before = xreads(raw)
        time.sleep(2)
        assert 4 <= xreads(raw) - before <= 20, "10 reads of one viewer, not 60 of six"
        for job in held:
            hand.settle(job)
        for thread in threads:
            thread.join(30)
        assert [[event.type for event in events] for events in got] == [["completed"]] * 6


@pytest.mark.parametrize("scheme", ["redis+cluster", "redis"])
async def test_on_a_cluster_the_jobs_of_each_queue_share_a_read(cluster: list[str], scheme: str) -> None:
    """A command may name the keys of one slot only, whether the address says that this is a cluster or not."""
    url = f"{scheme}://{cluster[0]}"
    async with AsyncClient(url) as client:
        hands, viewers = [], []
        for name in (f"{scheme}-{n}" for n in range(4)):
            jobs = client.queue(Queue[Any, Any](name))
            viewers += [Viewer(jobs, (await jobs.enqueue(n)).id) for n in range(3)]
            hands.append(Hand(TcpTransport(url), Keys(name)))
        for hand in hands:
            for job in await asyncio.to_thread(hand.reserve, 3):
                await asyncio.to_thread(hand.say, job, "a ")
                await asyncio.to_thread(hand.say, job, "b ")
                await asyncio.to_thread(hand.settle, job)
            hand._transport.close()
        async with asyncio.timeout(20):
            await asyncio.gather(*(viewer.task for viewer in viewers))
        assert {viewer.text for viewer in viewers} == {"a b "}
        assert all([e.type for e in viewer.events] == ["chunk", "chunk", "completed"] for viewer in viewers)


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[str]]:
    with start_cluster() as addresses:
        yield addresses
