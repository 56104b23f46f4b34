"""What happens when the answer stays away: the gateway runs the command and cuts the connection."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import Any

import pytest
import upstash_redis

import outlast
from outlast_worker.gateway import Faults, GatewayServer

from .conftest import HTTP, TOKEN, Hand


@pytest.fixture(params=HTTP)
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_h01_a_lost_reply_to_enqueue_makes_no_second_job(jobs: Any, hand: Hand, faults: Faults, driver: str) -> None:
    rule = faults.drop_reply(command="EVALSHA")
    if driver.startswith("upstash"):
        # That client says no more than that it failed, so the outcome is unknown, but the id is not.
        with pytest.raises(outlast.TransportError) as caught:
            jobs.enqueue("x")
        assert caught.value.maybe_applied
        id = caught.value.job_id
    else:
        made = jobs.enqueue("x")
        assert not made.deduplicated
        id = made.id
    assert rule.fired == 1
    assert jobs.stats().waiting == 1
    assert [job.id for job in hand.reserve(10)] == [id]


def test_h01_a_request_that_never_arrived_is_made_up_for(jobs: Any, hand: Hand, faults: Faults, driver: str) -> None:
    faults.drop_reply(command="EVALSHA", executed=False)
    if driver.startswith("upstash"):
        with pytest.raises(outlast.TransportError) as caught:
            jobs.enqueue("x")
        assert jobs.get(caught.value.job_id) is None
    else:
        id = jobs.enqueue("x").id
        assert [job.id for job in hand.reserve(10)] == [id]


@pytest.mark.parametrize("driver", HTTP[:2], indirect=True)
@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("id", [None, "mine"])
def test_h01_the_repeat_of_any_enqueue_gets_the_answer_of_the_first(
    jobs: Any, hand: Hand, faults: Faults, key: str | None, id: str | None
) -> None:
    for delay in (0, 60):
        faults.drop_reply(command="EVALSHA", times=2)
        made = jobs.enqueue("x", id=id, idempotency_key=key, delay=delay)
        assert made.deduplicated is False
        assert jobs.cancel(made.id)
    assert jobs.stats().waiting == 0
    assert jobs.stats().scheduled == 0


@pytest.mark.parametrize("driver", HTTP[:2], indirect=True)
def test_a_repeat_of_cancel_and_retry_dead_gets_the_answer_of_the_first(jobs: Any, hand: Hand, faults: Faults) -> None:
    id = jobs.enqueue("x").id
    hand.settle(hand.take(), "failed", "no")
    faults.drop_reply(command="EVALSHA")
    assert jobs.retry_dead(id) is True
    faults.drop_reply(command="EVALSHA")
    assert jobs.cancel(id) is True
    assert jobs.stats().waiting == 0


def test_a_forgotten_script_heals_unseen(jobs: Any, faults: Faults, driver: str) -> None:
    rule = faults.noscript(times=3)
    ids = {jobs.enqueue("x").id for _ in range(3)}
    assert rule.fired == 3
    assert {id for id in ids if jobs.get(id)} == ids


def test_h45_watch_survives_faults_and_gives_each_event_once(jobs: Any, hand: Hand, faults: Faults) -> None:
    id = jobs.enqueue("x").id
    job = hand.take()
    for n in range(40):
        hand.say(job, f"{n},")
    seen = []
    watching = jobs.watch(id, poll=0.01)
    for n, event in enumerate(watching):
        seen.append(event)
        if n == 39:
            faults.canned("html_502", times=3)
            hand.say(job, "40,")
        elif n == 40:
            faults.drop_reply(times=2)
            hand.settle(job)
    assert [e.type for e in seen] == ["chunk"] * 41 + ["completed"]
    assert "".join(e.data for e in seen[:-1]) == "".join(f"{n}," for n in range(41))


def test_h02_a_hundred_concurrent_enqueues_with_one_key(
    queue: outlast.Queue[Any, Any], hand: Hand, gateway: GatewayServer, valkey_url: str, driver: str
) -> None:
    """Fifty over HTTP and fifty over TCP, from one client each."""
    start = threading.Barrier(50, timeout=30)
    tcp = outlast.Client(redis_url=valkey_url)

    def plain(client: outlast.Client) -> outlast.Enqueued:
        start.wait()
        return client.queue(queue).enqueue({"n": 1}, idempotency_key="k1")

    async def all_async() -> list[outlast.Enqueued]:
        async with outlast.AsyncClient(gateway.url, TOKEN) as rest, outlast.AsyncClient(valkey_url) as tcp:
            return await asyncio.gather(
                *(c.queue(queue).enqueue({"n": 1}, idempotency_key="k1") for c in (rest, tcp) for _ in range(50))
            )

    if driver.endswith("async"):
        answers = asyncio.run(all_async())
    else:
        redis = upstash_redis.Redis(gateway.url, TOKEN, rest_retries=0)
        over = outlast.Client(gateway.url, TOKEN) if driver == "httpx" else outlast.Client(upstash=redis)
        with concurrent.futures.ThreadPoolExecutor(50) as pool, over, tcp:
            answers = list(pool.map(plain, [over, tcp] * 25))
        redis.close()
    assert len({answer.id for answer in answers}) == 1
    assert sum(not answer.deduplicated for answer in answers) == 1
    assert len(hand.reserve(10)) == 1
