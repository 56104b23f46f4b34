"""What goes wrong between the viewers and their job: lost connections, frozen servers, viewers that are torn away."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import random
import signal
import threading
import time
import warnings
from typing import Any

import pytest
import redis
from tests.conformance.conftest import Hand
from tests.faults.links import Proxy
from tests.faults.processes import until
from tests.servers import start_valkey

import outlast
from outlast import AsyncClient, AsyncJobs, Queue
from outlast.protocol import Keys
from outlast_worker.gateway import GatewayServer
from outlast_worker.tcp import TcpTransport

from .conftest import TOKEN, Viewer, connections


async def finish(hand: Hand, jobs: list[Any], viewers: list[Viewer]) -> None:
    for job in jobs:
        await asyncio.to_thread(hand.settle, job)
    async with asyncio.timeout(60):
        await asyncio.gather(*(viewer.task for viewer in viewers))


async def test_a_read_whose_connection_is_lost_is_repeated_from_where_it_was(
    over_tcp: AsyncJobs[Any, Any], hand: Hand, raw: redis.Redis
) -> None:
    jobs = over_tcp
    ids = [(await jobs.enqueue(n)).id for n in range(3)]
    held = await asyncio.to_thread(hand.reserve, 3)
    viewers = [Viewer(jobs, id) for id in ids * 4]
    for n in range(40):
        for job in held:
            await asyncio.to_thread(hand.say, job, f"{n} ")
        if n % 4 == 0:
            for id in connections(raw, blocked=True):
                raw.client_kill_filter(_id=id)
    await finish(hand, held, viewers)
    assert {viewer.text for viewer in viewers} == {"".join(f"{n} " for n in range(40))}
    assert {len(viewer.ids) for viewer in viewers} == {41}


async def test_an_outage_of_everything_heals_for_all_viewers(
    valkey_url: str, queue: Queue[Any, Any], hand: Hand
) -> None:
    with Proxy(valkey_url) as proxy:
        async with AsyncClient(proxy.url + "?socket_timeout=0.5") as client:
            jobs = client.queue(queue)
            id = (await jobs.enqueue("x")).id
            job = await asyncio.to_thread(hand.take)
            viewers = [Viewer(jobs, id) for _ in range(20)]
            for n in range(9):
                await asyncio.to_thread(hand.say, job, f"{n} ")
                await asyncio.sleep(0.05)
                if n == 2:
                    await asyncio.to_thread(proxy.cut)
                if n == 5:
                    await asyncio.to_thread(proxy.down)
            await asyncio.sleep(0.3)
            await asyncio.to_thread(proxy.heal)
            await finish(hand, [job], viewers)
            assert {viewer.text for viewer in viewers} == {"0 1 2 3 4 5 6 7 8 "}
            assert {len(viewer.ids) for viewer in viewers} == {10}


async def test_a_frozen_server_holds_viewers_up_and_loses_them_nothing(
    queue: Queue[Any, Any], keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outlast._areads.BLOCK", 0.2)
    with start_valkey() as server:
        url = f"redis://{server.host}:{server.port}"
        hand = Hand(TcpTransport(url), keys)
        raw = redis.Redis.from_url(url)
        pid = raw.info("server")["process_id"]  # type: ignore[index]
        async with AsyncClient(url + "?socket_timeout=0.4") as client:
            jobs = client.queue(queue)
            id = (await jobs.enqueue("x")).id
            job = await asyncio.to_thread(hand.take)
            viewers = [Viewer(jobs, id) for _ in range(20)]
            await asyncio.to_thread(hand.say, job, "before ")
            await until(lambda: all(viewer.events for viewer in viewers), "all have the first")
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(2)
                assert not any(viewer.task.done() for viewer in viewers)
            finally:
                os.kill(pid, signal.SIGCONT)
            await asyncio.to_thread(hand.say, job, "after")
            await finish(hand, [job], viewers)
            assert {viewer.text for viewer in viewers} == {"before after"}
        hand._transport.close()
        raw.close()


async def test_h52_viewers_cancelled_at_random_take_nothing_from_the_others(
    jobs: AsyncJobs[Any, Any], hand: Hand, raw: redis.Redis
) -> None:
    dice = random.Random(52)
    ids = [(await jobs.enqueue(n)).id for n in range(5)]
    held = {job.id: job for job in await asyncio.to_thread(hand.reserve, 5)}
    before = connections(raw)
    steady = [(id, Viewer(jobs, id)) for id in ids * 4]
    written = dict.fromkeys(ids, 0)
    for _ in range(60):
        id = dice.choice(ids)
        passing = [Viewer(jobs, dice.choice(ids), after=dice.choice([None, "latest"])) for _ in range(5)]
        await asyncio.to_thread(hand.say, held[id], f"{written[id]} ")
        written[id] += 1
        await asyncio.sleep(dice.uniform(0, 0.005))
        for viewer in passing:
            viewer.task.cancel()
        for viewer in passing:
            with pytest.raises(asyncio.CancelledError):
                await viewer.task
    await finish(hand, list(held.values()), [viewer for _, viewer in steady])
    for id, viewer in steady:
        assert viewer.text == "".join(f"{n} " for n in range(written[id]))
        assert len(viewer.ids) == written[id] + 1
    if jobs._transport.blocking:
        assert len(connections(raw) - before) <= 4
    await until(lambda: not {"outlast-reads"} & {task.get_name() for task in asyncio.all_tasks()}, "no task is left", 5)


async def test_one_stream_that_cannot_be_read_fails_its_own_viewers_only(
    jobs: AsyncJobs[Any, Any], hand: Hand, raw: redis.Redis
) -> None:
    ids = [(await jobs.enqueue(n)).id for n in range(3)]
    held = {job.id: job for job in await asyncio.to_thread(hand.reserve, 3)}
    viewers = [Viewer(jobs, id) for id in ids]
    for job in held.values():
        await asyncio.to_thread(hand.say, job, "a ")
    await until(lambda: all(viewer.events for viewer in viewers), "all have the first")
    raw.delete(jobs._keys.events(ids[0]))
    raw.set(jobs._keys.events(ids[0]), "a foreign value")
    for id in ids[1:]:
        await asyncio.to_thread(hand.say, held[id], "b ")
    with pytest.raises(outlast.ServerError, match="WRONGTYPE"):
        async with asyncio.timeout(15):
            await viewers[0].task
    await finish(hand, [held[id] for id in ids[1:]], viewers[1:])
    assert [viewer.text for viewer in viewers[1:]] == ["a b "] * 2


def test_h60_one_client_watches_in_many_event_loops(
    valkey_url: str, gateway: GatewayServer, queue: Queue[Any, Any], hand: Hand
) -> None:
    for client in (AsyncClient(valkey_url), AsyncClient(gateway.url, TOKEN)):
        jobs = client.queue(queue)

        async def watch(n: int, jobs: Any = jobs) -> list[str]:
            id = (await jobs.enqueue(n)).id
            viewers = [Viewer(jobs, id) for _ in range(3)]
            await asyncio.sleep(0.02)
            assert await jobs.cancel(id)
            await asyncio.gather(*(viewer.task for viewer in viewers))
            return [event.type for viewer in viewers for event in viewer.events]

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for n in range(10):
                assert asyncio.run(watch(n)) == ["cancelled"] * 3
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                for events in pool.map(lambda n: asyncio.run(watch(n)), range(12)):
                    assert events == ["cancelled"] * 3
        assert len(client._reads._loops) <= 5, "closed loops are forgotten"


def test_h64_a_child_of_a_process_with_viewers_watches_by_itself(
    valkey_url: str, queue: Queue[Any, Any], hand: Hand
) -> None:
    with outlast.Client(valkey_url) as client:
        jobs = client.queue(queue)
        id = jobs.enqueue("x").id
        job = hand.take()
        got: list[list[Any]] = []
        threads = [threading.Thread(target=lambda: got.append(list(jobs.watch(id)))) for _ in range(4)]
        for thread in threads:
            thread.start()
        hand.say(job, "a")
        time.sleep(0.2)
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork under threads is what this is about
            child = os.fork()
        if child == 0:
            try:
                os.write(writing, json.dumps([event.type for event in jobs.watch(id)]).encode())
            finally:
                os._exit(0)
        os.close(writing)
        time.sleep(0.2)
        hand.say(job, "b")
        hand.settle(job)
        with os.fdopen(reading, "rb") as pipe:
            assert json.loads(pipe.read()) == ["chunk", "chunk", "completed"]
        os.waitpid(child, 0)
        for thread in threads:
            thread.join(20)
        assert [[event.type for event in events] for events in got] == [["chunk", "chunk", "completed"]] * 4
