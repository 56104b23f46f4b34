"""What a handler emits arrives: once, in order, joined but never torn."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import redis
from tests.faults.links import Proxy
from tests.faults.processes import until
from tests.servers import start_valkey

from outlast import AsyncClient, Queue, StoreFullError
from outlast.protocol import Keys
from outlast_worker import JobContext, SyncJobContext, Worker


def entries(raw: redis.Redis, keys: Keys, id: str) -> list[tuple[str, str]]:
    """Kind and text of what the stream holds."""
    found: Any = raw.xrange(keys.events(id))
    return [(fields[b"t"].decode(), fields[b"d"].decode()) for _, fields in found]


async def test_the_first_text_goes_out_at_once_and_the_rest_is_joined(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient, raw: redis.Redis, keys: Keys
) -> None:
    worker = Worker(valkey_url, emit_interval=0.2)
    first = asyncio.Event()

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> None:
        await job.emit("first ")
        await first.wait()
        for n in range(10):
            await job.emit(f"{n} ")
            await asyncio.sleep(0)

    jobs = aclient.queue(queue)
    async with worker:
        job = await jobs.enqueue(None)
        began = time.monotonic()
        await until(lambda: raw.xlen(keys.events(job.id)) == 1, "the first text is written before more comes")
        assert time.monotonic() - began < 2
        first.set()
        await jobs.wait(job.id, timeout=10)
    assert entries(raw, keys, job.id) == [
        ("chunk", "first "),
        ("chunk", "0 1 2 3 4 5 6 7 8 9 "),
        ("completed", "null"),
    ]


async def test_h33_h42_blanks_empty_texts_json_and_progress_arrive_as_they_were(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient
) -> None:
    worker = Worker(valkey_url)
    texts = ["", " ", " hello", "hello ", "\t", *[f" t{n}" for n in range(200)], "\n", "\r\n", "data: x", "\u2028"]

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> str:
        for text in texts:
            await job.emit(text)
        await job.emit({"tool": "search", "n": [1, 2.5, None]})
        for value in (0, 1 / 3, 0.1 + 0.2, 1):
            await job.progress(value)
        return "".join(texts)

    jobs = aclient.queue(queue)
    async with worker:
        job = await jobs.enqueue(None)
        events = [event async for event in jobs.watch(job.id)]
    assert "".join(event.data for event in events if event.type == "chunk") == "".join(texts)
    assert all(event.data for event in events if event.type == "chunk"), "an empty text is skipped, by rule"
    assert [event.value for event in events if event.type == "data"] == [{"tool": "search", "n": [1, 2.5, None]}]
    assert [event.value for event in events if event.type == "progress"] == [0, 1 / 3, 0.1 + 0.2, 1]
    record = await jobs.get(job.id)
    assert record is not None
    assert record.progress == 1.0


async def test_h31_a_character_split_over_two_chunks(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient
) -> None:
    worker = Worker(valkey_url)

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> Any:
        for text in ("\ud83d", "\ude00", "\udc00", "ok", "\ud83d"):
            await job.emit(text)
        return ["\ud83d\ude00\udc00ok\ud83d"]

    jobs = aclient.queue(queue)
    async with worker:
        job = await jobs.enqueue(None)
        events = [event async for event in jobs.watch(job.id)]
    text = "".join(event.data for event in events if event.type == "chunk")
    assert text == "😀\ufffdok\ufffd"
    assert events[-1].type == "completed"
    assert events[-1].result == [text]


async def test_h33_an_empty_text_renews_the_lease(
    valkey_url: str, queue_name: str, raw: redis.Redis, keys: Keys
) -> None:
    # No heartbeat can help here: its interval is half of a long lease.
    queue: Queue[Any, Any] = Queue(queue_name, lease=100)
    worker = Worker(valkey_url, heartbeat=50)
    scores: list[float] = []

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> None:
        for emit in (lambda: job.emit(""), job.heartbeat):
            scores.append(raw.zscore(keys.leases, job.id))
            await asyncio.sleep(0.06)
            await emit()
            await job.flush()
        scores.append(raw.zscore(keys.leases, job.id))

    async with AsyncClient(redis_url=valkey_url) as client, worker:
        job = await client.queue(queue).enqueue(None)
        await client.queue(queue).wait(job.id, timeout=10)
    assert scores[0] < scores[1] < scores[2]


async def test_streaming_renews_the_lease_only_now_and_then(
    valkey_url: str, queue_name: str, raw: redis.Redis, keys: Keys
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=0.8)
    worker = Worker(valkey_url, emit_interval=0, heartbeat=0.4)
    scores: list[float] = []

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> None:
        for _ in range(60):
            await job.emit("x")
            await job.flush()
            scores.append(raw.zscore(keys.leases, job.id))
            await asyncio.sleep(0.01)

    async with AsyncClient(redis_url=valkey_url) as client, worker:
        job = await client.queue(queue).enqueue(None)
        await client.queue(queue).wait(job.id, timeout=10)
    assert 1 < len(set(scores)) < 15


async def test_h38_lost_replies_neither_lose_nor_repeat_text(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=5)
    jobs = aclient.queue(queue)
    numbers = range(120)
    errors: list[BaseException] = []
    with Proxy(valkey_url) as proxy:
        worker = Worker(
            proxy.url, emit_interval=0.001, on_error=lambda error, job: errors.append(error) if job else None
        )

        @worker.handles(queue, concurrency=10)
        async def run(job: JobContext[Any]) -> str:
            for n in numbers:
                await job.emit(f"{n},")
                if n % 40 == 0:
                    await job.progress(n / 120)
                await asyncio.sleep(0.001)
            return "R"

        async with worker:
            proxy.drop_every = 10
            ids = [(await jobs.enqueue(n)).id for n in range(10)]
            streams = [[event async for event in jobs.watch(id)] for id in ids]
            proxy.drop_every = 0
    assert proxy.dropped > 1
    assert not errors
    for events in streams:
        assert "".join(event.data for event in events if event.type == "chunk") == "".join(f"{n}," for n in numbers)
        assert [event.value for event in events if event.type == "progress"] == [0, 1 / 3, 2 / 3]
        assert {event.type for event in events} == {"chunk", "progress", "completed"}
        assert {event.attempt for event in events} == {1}


async def test_an_outage_delays_text_and_interrupts_nobody(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=10)
    jobs = aclient.queue(queue)
    with Proxy(valkey_url) as proxy:
        worker = Worker(proxy.url)

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> str:
            for n in range(20):
                if n == 5:
                    proxy.down()
                if n == 15:
                    proxy.heal()
                await job.emit(f"{n},")
                await asyncio.sleep(0.03)
            return "R"

        async with worker:
            job = await jobs.enqueue(None)
            events = [event async for event in jobs.watch(job.id)]
    assert "".join(event.data for event in events if event.type == "chunk") == "".join(f"{n}," for n in range(20))
    assert events[-1].type == "completed"
    assert events[-1].attempt == 1


async def test_a_handler_that_emits_faster_than_the_database_takes_waits(
    valkey_url: str, queue_name: str, aclient: AsyncClient
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=10)
    ahead = 0
    with Proxy(valkey_url) as proxy:
        worker = Worker(proxy.url)
        held = asyncio.Event()

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> None:
            nonlocal ahead
            await job.emit("x")
            await job.flush()
            proxy.hold()
            held.set()
            for _ in range(40):
                await job.emit("y" * 100_000)
                ahead += 1

        async with worker:
            job = await aclient.queue(queue).enqueue(None)
            await held.wait()
            await asyncio.sleep(0.3)
            assert ahead < 20
            proxy.heal()
            await aclient.queue(queue).wait(job.id, timeout=10)
    assert ahead == 40


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
async def test_a_long_text_is_split_into_events_that_a_gateway_passes_on(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient, kind: str
) -> None:
    text = "".join(map(str, range(40_000))) + "é🙂" * 1000
    worker = Worker(valkey_url)
    if kind == "thread":
        worker.handles(queue)(lambda job: job.emit(text))
    else:

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> None:
            await job.emit(text)

    jobs = aclient.queue(queue)
    async with worker:
        events = [event async for event in jobs.watch((await jobs.enqueue(None)).id)]
    chunks = [event.data for event in events if event.type == "chunk"]
    assert "".join(chunks) == text
    assert [len(chunk) for chunk in chunks[:-1]] == [64 * 1024] * (len(text) // (64 * 1024))


async def test_a_plain_handler_streams_from_its_thread(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient
) -> None:
    worker = Worker(valkey_url)

    @worker.handles(queue)
    def run(job: SyncJobContext[Any]) -> str:
        for n in range(1000):
            job.emit(f"{n},")
        job.progress(0.5)
        job.flush()
        job.heartbeat()
        job.emit({"last": True})
        return "R"

    jobs = aclient.queue(queue)
    async with worker:
        job = await jobs.enqueue(None)
        events = [event async for event in jobs.watch(job.id)]
    assert "".join(event.data for event in events if event.type == "chunk") == "".join(f"{n}," for n in range(1000))
    assert [event.type for event in events][-3:] == ["progress", "data", "completed"]


async def test_a_full_database_is_an_error_to_the_handler_and_a_gap_to_readers(
    monkeypatch: pytest.MonkeyPatch, queue_name: str
) -> None:
    monkeypatch.setattr("outlast_worker.output.PATIENCE", 0.2)
    monkeypatch.setattr("outlast_worker.intake.FULL_PAUSE", 0.2)
    monkeypatch.setattr("outlast_worker.engine.FULL_PAUSE", 0.2)
    queue: Queue[Any, Any] = Queue(queue_name, lease=5)
    caught: list[BaseException] = []
    with start_valkey() as server, redis.Redis(port=server.port) as raw:
        url = server.connection_url
        worker = Worker(url)

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> str:
            await job.emit("before ")
            await job.flush()
            raw.config_set("maxmemory", 1)
            try:
                await job.emit("lost ")
                await job.flush()
            except StoreFullError as error:
                caught.append(error)
            raw.config_set("maxmemory", 0)
            await job.emit("after")
            return "the whole result"

        async with AsyncClient(redis_url=url) as client, worker:
            jobs = client.queue(queue)
            job = await jobs.enqueue(None)
            events = [event async for event in jobs.watch(job.id)]
            assert len(caught) == 1
            assert [event.type for event in events] == ["chunk", "gap", "chunk", "completed"]
            assert await jobs.wait(job.id, timeout=5) == "the whole result"
            second = await jobs.enqueue(None)
            assert await jobs.wait(second.id, timeout=10) == "the whole result"
