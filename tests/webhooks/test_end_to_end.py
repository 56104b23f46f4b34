"""From enqueue(webhook=…) to the receiver, with workers and clients as people run them."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis
from tests.faults.processes import until
from tests.webhooks.conftest import SECRET
from tests.webhooks.receiver import Receiver

from outlast import AsyncClient, Client, InvalidArgumentError, Queue, TerminalJobError
from outlast_worker import JobContext, Worker
from outlast_worker.webhooks import Webhooks


@pytest.fixture
async def client(valkey_url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(redis_url=valkey_url) as client:
        yield client


@pytest.fixture
def queue(queue_name: str) -> Queue[Any, Any]:
    return Queue(queue_name, lease=0.6, backoff=0.02, max_backoff=0.05)


def worker_of(url: str, queue: Queue[Any, Any], webhooks: Webhooks, **options: Any) -> Worker:
    worker = Worker(url, **options)

    @worker.handles(queue, concurrency=4)
    async def run(job: JobContext[Any]) -> Any:
        match job.payload:
            case "fail":
                raise TerminalJobError("a detail of ours")
            case "hang":
                await asyncio.sleep(60)
            case "again" if job.attempt == 1:
                raise ValueError("once")
            case _:
                pass
        return {"said": job.payload}

    webhooks.serve(worker, queue)
    return worker


webhooks = Webhooks([SECRET], allow=["127.0.0.0/8"], schedule=[0.05, 0.05, 0.05])


async def test_each_end_is_told_once(
    valkey_url: str, client: AsyncClient, queue: Queue[Any, Any], hooked: Receiver
) -> None:
    jobs = client.queue(queue)
    waiting = await jobs.enqueue("never", webhook=hooked.url, delay=1000)
    assert await jobs.cancel(waiting.id)
    async with worker_of(valkey_url, queue, webhooks):
        ids = {
            payload: (await jobs.enqueue(payload, webhook=hooked.url)).id for payload in ("ok", "fail", "hang", "again")
        }
        silent = await jobs.enqueue("ok")
        await until(lambda: _status(jobs, ids["hang"], "active"), "it runs")
        await jobs.cancel(ids["hang"])
        await until(lambda: len(hooked.got) >= 5, "five messages")
        await jobs.wait(silent.id, timeout=20)
        await asyncio.sleep(0.1)
    told = {message["data"]["id"]: message["type"] for message in (got.verified(SECRET) for got in hooked.got)}
    assert len(hooked.got) == 5
    assert told == {
        waiting.id: "job.cancelled",
        ids["ok"]: "job.completed",
        ids["fail"]: "job.failed",
        ids["hang"]: "job.cancelled",
        ids["again"]: "job.completed",
    }
    assert b"a detail of ours" not in b"".join(got.body for got in hooked.got)


async def _status(jobs: Any, id: str, status: str) -> bool:
    job = await jobs.get(id)
    return job is not None and job.status == status


async def test_a_job_whose_worker_died_for_the_last_time_is_told(
    valkey_url: str, client: AsyncClient, queue: Queue[Any, Any], hooked: Receiver, raw: redis.Redis
) -> None:
    jobs = client.queue(queue)
    made = await jobs.enqueue("hang", webhook=hooked.url, max_attempts=1)
    async with worker_of(valkey_url, queue, webhooks):
        await until(lambda: _status(jobs, made.id, "active"), "it runs")
        # As a worker leaves it that was killed: nobody renews.
        raw.hset(f"{{{queue.name}}}:job:{made.id}", "token", "dead:1")
        await until(lambda: hooked.got, "told")
    assert hooked.got[0].verified(SECRET)["type"] == "job.failed"


async def test_a_receiver_that_was_away_gets_it_later_under_the_same_id(
    valkey_url: str, client: AsyncClient, queue: Queue[Any, Any], hooked: Receiver
) -> None:
    """Its retries do not run the model again."""
    hooked.script = [500, "cut", 503]
    made = await client.queue(queue).enqueue("ok", webhook=hooked.url)
    async with worker_of(valkey_url, queue, webhooks):
        await until(lambda: len(hooked.got) == 4, "delivered")
        deliveries = client.queue(Queue(f"{{{queue.name}}}:hooks"))
        await until(lambda: _active(deliveries, 0), "settled")
    assert len({got.headers["webhook-id"] for got in hooked.got}) == 1
    job = await client.queue(queue).get(made.id)
    assert job is not None
    assert (job.status, job.starts) == ("completed", 1)


async def _active(jobs: Any, count: int) -> bool:
    stats = await jobs.stats()
    return bool(stats.active == count and stats.waiting == 0)


async def test_a_delivery_that_is_given_up_is_a_dead_letter_and_can_be_put_back(
    valkey_url: str, client: AsyncClient, queue: Queue[Any, Any], hooked: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    hooked.script = [500] * 4
    made = await client.queue(queue).enqueue("ok", webhook=hooked.url + "?token=s3cret")
    deliveries: Any = client.queue(Queue(f"{{{queue.name}}}:hooks"))
    async with worker_of(valkey_url, queue, webhooks):

        async def one_dead() -> bool:
            return len(await deliveries.dead()) == 1

        await until(one_dead, "given up")
        [id] = await deliveries.dead()
        dead = await deliveries.get(id)
        assert f"webhook of job '{made.id}', given up after 4 attempts" in dead.error
        assert await deliveries.retry_dead(id)
        await until(lambda: len(hooked.got) == 5, "sent again")
    assert "s3cret" not in dead.error
    assert "s3cret" not in caplog.text


async def test_a_slow_receiver_holds_no_job_up(
    valkey_url: str, client: AsyncClient, queue: Queue[Any, Any], hooked: Receiver
) -> None:
    hooked.script = ["slow headers"] * 3
    jobs = client.queue(queue)
    patient = Webhooks([SECRET], allow=["127.0.0.0/8"], timeout=30)
    async with worker_of(valkey_url, queue, patient, grace=0.1):
        for _ in range(3):
            await jobs.enqueue("ok", webhook=hooked.url)
        await until(lambda: len(hooked.got) == 3, "three deliveries hang")
        assert await jobs.wait((await jobs.enqueue("ok")).id, timeout=10) == {"said": "ok"}


async def test_a_message_can_carry_the_result(
    valkey_url: str, client: AsyncClient, queue: Queue[Any, Any], hooked: Receiver
) -> None:
    jobs = client.queue(queue)
    full = Webhooks([SECRET], allow=["127.0.0.0/8"], results=True)
    async with worker_of(valkey_url, queue, full):
        small = await jobs.enqueue("ok", webhook=hooked.url)
        large = await jobs.enqueue("x" * 17_000, webhook=hooked.url)
        failed = await jobs.enqueue("fail", webhook=hooked.url)
        await until(lambda: len(hooked.got) == 3, "told")
    told = {got.verified(SECRET)["data"]["id"]: got.verified(SECRET)["data"] for got in hooked.got}
    assert told[small.id]["result"] == {"said": "ok"}
    assert "result" not in told[large.id]
    assert "result" not in told[failed.id]
    assert all(len(got.body) < 20_000 for got in hooked.got)


async def test_a_result_of_a_later_job_under_the_same_id_is_not_taken_for_this_ones(
    valkey_url: str, client: AsyncClient, queue: Queue[Any, Any], hooked: Receiver
) -> None:
    jobs = client.queue(queue)
    await jobs.enqueue("first", id="same", webhook=hooked.url)
    full = Webhooks([SECRET], allow=["127.0.0.0/8"], results=True)
    alone = Worker(valkey_url)

    @alone.handles(queue)
    async def run(job: JobContext[Any]) -> Any:
        return job.payload

    async with alone:  # it delivers nothing
        await jobs.wait("same", timeout=20)
        await asyncio.sleep(0.01)
        await jobs.enqueue("second", id="same")
        await jobs.wait("same", timeout=20)
    async with worker_of(valkey_url, queue, full):
        await until(lambda: hooked.got, "told")
    assert "result" not in hooked.got[0].verified(SECRET)["data"]


async def test_a_namespace_keeps_its_deliveries_to_itself(
    valkey_url: str, queue: Queue[Any, Any], hooked: Receiver, raw: redis.Redis
) -> None:
    async with AsyncClient(redis_url=valkey_url, namespace="preview") as client:
        made = await client.queue(queue).enqueue("ok", webhook=hooked.url)
        async with worker_of(valkey_url, queue, webhooks, namespace="preview"):
            await until(lambda: hooked.got, "told")
        assert hooked.got[0].verified(SECRET)["data"] == {"id": made.id, "queue": queue.name, "status": "completed"}
    assert raw.exists(f"{{preview.{queue.name}}}:hooks:seq") == 1
    assert raw.exists(f"{{{queue.name}}}:hooks:seq") == 0


async def test_a_repeated_enqueue_keeps_the_first_webhook(
    valkey_url: str, client: AsyncClient, queue: Queue[Any, Any], hooked: Receiver
) -> None:
    jobs = client.queue(queue)
    first = await jobs.enqueue("ok", idempotency_key="k", webhook=hooked.url)
    again = await jobs.enqueue("ok", idempotency_key="k", webhook=hooked.url + "/other")
    assert (again.id, again.deduplicated) == (first.id, True)
    async with worker_of(valkey_url, queue, webhooks):
        await until(lambda: hooked.got, "told")
        await asyncio.sleep(0.1)
    assert [got.path for got in hooked.got] == ["/hook"]


def test_producers_are_told_what_cannot_be_a_webhook(valkey_url: str, queue_name: str) -> None:
    with Client(redis_url=valkey_url) as client:
        with pytest.raises(InvalidArgumentError, match="not https"):
            client.queue(Queue(queue_name)).enqueue("x", webhook="http://example.com/")
        with pytest.raises(InvalidArgumentError, match="delivers webhooks itself"):
            client.queue(Queue(f"{{{queue_name}}}:hooks")).enqueue("x", webhook="https://example.com/")


def test_the_command_shows_deliveries_like_any_queue(valkey_url: str, queue_name: str, raw: redis.Redis) -> None:
    with Client(redis_url=valkey_url) as client:
        jobs = client.queue(Queue(queue_name))
        jobs.cancel(jobs.enqueue("x", webhook="https://example.com/", owner="alice").id)

        def command(*words: str) -> Any:
            run = [sys.executable, "-m", "outlast_worker", *words, "--redis-url", valkey_url, "--json"]
            return json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout)

        jobs.cancel(command("enqueue", queue_name, "1", "--webhook", "https://example.com/")["id"])
    hooks = f"{{{queue_name}}}:hooks"
    rows = {row["queue"]: row for row in command("stats")["queues"]}
    assert rows[hooks]["waiting"] == 2
    assert rows[hooks]["unattended"] is True
    first, _ = sorted(key.decode().partition(":job:")[2] for key in raw.keys(f"{hooks}:job:*"))
    payload = command("get", hooks, first)["payload"]
    assert payload["status"] == "cancelled"
    assert payload["owner"] == "alice"
