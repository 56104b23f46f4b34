"""Whenever a viewer comes, and from wherever: everything once, in order, to the end."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest
from tests.conformance.conftest import Hand
from tests.faults.processes import until

import outlast
from outlast import AsyncJobs, Queue
from outlast_worker.gateway import GatewayServer

from .conftest import TOKEN, Viewer


@pytest.mark.parametrize("seed", range(4))
async def test_at_each_cut_point_a_viewer_joins_without_gap_or_repeat(
    jobs: AsyncJobs[Any, Any], hand: Hand, seed: int
) -> None:
    """From the start, behind each event that there is, and from now on; while others have been watching all along."""
    dice = random.Random(seed)
    id = (await jobs.enqueue("x")).id
    first = Viewer(jobs, id)
    job = await asyncio.to_thread(hand.take)
    viewers: list[tuple[str, Viewer]] = []
    written = 0
    for _ in range(25):
        chunks = [f"{written + n}," for n in range(dice.randint(1, 4))]
        await asyncio.to_thread(hand.say, job, *chunks)
        written += len(chunks)
        await asyncio.sleep(dice.choice([0, 0, 0.002, 0.02]))
        known = first.ids
        viewers.append(("", Viewer(jobs, id)))
        if known:
            cursor = dice.choice([known[-1], dice.choice(known)])
            viewers.append((cursor, Viewer(jobs, id, after=cursor)))
        viewers.append(("latest", Viewer(jobs, id, after="latest")))
    await asyncio.to_thread(hand.settle, job)
    async with asyncio.timeout(30):
        await asyncio.gather(first.task, *(viewer.task for _, viewer in viewers))
    assert first.text == "".join(f"{n}," for n in range(written))
    assert [event.type for event in first.events] == ["chunk"] * written + ["completed"]
    for cursor, viewer in viewers:
        begin = 0 if not cursor else len(first.ids) - len(viewer.ids)
        if cursor not in ("", "latest"):
            begin = first.ids.index(cursor) + 1
        assert viewer.events == first.events[begin:], f"joined at {cursor or 'the start'}"


async def test_restarts_reach_who_is_there_and_who_joins(jobs: AsyncJobs[Any, Any], hand: Hand) -> None:
    id = (await jobs.enqueue("x")).id
    viewers = [Viewer(jobs, id)]
    for attempt in (1, 2, 3):
        job = await asyncio.to_thread(hand.take)
        for n in range(5):
            await asyncio.to_thread(hand.say, job, f"{attempt}.{n} ")
            known = viewers[0].ids
            viewers += [Viewer(jobs, id), Viewer(jobs, id, after=known[-1] if known else None)]
        await until(lambda first=viewers[0]: "." in first.text, "the first has seen something")  # type: ignore[misc]
        if attempt < 3:
            await asyncio.to_thread(hand.retry, job)
    await asyncio.to_thread(hand.settle, job)
    async with asyncio.timeout(30):
        await asyncio.gather(*(viewer.task for viewer in viewers))
    whole = "".join(f"3.{n} " for n in range(5))
    for viewer in viewers:
        assert whole.endswith(viewer.text), "nothing of an earlier attempt is left"
        assert viewer.ids == sorted(viewer.ids, key=lambda id: tuple(map(int, id.split("-"))))
        assert viewer.events[-1].type == "completed"
    assert viewers[0].text == whole


@pytest.mark.parametrize("driver", ["tcp", "http"])
def test_threads_join_each_others_reads_without_gap_or_repeat(
    driver: str, valkey_url: str, gateway: GatewayServer, queue: Queue[Any, Any], hand: Hand
) -> None:
    got: dict[tuple[str, int], list[Any]] = {}
    with outlast.Client(valkey_url) if driver == "tcp" else outlast.Client(gateway.url, TOKEN) as client:
        jobs = client.queue(queue)
        ids = [jobs.enqueue(n).id for n in range(4)]
        held = {job.id: job for job in hand.reserve(4)}

        def view(id: str, n: int) -> None:
            got[id, n] = list(jobs.watch(id))

        threads: list[threading.Thread] = []
        dice = random.Random(1)
        for n in range(30):
            id = dice.choice(ids)
            hand.say(held[id], f"{n}", f"-{n}")
            threads.append(threading.Thread(target=view, args=(dice.choice(ids), n)))
            threads[-1].start()
        for job in held.values():
            hand.settle(job)
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert len(got) == 30
        for (id, _), events in got.items():
            assert events == list(jobs.watch(id))
            assert events[-1].type == "completed"
        assert not client._reads._boards[""].streams, "nothing is kept for nobody"


async def test_a_viewer_far_behind_catches_up_while_others_live_at_the_end(
    jobs: AsyncJobs[Any, Any], hand: Hand
) -> None:
    """It pages through what there is by itself and joins where the others are."""
    id = (await jobs.enqueue("x")).id
    job = await asyncio.to_thread(hand.take)
    live = Viewer(jobs, id, after="latest")
    for page in range(6):
        await asyncio.to_thread(hand.say, job, *(f"{page * 300 + n} " for n in range(300)))
    late = [Viewer(jobs, id) for _ in range(3)]
    for n in range(1800, 1850):
        await asyncio.to_thread(hand.say, job, f"{n} ")
    await asyncio.to_thread(hand.settle, job)
    async with asyncio.timeout(30):
        await asyncio.gather(live.task, *(viewer.task for viewer in late))
    whole = "".join(f"{n} " for n in range(1850))
    assert [viewer.text for viewer in late] == [whole] * 3
    assert all("gap" not in {event.type for event in viewer.events} for viewer in late)
    assert whole.endswith(live.text)


async def test_a_reader_who_pauses_costs_no_memory_and_misses_nothing(
    over_tcp: AsyncJobs[Any, Any], hand: Hand
) -> None:
    jobs = over_tcp
    id = (await jobs.enqueue("x")).id
    job = await asyncio.to_thread(hand.take)
    await asyncio.to_thread(hand.say, job, "start ")
    slow = jobs.watch(id)
    seen = [await anext(slow)]
    live = Viewer(jobs, id)
    for n in range(40):
        await asyncio.to_thread(hand.say, job, *(f"{n}.{m} " + "x" * 500 for m in range(20)))
    await until(lambda: len(live.events) == 801, "the others are not held up")
    [board] = next(iter(jobs._client._reads._loops.values())).values()
    assert len(board.streams[live.events[0] and jobs._keys.events(id)].entries) <= 64
    assert board.streams[jobs._keys.events(id)].size <= 65_536
    await asyncio.to_thread(hand.settle, job)
    seen += [event async for event in slow]
    await live.task
    assert seen == live.events
