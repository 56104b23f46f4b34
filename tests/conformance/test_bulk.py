"""enqueue_many and purge."""

from __future__ import annotations

from typing import Any

import pytest
import redis

import outlast
from outlast import NewJob
from outlast.protocol import Keys
from outlast_worker.gateway import Faults, GatewayServer

from .conftest import HTTP, Hand, Open


def test_many_jobs_are_made_in_their_order_each_with_its_options(jobs: Any, hand: Hand) -> None:
    made = jobs.enqueue_many(["a", NewJob("b", id="mine", owner="ann", priority=9), NewJob("c", delay=60), "d"])
    assert [one.deduplicated for one in made] == [False] * 4
    assert made[1].id == "mine"
    assert [jobs.get(one.id).payload for one in made] == ["a", "b", "c", "d"]
    assert jobs.get("mine").owner == "ann"
    assert jobs.get(made[2].id).status == "scheduled"
    assert [job.id for job in hand.reserve(5)] == ["mine", made[0].id, made[3].id]
    assert jobs.enqueue_many([]) == []


def test_a_key_gives_one_job_within_a_batch_and_over_batches(jobs: Any) -> None:
    batch = [NewJob(n % 3, idempotency_key=f"k{n % 3}") for n in range(6)]
    first = jobs.enqueue_many(batch)
    assert [one.deduplicated for one in first] == [False, False, False, True, True, True]
    assert [one.id for one in first[:3]] == [one.id for one in first[3:]]
    again = jobs.enqueue_many(iter(batch))
    assert all(one.deduplicated for one in again)
    assert [one.id for one in again] == [one.id for one in first]
    assert jobs.stats().waiting == 3


def test_one_that_is_refused_stops_no_other_and_the_error_says_what_became_of_each(jobs: Any) -> None:
    jobs.enqueue("old", id="taken")
    jobs.enqueue("old", idempotency_key="k")
    batch = ["a", NewJob("b", id="taken"), NewJob("c", idempotency_key="k"), "d"]
    with pytest.raises(outlast.BulkEnqueueError, match=r"2 of 4 jobs were not made.*JobInUseError") as caught:
        jobs.enqueue_many(batch)
    outcomes = caught.value.outcomes
    kinds = [type(one).__name__ for one in outcomes]
    assert kinds == ["Enqueued", "JobInUseError", "IdempotencyConflictError", "Enqueued"]
    assert [jobs.get(outcomes[at].id).payload for at in (0, 3)] == ["a", "d"]
    assert jobs.stats().waiting == 4


def test_all_are_checked_before_anything_is_written(open_jobs: Open, queue_name: str) -> None:
    jobs = open_jobs(outlast.Queue(queue_name, payload=str))
    for wrong, message in (
        (["a", 7], "job 1 of jobs: payload of queue .*"),
        (["a", NewJob("b", priority=10)], "job 1 of jobs: priority=10 is out of range"),
        ((str(n) for n in range(10_001)), "jobs has more than 10000"),
        ("letters", "jobs is str; give a list"),
        ({"a": 1}, "jobs is dict; give a list"),
    ):
        with pytest.raises(outlast.InvalidArgumentError, match=message):
            jobs.enqueue_many(wrong)
    assert jobs.stats().waiting == 0


def test_h67_a_thousand_jobs_are_one_round_trip_and_more_or_larger_ones_are_several(
    open_jobs: Open, queue: Any, driver: str, gateway: GatewayServer, raw: redis.Redis
) -> None:
    jobs = open_jobs(queue)
    if driver in ("httpx", "httpx-async"):
        raw.script_flush()  # the first of a thousand brings the script for all: 4 KB, not 4 MB
    before = raw.info("stats")["total_net_input_bytes"]
    made = jobs.enqueue_many(range(1_001) if driver in ("httpx", "tcp") else range(50))
    assert len({one.id for one in made}) == jobs.stats().waiting == len(made)
    sent = raw.info("stats")["total_net_input_bytes"] - before
    assert sent < 700 * len(made) + 20_000
    jobs.enqueue_many(["x" * 900_000] * 3)
    assert jobs.stats().waiting == len(made) + 3


@pytest.mark.parametrize("driver", HTTP[:2], indirect=True)
def test_h01_a_lost_reply_to_a_batch_makes_no_second_job(jobs: Any, faults: Faults) -> None:
    lost = faults.drop_reply(command="EVALSHA")
    made = jobs.enqueue_many(["a", "b", "c"])
    assert [one.deduplicated for one in made] == [False] * 3
    assert lost.spent
    assert jobs.stats().waiting == 3
    assert sorted(job.id for job in jobs.by_state("waiting").jobs) == sorted(one.id for one in made)


def test_without_a_server_each_job_has_the_id_that_it_has_if_it_was_made(queue: Any) -> None:
    with outlast.Client("http://127.0.0.1:9", "t", timeout=0.3) as client:
        jobs = client.queue(queue)
        with pytest.raises(outlast.BulkEnqueueError, match="1001 of 1001") as caught:
            jobs.enqueue_many([NewJob(n, id=f"job-{n}") for n in range(1_001)])
    first, *_, last = caught.value.outcomes
    assert isinstance(first, outlast.TransportError)
    assert isinstance(last, outlast.TransportError)
    assert (first.job_id, last.job_id) == ("job-0", "job-1000")
    assert not last.maybe_applied
    assert "not sent" in str(last)


# -- purge -----------------------------------------------------------------------------------------------------------


def test_h67_a_purge_cancels_what_waits_and_lets_the_rest_go_on(
    jobs: Any, hand: Hand, raw: redis.Redis, keys: Keys
) -> None:
    ids = [one.id for one in jobs.enqueue_many([NewJob(n, idempotency_key=f"k{n}") for n in range(250)])]
    running = hand.take()
    jobs.enqueue("later", delay=60)
    assert jobs.purge("waiting") == 249
    stats = jobs.stats()
    assert (stats.waiting, stats.active, stats.scheduled) == (0, 1, 1)
    assert jobs.get(ids[200]).status == "cancelled"
    assert [event.type for event in jobs.watch(ids[200])] == ["cancelled"]
    assert not jobs.enqueue(200, idempotency_key="k200").deduplicated, "its key is free"
    assert hand.settle(running) == "completed"
    assert jobs.purge("scheduled") == 1
    assert jobs.purge("scheduled") == 0


def test_a_purge_spares_what_is_younger(jobs: Any, raw: redis.Redis, keys: Keys) -> None:
    old, young = (jobs.enqueue(n).id for n in range(2))
    raw.hincrby(keys.job(old), "createdAt", -60_000)
    assert jobs.purge("waiting", older_than=30) == 1
    assert (jobs.get(old).status, jobs.get(young).status) == ("cancelled", "waiting")


def test_a_purge_of_the_dead_leaves_nothing_of_them(jobs: Any, hand: Hand, raw: redis.Redis, keys: Keys) -> None:
    jobs.enqueue_many([NewJob(n, id=f"job-{n}", max_attempts=1) for n in range(103)])
    for job in hand.reserve(100) + hand.reserve(3):
        hand.settle(job, "failed", "Error: no")
    jobs.cancel(jobs.enqueue("again", id="job-5").id)  # no longer dead, under an id that was
    assert jobs.purge("dead", older_than=60) == 0
    assert jobs.purge("dead") == 102
    assert jobs.stats().dead == 0
    assert jobs.get("job-5").status == "cancelled"
    assert {key.decode() for key in raw.scan_iter(keys.base + "*") if b"job-" in key} == {
        keys.job("job-5"),
        keys.events("job-5"),
    }
    assert jobs.get("job-6") is None


def test_what_runs_is_not_purged(jobs: Any) -> None:
    with pytest.raises(outlast.InvalidArgumentError, match="what runs is not purged"):
        jobs.purge("active")
