"""watch, events and wait: order, resuming, restarts, gaps, the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import redis

import outlast
from outlast.protocol import Keys

from .conftest import Hand, Open


def text(events: list[Any]) -> str:
    return "".join(event.data for event in events if event.type == "chunk")


def types(events: list[Any]) -> list[str]:
    return [event.type for event in events]


@contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[None]:
    """Do `work` in a thread while the caller watches; its failure is the test's."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if failures:
        raise failures[0]


def test_watch_gives_everything_in_order_and_ends_after_the_end(jobs: Any, hand: Hand) -> None:
    id = jobs.enqueue("x").id

    def work() -> None:
        job = hand.take()
        for n in range(20):
            hand.emit(job, ("chunk", f"{n},"), ("progress", str(n / 20)))
            time.sleep(0.005)
        hand.emit(job, ("data", '{"a":[1]}'))
        hand.settle(job, body='"done"')

    with meanwhile(work):
        events = list(jobs.watch(id))
    assert text(events) == "".join(f"{n}," for n in range(20))
    assert [e.value for e in events if e.type == "progress"] == [n / 20 for n in range(20)]
    assert (events[-2].type, events[-2].value) == ("data", {"a": [1]})
    assert (events[-1].type, events[-1].result, events[-1].attempt) == ("completed", "done", 1)


def test_watch_resumes_strictly_after_each_cursor(jobs: Any, hand: Hand) -> None:
    id = jobs.enqueue("x").id
    hand.run([str(n) for n in range(9)])
    events = list(jobs.watch(id))
    assert types(events) == ["chunk"] * 9 + ["completed"]
    for n, event in enumerate(events):
        assert list(jobs.watch(id, after=event.id)) == events[n + 1 :]
    for start in (None, "", "0", "0-0"):
        assert list(jobs.watch(id, after=start)) == events
    assert types(list(jobs.watch(id, after="latest"))) == ["completed"]


def test_watch_from_latest_gives_only_what_is_still_to_come(jobs: Any, hand: Hand) -> None:
    id = jobs.enqueue("x").id
    job = hand.take()
    hand.say(job, "before")
    watching = jobs.watch(id, after="latest", timeout=5)

    def work() -> None:
        time.sleep(0.3)
        hand.say(job, "after")
        hand.settle(job)

    with meanwhile(work):
        events = list(watching)
    assert text(events) == "after"
    assert types(events) == ["chunk", "completed"]


def test_watch_ends_quietly_at_its_timeout_and_its_last_event_resumes_it(jobs: Any, hand: Hand) -> None:
    id = jobs.enqueue("x").id
    job = hand.take()
    hand.say(job, "a", "b")
    begin = time.monotonic()
    events = list(jobs.watch(id, timeout=0.4))
    assert 0.3 < time.monotonic() - begin < 5
    assert text(events) == "ab"
    hand.say(job, "c")
    hand.settle(job)
    assert types(list(jobs.watch(id, after=events[-1].id))) == ["chunk", "completed"]


@pytest.mark.parametrize(("status", "kind"), [("failed", "failed"), ("cancelled", "cancelled")])
def test_the_other_ends(jobs: Any, hand: Hand, status: Any, kind: str) -> None:
    id = jobs.enqueue("x").id
    hand.settle(hand.take(), status, "boom" if status == "failed" else "")
    [event] = jobs.watch(id)
    assert event.type == kind
    if kind == "failed":
        assert event.error == "boom"
        with pytest.raises(outlast.JobFailedError, match="boom") as failed:
            jobs.wait(id, timeout=5)
        assert (failed.value.job_id, failed.value.error) == (id, "boom")
    else:
        with pytest.raises(outlast.JobCancelledError) as cancelled:
            jobs.wait(id, timeout=5)
        assert cancelled.value.job_id == id


def test_a_retry_restarts_the_output_for_live_and_resumed_readers(jobs: Any, hand: Hand) -> None:
    id = jobs.enqueue("x").id
    job = hand.take()
    hand.say(job, "old1", "old2")
    cursor = next(iter(jobs.watch(id, timeout=0))).id
    hand.retry(job)
    job = hand.take()
    hand.say(job, "new")
    hand.settle(job)
    for after in (None, cursor):
        events = list(jobs.watch(id, after=after))
        assert types(events) == ["restarted", "chunk", "completed"]
        assert {event.attempt for event in events} == {2}


def test_a_reader_whose_place_was_trimmed_away_is_told_of_the_gap(
    jobs: Any, hand: Hand, raw: redis.Redis, keys: Keys
) -> None:
    id = jobs.enqueue("x").id
    job = hand.take()
    hand.say(job, *(str(n) for n in range(50)))
    cursor = list(jobs.watch(id, timeout=0))[9].id
    raw.xtrim(keys.events(id), maxlen=10, approximate=False)
    hand.settle(job)
    for after in (None, cursor):
        events = list(jobs.watch(id, after=after))
        assert types(events) == ["gap", *["chunk"] * 10, "completed"]
        assert events[0].first_available == events[1].id
        assert text(events) == "".join(str(n) for n in range(40, 50))


def test_h35_a_cursor_from_an_earlier_life_of_the_id(jobs: Any, hand: Hand) -> None:
    jobs.enqueue("x", id="chat")
    hand.run([f"one{n}" for n in range(20)])
    cursor = list(jobs.watch("chat"))[-1].id
    jobs.enqueue("y", id="chat")
    before = list(jobs.watch("chat", after=cursor, timeout=0))
    job = hand.take()
    hand.say(job, *(f"two{n}" for n in range(5)))
    during = list(jobs.watch("chat", after=cursor, timeout=0))
    hand.settle(job)
    after = list(jobs.watch("chat", after=cursor))
    assert types(before) == ["restarted"]
    assert types(during) == ["restarted", *["chunk"] * 5]
    assert types(after) == ["restarted", *["chunk"] * 5, "completed"]
    assert text(after) == "".join(f"two{n}" for n in range(5))


CURSORS = ["abc", "$", "+", "5-", "-1-1", "1-1-1", "99999999999999999999-0", "１-１", "9" * 10_000, "1-1\n", b"\xff", 5]


@pytest.mark.parametrize("after", CURSORS, ids=lambda after: repr(after)[:20])
def test_h36_a_cursor_that_is_none_is_refused_before_any_request(jobs: Any, after: Any) -> None:
    for call in (jobs.watch, jobs.events):
        with pytest.raises(outlast.InvalidArgumentError, match="after"):
            call("nobody", after=after)


def test_h36_a_cursor_of_another_job_or_from_the_future_gets_an_answer(jobs: Any, hand: Hand) -> None:
    id = jobs.enqueue("x").id
    job = hand.take()
    hand.say(job, "a", "b")
    for future in ("18446744073709551615-18446744073709551615", "99999999999999-0"):
        events = list(jobs.watch(id, after=future, timeout=0))
        assert types(events) == ["gap", "chunk", "chunk"]
    hand.settle(job)
    assert types(list(jobs.watch(id, after="1-1"))) == ["restarted", "chunk", "chunk", "completed"]


def test_h37_readers_after_the_end(jobs: Any, hand: Hand, raw: redis.Redis, keys: Keys) -> None:
    ends = {}
    for status in ("completed", "failed", "cancelled"):
        id = jobs.enqueue(status).id
        job = hand.take()
        hand.say(job, "a")
        hand.settle(job, status, "1")  # type: ignore[arg-type]
        ends[id] = status
    for id, status in ends.items():
        events = list(jobs.watch(id))
        assert types(events) == ["chunk", status]
        assert list(jobs.watch(id, after=events[-1].id)) == []
        assert jobs.events(id, after=events[-1].id) == outlast.EventPage([], events[-1].id, True)
        raw.delete(keys.events(id))
        assert types(list(jobs.watch(id))) == [status]
        raw.delete(keys.job(id))
        for call in (lambda id: list(jobs.watch(id)), jobs.wait, jobs.events):
            with pytest.raises(outlast.JobNotFoundError) as caught:
                call(id)
            assert caught.value.job_id == id
    with pytest.raises(outlast.JobNotFoundError):
        list(jobs.watch("nobody"))


@pytest.mark.parametrize("instant", [False, True])
def test_an_end_whose_entry_was_lost_is_made_up_from_the_record(
    jobs: Any, hand: Hand, raw: redis.Redis, keys: Keys, driver: str, monkeypatch: pytest.MonkeyPatch, instant: bool
) -> None:
    """Once, also for a job that was over within the millisecond that it was made in."""
    monkeypatch.setattr("outlast._base.BLOCK", 0.2)  # how long a read over TCP waits before it looks at the record
    id = jobs.enqueue("x").id
    hand.run(["a"], '"done"')
    [(last, _)] = raw.xrevrange(keys.events(id), count=1)
    raw.xdel(keys.events(id), last)
    record = cast("dict[bytes, bytes]", raw.hgetall(keys.job(id)))
    if instant:
        raw.hset(keys.job(id), "finishedAt", record[b"gen"])
    elif record[b"finishedAt"] == record[b"gen"]:
        raw.hset(keys.job(id), "finishedAt", int(record[b"gen"]) + 1)
    events = list(jobs.watch(id, poll=None if driver.startswith("tcp") else 0.02))
    assert types(events) == ["chunk", "completed"]
    assert events[-1].result == "done"
    assert list(jobs.watch(id, after=events[-1].id)) == []


# -- pages -----------------------------------------------------------------------------------------------------------


def test_pages_hold_every_event_once(jobs: Any, hand: Hand) -> None:
    id = jobs.enqueue("x").id
    job = hand.take()
    assert jobs.events(id) == outlast.EventPage([], "0-0", False)
    hand.say(job, *(f"{n}," for n in range(25)))
    cursor, seen = None, []
    for size in (10, 10, 5, 0):
        page = jobs.events(id, after=cursor, limit=10)
        assert (len(page.events), page.done) == (size, False)
        cursor, seen = page.next, seen + page.events
    hand.settle(job)
    page = jobs.events(id, after=cursor, limit=10)
    assert page.done
    assert types(page.events) == ["completed"]
    assert text(seen) == "".join(f"{n}," for n in range(25))
    for limit in (0, 1001, "5", True):
        with pytest.raises(outlast.InvalidArgumentError, match="limit"):
            jobs.events(id, limit=limit)


def test_a_page_waits_for_its_first_event_and_no_longer_than_asked(jobs: Any, hand: Hand) -> None:
    id = jobs.enqueue("x").id
    job = hand.take()
    begin = time.monotonic()
    assert jobs.events(id, wait=0.3).events == []
    assert 0.25 < time.monotonic() - begin < 5

    def work() -> None:
        time.sleep(0.2)
        hand.say(job, "a")

    with meanwhile(work):
        begin = time.monotonic()
        page = jobs.events(id, wait=20)
    assert text(page.events) == "a"
    assert time.monotonic() - begin < 5
    hand.settle(job)


# -- wait ------------------------------------------------------------------------------------------------------------


def test_wait_returns_when_the_job_ends(jobs: Any, hand: Hand) -> None:
    id = jobs.enqueue("x").id

    def work() -> None:
        time.sleep(0.1)
        job = hand.take()
        for n in range(10):
            hand.say(job, str(n))
            time.sleep(0.02)
        hand.settle(job, body='{"n":1}')

    with meanwhile(work):
        begin = time.monotonic()
        assert jobs.wait(id, timeout=20) == {"n": 1}
    assert time.monotonic() - begin < 5
    assert jobs.wait(id) == {"n": 1}


def test_wait_outlives_a_retry(jobs: Any, hand: Hand) -> None:
    id = jobs.enqueue("x").id

    def work() -> None:
        job = hand.take()
        hand.say(job, "a")
        time.sleep(0.1)
        hand.retry(job)
        job = hand.take()
        hand.say(job, "b")
        hand.settle(job, body="2")

    with meanwhile(work):
        assert jobs.wait(id, timeout=20) == 2


def test_wait_gives_up_at_its_timeout_and_the_job_goes_on(jobs: Any, hand: Hand) -> None:
    id = jobs.enqueue("x").id
    job = hand.take()
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=id):
        jobs.wait(id, timeout=0.3)
    assert 0.25 < time.monotonic() - begin < 5
    with pytest.raises(TimeoutError):
        jobs.wait(id, timeout=0)
    hand.settle(job, body="1")
    assert jobs.wait(id, timeout=0) == 1


def test_a_result_of_another_type_is_a_reply_shape_error(open_jobs: Open, queue_name: str, hand: Hand) -> None:
    jobs = open_jobs(outlast.Queue(queue_name, payload=str, result=int))
    id = jobs.enqueue("x").id
    hand.run(result='"not a number"')
    with pytest.raises(outlast.ReplyShapeError):
        jobs.wait(id, timeout=5)
    with pytest.raises(outlast.ReplyShapeError):
        list(jobs.watch(id))
    job = jobs.get(id)
    assert job.status == "completed"
    with pytest.raises(outlast.ReplyShapeError):
        _ = job.result


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), "5", True])
def test_a_timeout_that_is_none_is_refused(jobs: Any, timeout: Any) -> None:
    with pytest.raises(outlast.InvalidArgumentError, match="timeout"):
        jobs.wait("nobody", timeout=timeout)
    with pytest.raises(outlast.InvalidArgumentError, match="timeout"):
        jobs.watch("nobody", timeout=timeout)
    with pytest.raises(outlast.InvalidArgumentError, match="poll"):
        jobs.watch("nobody", poll=0)
