"""What a worker costs where every command is billed, and what `economy` does about it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from tests.faults.processes import until
from tests.servers import start_valkey

from outlast import AsyncClient, Queue
from outlast_worker import JobContext, Worker
from outlast_worker.costs import PER_BLOCK, Workload, estimate, idle_month
from outlast_worker.registration import PROMPT, THRIFTY

FREE = {"info", "config|resetstat", "config|get", "auth", "hello", "select", "command", "ping", "quit"}
"""What Upstash does not bill."""


class Bill:
    """The commands of a server that nobody else uses, those inside scripts included."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._raw: Any = redis.Redis.from_url(url, decode_responses=True)

    def start(self) -> None:
        self._raw.config_resetstat()

    def read(self) -> dict[str, int]:
        found = {name.removeprefix("cmdstat_"): row["calls"] for name, row in self._raw.info("commandstats").items()}
        return {name: calls for name, calls in found.items() if name not in FREE}

    async def settled(self) -> None:
        await until(lambda: self.read().get("pexpire"), "the job settles")

    async def idle(self) -> None:
        """Until the worker waits for its doorbell."""
        await until(lambda: any(one["cmd"] == "blpop" for one in self._raw.client_list()), "the worker is idle")


@pytest.fixture
def bills() -> Iterator[list[Bill]]:
    with start_valkey() as one, start_valkey() as two:
        yield [Bill(f"redis://127.0.0.1:{server.port}") for server in (one, two)]


async def test_a_200_token_job_over_5_s_bills_350_at_most_and_100_in_economy_mode(bills: list[Bill]) -> None:
    queue: Queue[None, None] = Queue("tokens")

    async def cost(bill: Bill, economy: bool) -> dict[str, int]:
        worker = Worker(bill.url, economy=economy)

        @worker.handles(queue)
        async def run(job: JobContext[None]) -> None:
            start = asyncio.get_running_loop().time()
            for n in range(200):
                await asyncio.sleep(start + n * 0.025 - asyncio.get_running_loop().time())
                await job.emit("token ")

        async with AsyncClient(redis_url=bill.url) as client, worker:
            await bill.idle()
            bill.start()
            await client.queue(queue).enqueue(None)
            await bill.settled()
            return bill.read()

    default, economy = await asyncio.gather(cost(bills[0], False), cost(bills[1], True))
    assert 200 < sum(default.values()) <= 350, default
    assert 70 < sum(economy.values()) <= 100, economy


@pytest.mark.parametrize("economy", [False, True])
async def test_an_idle_worker_bills_four_commands_a_block(bills: list[Bill], economy: bool) -> None:
    bill, queue = bills[0], Queue[None, None]("idle")
    worker = Worker(bill.url, economy=economy, block=0.1)
    worker.handles(queue)(_nothing)
    async with worker:
        await bill.idle()
        bill.start()
        await until(lambda: bill.read().get("blpop", 0) >= 30, "30 blocks pass")
        count = bill.read()
    per_block = sum(count.values()) / count["blpop"]
    assert per_block == pytest.approx(PER_BLOCK, rel=0.05), count
    pace = THRIFTY if economy else PROMPT
    month = idle_month(pace, min(pace.block, 60 * pace.share), per_block)
    assert month <= (350_000 if economy else 450_000)
    workload = Workload(1, workers=1, economy=economy)
    assert estimate(workload)["idle workers"] == pytest.approx(month, rel=0.05)


async def _nothing(job: JobContext[None]) -> None: ...


def test_economy_is_chosen_by_itself_for_upstash_hosts_and_gives_way_to_what_is_asked_for() -> None:
    def settings(url: str, **options: Any) -> Any:
        worker = Worker(url, **options)
        worker.handles(Queue("q"))(_nothing)
        return worker._settings()

    upstash, own = "rediss://default:secret@eu1-calm-cat-1.upstash.io:6379", "redis://localhost:6379"
    assert settings(upstash).pace is THRIFTY
    assert settings(own).pace is PROMPT
    assert settings(upstash, economy=False).pace is PROMPT
    assert settings(own, economy=True).pace is THRIFTY
    assert settings("redis://upstash.io.example.com").pace is PROMPT
    assert (settings(upstash).emit_interval, settings(upstash, emit_interval=0.1).emit_interval) == (0.3, 0.1)
    assert (settings(own).emit_interval, settings(own).block, settings(upstash, block=5).block) == (0.05, 30, 5)


async def test_a_glance_finds_a_job_whose_doorbell_was_lost(bills: list[Bill]) -> None:
    bill, queue, ran = bills[0], Queue[None, None]("lost"), asyncio.Event()
    worker = Worker(bill.url, block=0.3)

    @worker.handles(queue)
    async def run(job: JobContext[None]) -> None:
        ran.set()

    async with AsyncClient(redis_url=bill.url) as client, worker:
        await bill.idle()
        keys = client.queue(queue)._keys
        # As a foreign client's BLPOP would: the job is there, its token is not.
        with redis.Redis.from_url(bill.url) as raw:
            raw.hset(keys.job("a"), mapping={"id": "a", "payload": "null", "status": "waiting", "maxAttempts": "1"})
            raw.zadd(keys.ready, {"a": 9e13})
        async with asyncio.timeout(5):
            await ran.wait()
