"""Jobs by state, paged."""

from __future__ import annotations

from typing import Any

import pytest
import redis

import outlast
from outlast.protocol import Keys

from .conftest import Hand


def walk(jobs: Any, state: str, **options: Any) -> list[list[str]]:
    """The ids on each page, to the last."""
    pages: list[list[str]] = []
    cursor: str | None = None
    while True:
        page = jobs.by_state(state, cursor=cursor, **options)
        pages.append([job.id for job in page.jobs])
        cursor = page.next
        if cursor is None:
            return pages


def test_each_job_is_listed_where_it_is(jobs: Any, hand: Hand) -> None:
    running = jobs.enqueue("a", owner="ann").id
    job = hand.take()
    dead = jobs.enqueue("b", max_attempts=1).id
    hand.settle(hand.take(), "failed", "Error: no")
    waiting = jobs.enqueue("c").id
    later = jobs.enqueue("d", delay=60).id
    [listed] = jobs.by_state("active").jobs
    assert (listed.id, listed.status, listed.attempt, listed.owner) == (running, "active", 1, "ann")
    assert (listed.worker, listed.due_at) == (job.token.rpartition(":")[0], None)
    [listed] = jobs.by_state("dead").jobs
    assert (listed.id, listed.status, listed.error, listed.worker) == (dead, "failed", "Error: no", None)
    [listed] = jobs.by_state("waiting").jobs
    assert (listed.id, listed.status, listed.due_at) == (waiting, "waiting", None)
    [listed] = jobs.by_state("scheduled").jobs
    assert listed.id == later
    assert 59 <= (listed.due_at - listed.created_at).total_seconds() <= 61
    assert repr(listed) == f"ListedJob(id={later!r}, status='scheduled', attempt=0)"


def test_h67_pages_hold_every_job_once_in_the_order_of_their_turn(jobs: Any) -> None:
    low = [jobs.enqueue(n).id for n in range(4)]
    high = [jobs.enqueue(n, priority=9).id for n in range(3)]
    assert walk(jobs, "waiting", limit=3) == [high, low[:3], low[3:]]
    assert walk(jobs, "waiting", limit=7) == [high + low]
    back = [*low[::-1], *high[::-1]]
    assert walk(jobs, "waiting", limit=3, reverse=True) == [back[:3], back[3:6], back[6:]]
    assert walk(jobs, "dead") == [[]]


def test_h67_what_is_taken_or_added_between_two_pages_hides_nothing(jobs: Any, hand: Hand) -> None:
    ids = [jobs.enqueue(n).id for n in range(6)]
    first = jobs.by_state("waiting", limit=2)
    hand.reserve(3)  # the two that were shown, and one that was not
    urgent = jobs.enqueue("new", priority=9).id
    second = jobs.by_state("waiting", limit=2, cursor=first.next)
    assert [job.id for job in second.jobs] == ids[3:5]
    third = jobs.by_state("waiting", limit=2, cursor=second.next)
    assert [job.id for job in third.jobs] == ids[5:]
    assert third.next is None
    assert [job.id for job in jobs.by_state("waiting", limit=1).jobs] == [urgent]


@pytest.mark.parametrize("reverse", [False, True])
def test_h67_thousands_that_are_due_in_one_moment_are_paged_in_few_commands(
    reverse: bool, jobs: Any, raw: redis.Redis, keys: Keys
) -> None:
    ids = sorted(f"job-{n:04}" for n in range(3000))
    pipeline = raw.pipeline(transaction=False)
    for id in ids:
        pipeline.hset(keys.job(id), mapping={"id": id, "status": "scheduled", "payload": "1"})
    pipeline.zadd(keys.scheduled, dict.fromkeys(ids, 4000000000000))
    pipeline.execute()
    ordered = ids[::-1] if reverse else ids
    cursor = f"4000000000000:{ordered[1999]}"
    page = jobs.by_state("scheduled", limit=5, cursor=cursor, reverse=reverse)
    assert [job.id for job in page.jobs] == ordered[2000:2005]
    raw.zrem(keys.scheduled, ordered[2004])  # the entry of the cursor itself may be gone
    page = jobs.by_state("scheduled", limit=5, cursor=page.next, reverse=reverse)
    assert [job.id for job in page.jobs] == ordered[2005:2010]
    last = jobs.by_state("scheduled", limit=5, cursor=f"4000000000000:{ordered[2995]}", reverse=reverse)
    assert [job.id for job in last.jobs] == ordered[2996:]
    assert last.next is None


def test_entries_without_a_record_or_with_another_state_are_left_out(jobs: Any, raw: redis.Redis, keys: Keys) -> None:
    ids = [jobs.enqueue(n).id for n in range(3)]
    raw.delete(keys.job(ids[0]))
    raw.hset(keys.job(ids[1]), "status", "completed")
    page = jobs.by_state("waiting", limit=2)
    assert page.jobs == []
    assert page.next is not None
    assert [job.id for job in jobs.by_state("waiting", cursor=page.next).jobs] == [ids[2]]


def test_a_listing_reads_no_payload(jobs: Any, raw: redis.Redis) -> None:
    for _ in range(10):
        jobs.enqueue("x" * 100_000)
    before = raw.info("stats")["total_net_output_bytes"]
    page = jobs.by_state("waiting")
    assert len(page.jobs) == 10
    assert raw.info("stats")["total_net_output_bytes"] - before < 100_000
    assert not hasattr(page.jobs[0], "payload")


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        ("completed", {}, "keeps no list of jobs that completed"),
        ("cancelled", {}, "keeps no list"),
        ("running", {}, "state='running' is none of waiting, scheduled, active, dead"),
        ("waiting", {"limit": 101}, "limit=101 is out of range"),
        ("waiting", {"cursor": "1-0"}, "cursor is not one that a page gave"),
        ("waiting", {"cursor": "nan:x"}, "cursor is not one that a page gave"),
        ("waiting", {"cursor": ""}, "cursor is not one that a page gave"),
    ],
)
def test_a_wrong_question_is_refused(state: str, options: dict[str, Any], message: str, jobs: Any) -> None:
    with pytest.raises(outlast.InvalidArgumentError, match=message):
        jobs.by_state(state, **options)
