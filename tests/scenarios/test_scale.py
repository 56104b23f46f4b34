"""What must not grow: the cost of a command with the queue, scripts with the clients, silence with time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

import pytest
import redis
from tests.faults.processes import until
from tests.servers import start_valkey

from outlast import AsyncClient, Queue
from outlast.protocol import Keys, holding
from outlast.protocol.scripts import SCRIPTS
from outlast_edge import ANY, Edge
from outlast_worker import JobContext, Worker
from outlast_worker.gateway import Database, GatewayConfig, GatewayServer
from outlast_worker.tcp import AsyncTcpTransport

from .conftest import TOKEN

MULTIPLY = """
local base, ready, first, last = KEYS[1], KEYS[2], tonumber(ARGV[1]), tonumber(ARGV[2])
for n = first, last do
  local job = base .. n
  redis.call('COPY', base .. '1', job)
  redis.call('HSET', job, 'id', n, 'nonce', n)
  redis.call('ZADD', ready, 9e13 + n, n)
end
"""


def multiply(raw: redis.Redis, keys: Keys, first: int, last: int) -> None:
    """Waiting jobs with these ids: copies of the job "1" that the server makes itself, a million in seconds."""
    for at in range(first, last + 1, 5_000):
        raw.eval(MULTIPLY, 2, keys.job(""), keys.ready, at, min(at + 4_999, last))
    raw.incrby(keys.seq, last - first + 1)


async def test_h67_no_operation_slows_down_with_a_million_jobs(queue_name: str) -> None:
    """A thousand against a million; `python -m benchmarks.growth` has the curve between, and the slowest of each."""
    queue: Queue[Any, Any] = Queue(queue_name)
    keys = Keys(queue_name)
    requests = iter(range(1, 10_000))
    with start_valkey(config={"save": "", "slowlog-log-slower-than": 50_000}) as server:
        url = server.connection_url
        transport = AsyncTcpTransport(url)
        with redis.Redis(port=server.port) as raw:
            async with AsyncClient(url) as client:
                jobs = client.queue(queue)

                def take() -> Awaitable[Any]:
                    times = {"lease_ms": 60_000, "result_ttl_ms": 60_000, "dead_ttl_ms": 60_000}
                    return transport.send(holding.reserve(keys, worker="w", request=next(requests), k=1, **times))

                async def measure() -> dict[str, float]:
                    """Median microseconds of the server for each operation."""
                    made: list[str] = []
                    operations: dict[str, Callable[[], Awaitable[Any]]] = {
                        "enqueue": lambda: jobs.enqueue("x", priority=3),
                        "get": lambda: jobs.get("500"),
                        "stats": jobs.stats,
                        "page": lambda: jobs.by_state("waiting", limit=20),
                        "dead": lambda: jobs.dead(count=20),
                        "take": take,
                        "cancel": lambda: jobs.cancel(made.pop()),
                    }
                    took: dict[str, float] = {}
                    for name, operation in operations.items():
                        if name == "cancel":
                            made = [(await jobs.enqueue("x")).id for _ in range(100)]
                        each = []
                        for _ in range(5):
                            raw.config_resetstat()
                            for _ in range(20):
                                await operation()
                            stats: Any = raw.info("commandstats")
                            scripts = [stats[key] for key in ("cmdstat_evalsha", "cmdstat_eval") if key in stats]
                            own = ("config|resetstat", "info")
                            sent = scripts or [of for key, of in stats.items() if key[8:] not in own]
                            each.append(sum(of["usec"] for of in sent) / 20)
                        took[name] = median(each)
                    return took

                await jobs.enqueue("x" * 98, id="1")
                multiply(raw, keys, 2, 1_000)
                few = await measure()
                before = raw.info("memory")["used_memory_dataset"]
                multiply(raw, keys, 1_001, 1_000_000)
                per_job = (raw.info("memory")["used_memory_dataset"] - before) / 999_000
                raw.slowlog_reset()
                many = await measure()
                assert {name: (few[name], many[name]) for name in few if many[name] > 2 * few[name] + 15} == {}
                assert per_job < 1050

                waiting = raw.zcard(keys.ready)
                purge = asyncio.create_task(jobs.purge("waiting"))
                asked = 0
                while raw.zcard(keys.ready) > waiting - 5_000:
                    assert await jobs.get("999999") is not None
                    asked += 1
                purge.cancel()
                await asyncio.wait([purge])
                assert asked > 10, "others go on while a purge does"
            assert raw.slowlog_len() <= 5, "no command is over 50 ms, but for a few that met a busy machine"
        await transport.aclose()


async def test_h34_a_hundred_thousand_chunks_are_seen_live_and_ten_thousand_of_them_afterwards(
    valkey_url: str, queue_name: str, raw: redis.Redis
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)
    keys = Keys(queue_name)
    count, kept, ahead = 100_000, queue.events_max_len, 4_000
    assert kept == 10_000
    worker = Worker(valkey_url)
    room, longest = asyncio.Semaphore(ahead), 0

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> int:
        nonlocal longest
        for n in range(count):
            await room.acquire()  # the live reader is not to fall behind what is kept
            await job.emit({"n": n})
            if n % 10_000 == 0:
                await job.flush()
                longest = max(longest, raw.xlen(keys.events(job.id)))
        return count

    async with AsyncClient(valkey_url) as client, worker:
        jobs = client.queue(queue)
        job = await jobs.enqueue(None)
        live: list[int] = []
        cursor = ""
        async for event in jobs.watch(job.id):
            if event.type == "data":
                live.append(event.value["n"])
                room.release()
                cursor = event.id if event.value["n"] == 499 else cursor
            else:
                assert event.type == "completed"
        assert live == list(range(count))
        longest = max(longest, raw.xlen(keys.events(job.id)))
        assert kept < longest <= kept * 1.05, "what is kept is bounded; whole nodes of the stream are dropped"
        for after in (cursor, None):
            gap, *data, end = [event async for event in jobs.watch(job.id, after=after)]
            assert (gap.type, end.type) == ("gap", "completed")
            numbers = [event.value["n"] for event in data if event.type == "data"]
            assert numbers == list(range(count - len(numbers), count))
            assert len(numbers) == len(data) >= kept - 1
        record = await jobs.get(job.id)
        assert record is not None
        assert record.result == count


async def test_h68_the_server_keeps_each_script_once_whatever_its_clients_are_called_and_set_to() -> None:
    with start_valkey() as server, redis.Redis(port=server.port) as raw:
        url = server.connection_url
        counts: list[int] = []
        memory: list[int] = []
        for round, namespace in enumerate(("one", "two", "a-third-and-longer-one")):
            queues: list[Queue[Any, Any]] = [
                Queue(f"q{n}", lease=5 + round, max_attempts=2, events_max_len=100 * (round + 1), backoff=0.01)
                for n in range(5)
            ]
            worker = Worker(url, namespace=namespace, concurrency=20, heartbeat=0.5)
            for queue in queues:

                @worker.handles(queue, concurrency=20)
                async def run(job: JobContext[Any]) -> Any:
                    await job.emit("x")
                    await job.progress(0.5)
                    await job.flush()
                    if job.payload % 7 == job.attempt:
                        raise ValueError
                    return job.payload

            async with AsyncClient(url, namespace=namespace) as client, worker:
                for n in range(150):
                    jobs = client.queue(queues[n % 5])
                    job = await jobs.enqueue(n, idempotency_key=f"k{n}", delay=0 if n % 3 else 0.01)
                    if n % 5 == 0:
                        await jobs.cancel(job.id)
                    else:
                        async for _ in jobs.watch(job.id):
                            pass
                    await jobs.retry_dead(job.id)
            counts.append(raw.info("memory")["number_of_cached_scripts"])
            memory.append(raw.info("memory")["used_memory_scripts"])
    assert counts[0] == counts[1] == counts[2] <= len(SCRIPTS)
    assert memory[2] <= memory[0] * 1.2


@pytest.mark.parametrize("blocking", [True, False])
async def test_h69_an_idle_worker_sends_one_look_a_block_or_a_poll(queue_name: str, blocking: bool) -> None:
    """With the default block of 30 s that is two looks a minute."""
    with start_valkey() as server, redis.Redis(port=server.port) as raw:
        if not blocking:
            raw.execute_command("ACL", "SETUSER", "default", "-blpop")
        worker = Worker(server.connection_url, block=0.5, poll=0.5)

        @worker.handles(Queue(queue_name))
        async def run(job: JobContext[Any]) -> None: ...

        def looks() -> int:
            stats: Any = raw.info("commandstats")
            return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval", "blpop"))

        async with worker:
            await asyncio.sleep(0.4)
            before, began = looks(), time.monotonic()
            await asyncio.sleep(2)
            passed = time.monotonic() - began
            assert looks() - before <= 2 * passed / 0.5 + 2


@pytest.mark.parametrize("over", ["tcp", "rest"])
async def test_h69_a_quiet_viewer_of_the_edge_asks_ever_more_rarely(queue_name: str, over: str) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)
    with start_valkey() as server, redis.Redis(port=server.port) as raw:
        url = server.connection_url
        with GatewayServer(GatewayConfig(databases=[Database(redis_url=url, token=TOKEN)])) as gateway:
            client = AsyncClient(url) if over == "tcp" else AsyncClient(gateway.url, TOKEN)
            app = Edge(client, queues=[queue], authorize=lambda request, action, job: ANY).app()
            sent: list[Any] = []
            leave = asyncio.Event()

            async def receive() -> Any:
                await leave.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                sent.append(message)

            def reads() -> int:
                stats: Any = raw.info("commandstats")
                return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("xread", "hmget"))

            async with client:
                job = await client.queue(queue).enqueue(1)
                scope = {
                    **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET"},
                    **{"scheme": "http", "path": f"/v1/jobs/{job.id}/events", "query_string": b""},
                    "headers": [(b"accept", b"text/event-stream")],
                }
                viewing = asyncio.create_task(app(scope, receive, send))
                await until(lambda: len(sent) >= 2, "the first frame")
                counts = [reads()]
                for _ in range(2):
                    await asyncio.sleep(1.5)
                    counts.append(reads())
                leave.set()
                await viewing
    first, second = counts[1] - counts[0], counts[2] - counts[1]
    assert first <= (8 if over == "rest" else 4)
    assert second <= (4 if over == "rest" else 1)
