"""Databases with replicas that lag, and tokens that may only read."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from upstash_redis import Redis as UpstashRedis

import outlast
from outlast.protocol import Keys, calls, holding, tail
from outlast.upstash import UpstashTransport
from outlast_worker.gateway import Database, Faults, GatewayConfig, GatewayServer

TOKEN = "the-token-that-writes"
READER = "the-token-that-reads"


@pytest.fixture
def gateway(valkey_url: str) -> Iterator[GatewayServer]:
    database = Database(redis_url=valkey_url, token=TOKEN, readonly_token=READER)
    with GatewayServer(GatewayConfig(databases=[database], faults=Faults())) as server:
        yield server


@pytest.fixture
def faults(gateway: GatewayServer) -> Faults:
    assert gateway.gateway.config.faults is not None
    return gateway.gateway.config.faults


@pytest.fixture
def queue(queue_name: str) -> outlast.Queue[Any, Any]:
    return outlast.Queue(queue_name)


def test_the_sync_token_of_an_enqueue_lets_another_client_see_the_job(
    gateway: GatewayServer, faults: Faults, queue: outlast.Queue[Any, Any]
) -> None:
    with outlast.Client(gateway.url, TOKEN) as producer, outlast.Client(gateway.url, TOKEN) as stranger:
        assert stranger.queue(queue).get("nobody") is None
        faults.replica_lag()
        assert stranger.queue(queue).get("nobody") is None  # the copy is taken now
        made = producer.queue(queue).enqueue("x")
        assert made.sync_token
        assert producer.sync_token == made.sync_token
        assert producer.queue(queue).get(made.id) is not None, "a client sees its own writes"
        with outlast.Client(gateway.url, TOKEN) as lagging:
            assert lagging.queue(queue).get(made.id) is None
        with outlast.Client(gateway.url, TOKEN, sync_token=made.sync_token) as told:
            assert told.queue(queue).get(made.id) is not None

        async def main() -> None:
            async with outlast.AsyncClient(gateway.url, TOKEN, sync_token=made.sync_token) as told:
                assert await told.queue(queue).get(made.id) is not None
                assert told.sync_token is not None

        asyncio.run(main())


def test_with_read_regions_a_job_is_unknown_only_after_three_seconds(
    gateway: GatewayServer, faults: Faults, queue: outlast.Queue[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tail.REGION_LAG == 3.0
    monkeypatch.setattr(tail, "REGION_LAG", 1.0)  # the test's three seconds
    with (
        outlast.Client(gateway.url, TOKEN) as producer,
        outlast.Client(gateway.url, TOKEN) as strict,
        outlast.Client(gateway.url, TOKEN, read_regions=True) as patient,
    ):
        faults.replica_lag()
        assert strict.queue(queue).get("nobody") is None
        id = producer.queue(queue).enqueue("x").id
        producer.queue(queue).cancel(id)
        with pytest.raises(outlast.JobNotFoundError):
            list(strict.queue(queue).watch(id))
        catching_up = threading.Timer(0.3, faults.clear)
        catching_up.start()
        assert [event.type for event in patient.queue(queue).watch(id)] == ["cancelled"]
        catching_up.join()
        for follow in (lambda: list(patient.queue(queue).watch("nobody")), lambda: patient.queue(queue).wait("nobody")):
            begin = time.monotonic()
            with pytest.raises(outlast.JobNotFoundError):
                follow()
            assert 0.6 < time.monotonic() - begin < 6


def test_the_read_only_token_is_enough_to_look_and_not_to_touch(
    gateway: GatewayServer, queue: outlast.Queue[Any, Any], raw: redis.Redis
) -> None:
    with outlast.Client(gateway.url, TOKEN) as writer, outlast.Client(gateway.url, READER) as reader:
        id = writer.queue(queue).enqueue("x").id
        looking = reader.queue(queue)
        assert looking.stats().waiting == 1
        assert looking.dead() == []
        writer.queue(queue).cancel(id)
        job = looking.get(id)
        assert job is not None
        assert job.status == "cancelled"
        assert [event.type for event in looking.watch(id)] == ["cancelled"]
        assert looking.events(id).done
        with pytest.raises(outlast.JobCancelledError):
            looking.wait(id, timeout=5)
        for touch in (lambda: looking.enqueue("y"), lambda: looking.cancel(id), lambda: looking.retry_dead(id)):
            with pytest.raises(outlast.AuthError, match="read-only token") as caught:
                touch()
            assert caught.value.code == "NOPERM"
            assert READER not in str(caught.value)


def test_the_upstash_adapter_undoes_the_clients_formatting(
    gateway: GatewayServer, queue_name: str, raw: redis.Redis
) -> None:
    """HGETALL comes as a dict there, an empty XREAD as a list, TIME as a tuple."""
    upstash = UpstashRedis(gateway.url, TOKEN, rest_retries=0)
    transport = UpstashTransport(upstash)
    keys = Keys(queue_name)
    transport.send(holding.seen(keys, "w1", "now"))
    transport.send(holding.seen(keys, "w2", "then"))
    assert transport.send(calls.workers(keys)) == {"w1": "now", "w2": "then"}
    assert transport.send_many([calls.workers(keys), calls.cancel(keys, "x", result_ttl_ms=1)]) == [
        {"w1": "now", "w2": "then"},
        "unknown",
    ]
    upstash.close()
