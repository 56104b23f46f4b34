"""enqueue, get, cancel, stats, dead, retry_dead."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis

import outlast
from outlast.protocol import Keys
from outlast_worker.gateway import Faults

from .conftest import HTTP, Hand, Open


def record(raw: redis.Redis, keys: Keys, id: str) -> dict[str, str]:
    return {k.decode(): v.decode() for k, v in raw.hgetall(keys.job(id)).items()}  # type: ignore[union-attr]


def test_a_new_job_waits_and_get_shows_it(jobs: Any, hand: Hand) -> None:
    made = jobs.enqueue({"prompt": "hi"})
    assert not made.deduplicated
    assert re.fullmatch("[0-9A-Za-z]{24}", made.id)
    job = jobs.get(made.id)
    assert (job.id, job.status, job.payload, job.attempt, job.starts) == (made.id, "waiting", {"prompt": "hi"}, 0, 0)
    assert (job.result, job.error, job.progress, job.priority, job.max_attempts) == (None, None, 0.0, 0, 3)
    assert (job.owner, job.idempotency_key, job.cancel_requested) == (None, None, False)
    assert abs(job.created_at - datetime.now(UTC)) < timedelta(seconds=30)
    assert job.started_at is None
    assert job.finished_at is None
    hand.run(["a"], '"done"')
    job = jobs.get(made.id)
    assert (job.status, job.result, job.attempt, job.starts) == ("completed", "done", 1, 1)
    assert job.created_at <= job.started_at <= job.finished_at


def test_get_of_an_unknown_id_is_none(jobs: Any) -> None:
    assert jobs.get("nobody") is None


def test_what_enqueue_is_told_is_on_the_record(jobs: Any, raw: redis.Redis, keys: Keys) -> None:
    made = jobs.enqueue(
        1,
        priority=7,
        delay=timedelta(minutes=1),
        max_attempts=9,
        timeout=1.5,
        expires=90,
        deadline=timedelta(hours=1),
        result_ttl=42,
        owner="user:1",
        idempotency_key="k",
        idempotency_ttl=12,
    )
    fields = record(raw, keys, made.id)
    created = int(fields["createdAt"])
    assert fields["status"] == "scheduled"
    assert (fields["priority"], fields["maxAttempts"], fields["timeoutMs"]) == ("7", "9", "1500")
    assert (int(fields["expiresAt"]), int(fields["deadlineAt"])) == (created + 90_000, created + 3_600_000)
    assert (fields["resultTtlMs"], fields["owner"], fields["idemTtlMs"]) == ("42000", "user:1", "12000")
    job = jobs.get(made.id)
    assert (job.owner, job.priority, job.max_attempts, job.idempotency_key) == ("user:1", 7, 9, "k")


def test_an_id_of_ones_own_is_refused_while_its_job_lives_and_starts_clean_afterwards(jobs: Any, hand: Hand) -> None:
    assert jobs.enqueue("one", id="mine").id == "mine"
    with pytest.raises(outlast.JobInUseError) as caught:
        jobs.enqueue("two", id="mine")
    assert caught.value.job_id == "mine"
    hand.run(["old"], "1")
    assert jobs.enqueue("three", id="mine").id == "mine"
    job = jobs.get("mine")
    assert (job.status, job.payload, job.result, job.attempt) == ("waiting", "three", None, 0)
    hand.run(["new"], "3")
    assert [event.data for event in jobs.watch("mine") if event.type == "chunk"] == ["new"]


# -- idempotency -----------------------------------------------------------------------------------------------------


def test_h02_a_second_enqueue_with_the_key_gets_the_first_job(jobs: Any, hand: Hand) -> None:
    first = jobs.enqueue({"n": 1, "m": [2]}, idempotency_key="k")
    again = jobs.enqueue({"m": [2], "n": 1}, idempotency_key="k")  # the order of keys is no difference
    assert (again.id, again.deduplicated) == (first.id, True)
    hand.run(result='"paid once"')
    after = jobs.enqueue({"n": 1, "m": [2]}, idempotency_key="k")
    assert (after.id, after.deduplicated) == (first.id, True)
    assert jobs.wait(after.id, timeout=5) == "paid once"
    assert jobs.stats().waiting == 0


def test_the_key_with_another_payload_is_a_conflict_that_names_the_job(
    jobs: Any, open_jobs: Open, queue_name: str
) -> None:
    first = jobs.enqueue({"n": 1}, idempotency_key="k")
    with pytest.raises(outlast.IdempotencyConflictError) as caught:
        jobs.enqueue({"n": 2}, idempotency_key="k")
    assert caught.value.job_id == first.id
    lenient = open_jobs(outlast.Queue(queue_name, check_payload=False))
    assert lenient.enqueue({"n": 2}, idempotency_key="k").id == first.id


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_a_key_is_free_again_when_its_job_fails_or_is_cancelled(jobs: Any, hand: Hand, end: str) -> None:
    first = jobs.enqueue(1, idempotency_key="k")
    if end == "failed":
        hand.settle(hand.take(), "failed", "no")
    else:
        assert jobs.cancel(first.id)
    second = jobs.enqueue(1, idempotency_key="k")
    assert not second.deduplicated
    assert second.id != first.id


def test_h03_an_old_jobs_end_does_not_free_a_key_that_a_newer_job_holds(jobs: Any, hand: Hand) -> None:
    old = jobs.enqueue(1, idempotency_key="k")
    hand.settle(hand.take(), "failed", "no")
    new = jobs.enqueue(1, idempotency_key="k", delay=60)
    assert jobs.retry_dead(old.id)
    assert jobs.enqueue(1, idempotency_key="k").id == new.id
    assert jobs.cancel(old.id)
    assert jobs.enqueue(1, idempotency_key="k").id == new.id


def test_h04_a_key_never_outlives_the_record_that_it_answers_with(
    open_jobs: Open, queue_name: str, hand: Hand, raw: redis.Redis, keys: Keys
) -> None:
    jobs = open_jobs(outlast.Queue(queue_name, result_ttl=60, idempotency_ttl=3600))
    made = jobs.enqueue(1, idempotency_key="k")
    job = hand.take()
    hand.settle(job, ttl_ms=100)  # as a worker does that keeps results for 0.1 s
    assert raw.pttl(keys.idem("k")) <= 100  # type: ignore[operator]
    until = time.monotonic() + 10
    while raw.exists(keys.job(made.id)):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert not jobs.enqueue(1, idempotency_key="k").deduplicated


# -- delays and other arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "delay", [-1, -(10**15), 2**31, 2**53, 10**20, float("nan"), float("inf"), "100", True, None, timedelta(days=-1)]
)
def test_h28_a_delay_that_is_none_is_refused_before_anything_is_written(
    jobs: Any, raw: redis.Redis, keys: Keys, delay: Any
) -> None:
    with pytest.raises(outlast.InvalidArgumentError, match="delay"):
        jobs.enqueue(1, delay=delay)
    assert raw.keys(keys.base + "*") == []


def test_h28_delays_up_to_a_year_are_kept_to_the_millisecond(jobs: Any, raw: redis.Redis, keys: Keys) -> None:
    for delay, ms in ((0.5, 500), (0.0001, 1), (timedelta(days=365), 365 * 86_400_000)):
        id = jobs.enqueue(1, delay=delay).id
        assert raw.zscore(keys.scheduled, id) == int(record(raw, keys, id)["createdAt"]) + ms
    assert jobs.get(jobs.enqueue(1, delay=0).id).status == "waiting"
    assert jobs.stats().scheduled == 3


@pytest.mark.parametrize(
    "options",
    [
        {"priority": 10},
        {"priority": -1},
        {"priority": 1.5},
        {"priority": True},
        {"max_attempts": 0},
        {"timeout": 0},
        {"result_ttl": 0.5},
        {"idempotency_ttl": 5},
        {"owner": ""},
        {"owner": "a\nb"},
        {"idempotency_key": ""},
        {"delay": 10, "expires": 10},
        {"delay": 10, "deadline": 5},
    ],
    ids=str,
)
def test_an_argument_that_cannot_work_is_named_and_nothing_is_written(
    jobs: Any, raw: redis.Redis, keys: Keys, options: dict[str, Any]
) -> None:
    with pytest.raises(outlast.InvalidArgumentError) as caught:
        jobs.enqueue(1, **options)
    assert any(name in str(caught.value) for name in options)
    assert isinstance(caught.value, ValueError)
    assert raw.keys(keys.base + "*") == []


# -- cancel ----------------------------------------------------------------------------------------------------------


def test_h14_cancel_in_every_state(jobs: Any, hand: Hand, raw: redis.Redis, keys: Keys) -> None:
    waiting = jobs.enqueue("waiting", priority=0).id
    delayed = jobs.enqueue("delayed", delay=60).id
    running = jobs.enqueue("running", priority=9).id
    held = hand.take()
    retried = jobs.enqueue("retried", priority=8).id
    hand.retry(hand.take(), delay_ms=60_000)
    done = jobs.enqueue("done", priority=8).id
    hand.run()
    dead = jobs.enqueue("dead", priority=8).id
    hand.settle(hand.take(), "failed", "no")
    for id in (waiting, delayed, retried, running):
        assert jobs.cancel(id) is True
        assert jobs.cancel(id) is True, "the answer to a repeat is the same"
    assert [jobs.get(id).status for id in (waiting, delayed, retried)] == ["cancelled"] * 3
    for id in (waiting, delayed, retried):
        assert [event.type for event in jobs.watch(id)][-1] == "cancelled"
    assert jobs.get(running).cancel_requested
    assert hand.say(held, "late") == "cancel"
    assert hand.settle(held, "completed", '"too late"') == "cancelled"
    job = jobs.get(running)
    assert (job.status, job.result) == ("cancelled", None)
    assert [jobs.cancel(id) for id in (done, dead, "unknown")] == [False, False, False]
    assert not raw.exists(keys.job("unknown"))
    assert hand.reserve() == []


@pytest.mark.parametrize("driver", HTTP, indirect=True)
def test_h49_cancel_works_in_a_full_database(jobs: Any, hand: Hand, faults: Faults) -> None:
    id = jobs.enqueue(1).id
    hand.take()
    faults.error("OOM command not allowed when used memory > 'maxmemory'.", command="EVALSHA")
    assert jobs.cancel(id) is True
    faults.error("OOM command not allowed when used memory > 'maxmemory'.", command="EVALSHA")
    with pytest.raises(outlast.StoreFullError):
        jobs.enqueue(1)


# -- counting and dead letters -----------------------------------------------------------------------------------------


def test_stats_counts_every_place_and_the_age_of_the_oldest(jobs: Any, hand: Hand) -> None:
    empty = jobs.stats()
    assert empty == outlast.Stats(waiting=0, scheduled=0, active=0, dead=0, oldest_waiting=None)
    jobs.enqueue(1, priority=9)
    hand.take()
    jobs.enqueue(2, priority=9)
    hand.settle(hand.take(), "failed", "no")
    jobs.enqueue(3, delay=60)
    jobs.enqueue(4)
    jobs.enqueue(5, priority=5)
    stats = jobs.stats()
    assert (stats.waiting, stats.scheduled, stats.active, stats.dead) == (2, 1, 1, 1)
    assert 0 <= stats.oldest_waiting < 30


def test_dead_lists_what_is_still_kept_oldest_first(jobs: Any, hand: Hand, raw: redis.Redis, keys: Keys) -> None:
    ids = [jobs.enqueue(n).id for n in range(5)]
    for _ in ids:
        hand.settle(hand.take(), "failed", "no")
        time.sleep(0.002)
    raw.delete(keys.job(ids[0]))
    assert jobs.dead() == ids[1:]
    assert jobs.dead(count=2) == ids[1:3]
    assert jobs.get(ids[1]).error == "no"
    for count in (0, -1, True, "5"):
        with pytest.raises(outlast.InvalidArgumentError):
            jobs.dead(count=count)


def test_h25_retry_dead_succeeds_once_and_the_watcher_starts_over(jobs: Any, hand: Hand) -> None:
    payload = "x" * 100_000
    id = jobs.enqueue(payload).id
    job = hand.take()
    hand.say(job, *(f"old{n}" for n in range(50)))
    hand.settle(job, "failed", "no")
    cursor = next(e.id for e in jobs.watch(id) if e.type == "chunk" and e.data == "old49")
    assert jobs.retry_dead(id) is True
    assert jobs.retry_dead(id) is False
    again = hand.take()
    assert (again.payload, again.attempt) == (f'"{payload}"', 1)
    assert jobs.retry_dead(id) is False
    hand.say(again, "new")
    hand.settle(again, body='"fine"')
    assert jobs.retry_dead(id) is False
    events = list(jobs.watch(id, after=cursor))
    assert [e.type for e in events] == ["restarted", "chunk", "completed"]
    assert events[1].data == "new"
    assert jobs.wait(id, timeout=5) == "fine"


def test_retry_dead_takes_its_own_count_of_attempts(jobs: Any, hand: Hand) -> None:
    id = jobs.enqueue(1, max_attempts=1).id
    hand.settle(hand.take(), "failed", "no")
    assert jobs.retry_dead(id, max_attempts=7)
    assert jobs.get(id).max_attempts == 7
    assert jobs.retry_dead("unknown") is False


# -- ids -------------------------------------------------------------------------------------------------------------

GOOD_IDS = [
    "a:b", ":a", "a:b:c", "-rf", "--help", "123", "007", "{x}", "}{", "a b", " a", "a/b?c#d%2F", "..", ".",
    "\u00e9", "e\u0301", "🙂", "None", "null", "*", "a*", "x" * 512, "ready", "events:1", "job:1", "1:lock", "signal",
]  # fmt: skip
BAD_IDS: list[Any] = ["a\nb", "a\r\nevent: x", "\x00", "\x85", "\u2028", "x" * 513, "x" * 100_000, "", 123, "\ud83d"]


def test_h43_every_id_that_is_accepted_works_in_every_call(jobs: Any, hand: Hand) -> None:
    for number, id in enumerate(GOOD_IDS):
        assert jobs.enqueue(number, id=id, idempotency_key=id, max_attempts=1).id == id
    assert [jobs.get(id).payload for id in GOOD_IDS] == list(range(len(GOOD_IDS)))
    for id in GOOD_IDS:
        job = hand.take()
        assert job.id == id
        hand.say(job, id)
        hand.settle(job, "failed", "no")
    assert sorted(jobs.dead()) == sorted(GOOD_IDS)
    for id in GOOD_IDS:
        assert [e.data for e in jobs.watch(id) if e.type == "chunk"] == [id]
        assert jobs.retry_dead(id)
        assert jobs.cancel(id)
        assert jobs.events(id).done


@pytest.mark.parametrize("id", BAD_IDS, ids=lambda id: repr(id)[:20])
def test_h43_any_other_id_is_refused_by_every_call_before_it_is_sent(jobs: Any, id: Any) -> None:
    for call in (jobs.get, jobs.cancel, jobs.watch, jobs.wait, jobs.events, jobs.retry_dead):
        with pytest.raises(outlast.InvalidArgumentError, match=r"^id"):
            call(id)
    with pytest.raises(outlast.InvalidArgumentError, match=r"^id"):
        jobs.enqueue(1, id=id)
    with pytest.raises(outlast.InvalidArgumentError, match="idempotency_key"):
        jobs.enqueue(1, idempotency_key=id)


def test_h44_queues_and_jobs_share_no_key(open_jobs: Open, queue_name: str, hand: Hand, raw: redis.Redis) -> None:
    names = (queue_name, queue_name + ":job")
    ids = ("ready", "events:1", "job:1", "1:lock", "signal")
    for name in names:
        jobs = open_jobs(outlast.Queue(name))
        for id in ids:
            jobs.enqueue(name, id=id, idempotency_key=id)
    for id in ids:
        assert hand.run([id], f'"{id}"').id == id
    other = open_jobs(outlast.Queue(names[1]))
    assert other.stats().waiting == len(ids)
    assert {other.get(id).payload for id in ids} == {names[1]}
    for key in raw.scan_iter(f"*{queue_name}*"):
        kind = raw.type(key).decode()  # type: ignore[union-attr]
        part = key.decode().partition("}:")[2]
        expected = {
            "ready": "zset", "leases": "zset", "seq": "string", "signal": "list", "job": "hash", "events": "stream",
            "idem": "string", "take": "string",
        }  # fmt: skip
        assert kind == expected[part.partition(":")[0]], key
