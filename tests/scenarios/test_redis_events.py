"""What the database does to everybody at once: a failover, forgotten scripts, full memory, a restart, a late start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest
import redis
from tests.faults.audit import audit_history, audit_keys, read_aof, read_history
from tests.faults.links import Proxy
from tests.faults.processes import until
from tests.faults.servers import forgetting, journalled, promote, replicated, restart
from tests.servers import free_port, start_valkey
from tests.telemetry.test_health import probe
from tests.telemetry.test_health import until as ready

from outlast import AsyncClient, JobCancelledError, Queue, StoreFullError
from outlast.protocol import Keys, calls
from outlast.rest import AsyncRestTransport
from outlast_worker import JobContext, Worker
from outlast_worker.gateway import Database, GatewayConfig, GatewayServer

from .conftest import TOKEN


async def test_h08_a_failover_loses_only_what_the_replica_had_not_heard(
    queue_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=1.0)
    starts: list[tuple[str, int]] = []
    go, go_late = asyncio.Event(), asyncio.Event()
    with replicated() as (primary, replica), Proxy(primary.connection_url) as proxy:
        worker = Worker(proxy.url, block=0.3)

        @worker.handles(queue, concurrency=3)
        async def run(job: JobContext[Any]) -> str:
            starts.append((job.payload, job.starts))
            if starts.count((job.payload, 1)) == 1 and job.starts == 1:
                await (go_late if job.payload == "taken later" else go).wait()
            return f"{job.payload} {job.attempt}"

        async with AsyncExitStack() as stack:
            jobs = (await stack.enter_async_context(AsyncClient(proxy.url))).queue(queue)
            taken_later = await jobs.enqueue("taken later", delay=0.5)
            async with worker:
                uncompleted = await jobs.enqueue("uncompleted", idempotency_key="k1")
                await until(lambda: len(starts) == 1, "it runs")
                with redis.Redis(port=primary.port) as raw:
                    raw.set("mark", 1)  # WAIT counts what its own connection wrote
                    assert raw.wait(1, 5000) == 1
                promote(replica)  # from here on it hears nothing
                await until(lambda: len(starts) == 2, "the other is taken")
                lost = await jobs.enqueue("lost", idempotency_key="k2")
                await until(lambda: len(starts) == 3, "this one, too")
                go.set()
                assert await jobs.wait(uncompleted.id, timeout=10) == "uncompleted 1"
                assert await jobs.wait(lost.id, timeout=10) == "lost 1"
                await asyncio.sleep(0.2)  # the worker, too, has heard that these two are settled
                await asyncio.to_thread(primary.terminate)
                proxy.aim(replica.connection_url)
                go_late.set()
                # A client that was told the end a moment ago may still tell it; one that asks now is told what is.
                jobs = (await stack.enter_async_context(AsyncClient(proxy.url))).queue(queue)
                assert await jobs.wait(uncompleted.id, timeout=20) == "uncompleted 2"
                assert await jobs.wait(taken_later.id, timeout=20) == "taken later 1"
                assert await jobs.get(lost.id) is None
                again = await jobs.enqueue("lost", idempotency_key="k2")
                assert not again.deduplicated
                assert await jobs.wait(again.id, timeout=10) == "lost 1"
                known = await jobs.enqueue("uncompleted", idempotency_key="k1")
                assert (known.id, known.deduplicated) == (uncompleted.id, True)
            with redis.Redis(port=replica.port) as raw:
                accepted = [uncompleted.id, taken_later.id, again.id]
                assert audit_keys(raw, queue_name, accepted, at_rest=True) == []
    assert Counter(payload for payload, _ in starts) == {"uncompleted": 2, "taken later": 2, "lost": 2}
    assert not [record for record in caplog.records if "the worker itself failed" in record.getMessage()]


async def test_h48_scripts_that_are_flushed_again_and_again_are_seen_by_nobody(queue_name: str) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, lease=5)
    runs: Counter[str] = Counter()
    troubles: list[BaseException] = []
    with (
        journalled() as server,
        GatewayServer(GatewayConfig(databases=[Database(redis_url=server.connection_url, token=TOKEN)])) as gateway,
    ):
        workers = [Worker(server.connection_url, on_error=lambda error, job: troubles.append(error)) for _ in range(4)]
        for worker in workers:

            @worker.handles(queue, concurrency=10)
            async def run(job: JobContext[Any]) -> str:
                runs[job.id] += 1
                for n in range(4):
                    await job.emit(f"{n},")
                    await job.flush()
                await job.progress(0.5)
                return job.id

        async with AsyncExitStack() as stack:
            for worker in workers:
                await stack.enter_async_context(worker)
            clients = [
                await stack.enter_async_context(AsyncClient(server.connection_url)),
                await stack.enter_async_context(AsyncClient(gateway.url, TOKEN)),
            ]
            pipeline = AsyncRestTransport(gateway.url, TOKEN)
            stack.push_async_callback(pipeline.aclose)

            async def produce(client: AsyncClient) -> list[str]:
                jobs, ids = client.queue(queue), []
                while time.monotonic() < end:
                    id = (await jobs.enqueue("x")).id
                    events = [event async for event in jobs.watch(id, poll=0.05, timeout=30)]
                    assert "".join(event.data for event in events if event.type == "chunk") == "0,1,2,3,"
                    assert events[-1].type == "completed"
                    ids.append(id)
                return ids

            async def in_pipelines() -> list[str]:
                ids: list[str] = []
                while time.monotonic() < end:
                    ids += [f"p{len(ids) + n}" for n in range(10)]
                    orders = [
                        calls.enqueue(Keys(queue_name), id=id, nonce=id, payload="0", max_attempts=1, key_ttl_ms=1000)
                        for id in ids[-10:]
                    ]
                    assert [made.id for made in await pipeline.send_many(orders)] == ids[-10:]
                    await asyncio.sleep(0.1)
                return ids

            with forgetting(server.port, 0.03):
                end = time.monotonic() + 2.5
                made = await asyncio.gather(*(produce(client) for client in clients * 8), in_pipelines())
            ids = [id for some in made for id in some]
            for id in made[-1]:
                assert await clients[0].queue(queue).wait(id, timeout=20) == id
        assert runs == dict.fromkeys(ids, 1)
        assert not troubles
        with redis.Redis(port=server.port) as raw:
            assert audit_keys(raw, queue_name, ids, at_rest=True) == []
        assert audit_history(read_history(read_aof(server.data_dir), queue_name), ids, at_rest=True) == []


async def test_h49_full_memory_refuses_new_jobs_ends_running_ones_and_all_goes_on_when_some_is_free(
    queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("intake.FULL_PAUSE", "engine.FULL_PAUSE", "output.PATIENCE"):
        monkeypatch.setattr(f"outlast_worker.{place}", 0.2)
    queue: Queue[Any, Any] = Queue(queue_name, lease=5, result_ttl=1)
    payload = "x" * 20_000
    runs: Counter[str] = Counter()
    told: list[str] = []
    go = asyncio.Event()
    with start_valkey(config={"maxmemory-policy": "noeviction", "save": ""}) as server:
        url = server.connection_url
        workers = [Worker(url), Worker(url)]
        for worker in workers:

            @worker.handles(queue, concurrency=3)
            async def run(job: JobContext[Any]) -> str:
                runs[job.id] += 1
                await go.wait()
                try:
                    await job.emit("text ")
                    await job.flush()
                except StoreFullError:  # not silently: the handler is told, and this one goes on without
                    told.append(job.id)
                return job.id

        async with AsyncClient(url) as client, AsyncExitStack() as stack:
            jobs = client.queue(queue)
            following: list[asyncio.Task[str]] = []

            async def enqueue() -> str:
                made = await jobs.enqueue(payload)
                following.append(asyncio.create_task(jobs.wait(made.id, timeout=60)))
                return made.id

            for worker in workers:
                await stack.enter_async_context(worker)
            running = [await enqueue() for _ in range(6)]
            await until(lambda: len(runs) == 6, "both are busy")
            raw = stack.enter_context(redis.Redis(port=server.port))
            limit = raw.info("memory")["used_memory"] + 1_500_000
            raw.config_set("maxmemory", limit)
            waiting: list[str] = []
            with contextlib.suppress(StoreFullError):
                while True:
                    waiting.append(await enqueue())
            assert len(waiting) > 30
            raw.config_set("maxmemory", 1)  # not even room for a word is left
            go.set()
            assert await asyncio.gather(*following[:6]) == running, "they end, and their results are kept"
            assert sorted(told) == sorted(running)
            raw.config_set("maxmemory", limit)
            cancelled, waiting = waiting[-25:], waiting[:-25]
            for id in cancelled:
                assert await jobs.cancel(id) is True
            assert await asyncio.gather(*following[6:-25]) == waiting
            ends = await asyncio.gather(*following[-25:], return_exceptions=True)
            assert {type(end) for end in ends} == {JobCancelledError}
            again = await enqueue()
            assert await following[-1] == again
    assert runs == dict.fromkeys([*running, *waiting, again], 1)


@pytest.mark.parametrize(("lease", "down"), [(4.0, 0.8), (0.8, 2.0)])
async def test_h50_a_restart_of_the_database_delays_text_and_takes_nothing_back(
    queue_name: str, lease: float, down: float, caplog: pytest.LogCaptureFixture
) -> None:
    """When it took longer than the lease, the holder or one other goes on: whoever asks first, and nobody beside."""
    caplog.set_level(logging.INFO)
    queue: Queue[Any, Any] = Queue(queue_name, lease=lease)
    starts: list[tuple[str, int]] = []
    with journalled(appendfsync="always") as server:
        url = server.connection_url
        busy, idle = Worker(url), Worker(url)
        words = "".join(f"{n} " for n in range(int(down * 10) + 15))

        for name, worker in (("busy", busy), ("idle", idle)):

            @worker.handles(queue)
            async def run(job: JobContext[Any], name: str = name) -> str:
                starts.append((name, job.starts))
                if job.payload == "long":
                    for word in words.split(" ")[:-1]:
                        await job.emit(word + " ")
                        await asyncio.sleep(0.1)
                return "R"

        async with AsyncClient(url) as client, busy:
            jobs = client.queue(queue)
            job = await jobs.enqueue("long")
            await until(lambda: starts, "it runs")

            async def watch() -> list[Any]:
                return [event async for event in jobs.watch(job.id)]

            watching = [asyncio.create_task(watch()) for _ in range(3)]
            async with idle:
                await asyncio.sleep(0.3)
                await asyncio.to_thread(restart, server, down=down)
                began = time.monotonic()
                assert await jobs.wait((await jobs.enqueue("short")).id, timeout=10) == "R"
                assert time.monotonic() - began < 5
                for events in await asyncio.gather(*watching):
                    marks = [event.type for event in events if event.type != "chunk"]
                    assert marks == ["completed"] or (down > lease and marks == ["restarted", "completed"])
                    last = 1 + max((at for at, event in enumerate(events) if event.type == "restarted"), default=-1)
                    assert "".join(event.data for event in events[last:-1]) == words
                record = await jobs.get(job.id)
    assert record is not None
    assert record.status == "completed"
    if record.starts == 1:
        assert sorted(starts) == [("busy", 1), ("idle", 1)]
    else:
        assert down > lease
        assert (record.attempt, record.starts, len(starts)) == (2, 2, 3)
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) <= 8, "the log is limited"


async def test_h51_a_name_that_resolves_later_is_waited_for(
    queue_name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    resolve, known = socket.getaddrinfo, False

    def slow_to_learn(host: Any, *args: Any, **options: Any) -> Any:
        if host == "db.internal":
            if not known:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            host = "127.0.0.1"
        return resolve(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow_to_learn)
    queue: Queue[Any, Any] = Queue(queue_name)
    port = free_port()
    with start_valkey() as server:
        with redis.Redis(port=server.port) as raw:
            raw.config_set("requirepass", "s3cret")
        worker = Worker(f"redis://:s3cret@db.internal:{server.port}", health=port)

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> str:
            return "R"

        async with AsyncClient(f"redis://:s3cret@127.0.0.1:{server.port}") as client, worker:
            job = await client.queue(queue).enqueue(None)
            await asyncio.sleep(0.7)
            assert await probe(port) == (True, False)
            known = True
            assert await client.queue(queue).wait(job.id, timeout=20) == "R"
            await ready(port, (True, True))
    assert caplog.text.count("trouble with the database") == 1
    assert "db.internal" in caplog.text
    assert "s3cret" not in caplog.text
