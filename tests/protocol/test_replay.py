"""Replies get lost and requests come late. Neither may show: the second answer is the first, and nothing moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from outlast.protocol import Call, calls, holding

from .lab import LEASE, Holder, Lab

Prepared = tuple[Call[Any], Call[Any]]
"""A call, and what is sent when its reply was lost."""


def same(call: Call[Any]) -> Prepared:
    return call, call


def ended(lab: Lab, how: str = "complete", **options: Any) -> Holder:
    job = lab.running(**options)
    job.emit("old")
    getattr(job, how)()
    return job


def flagged(lab: Lab, **options: Any) -> Holder:
    job = lab.running(**options)
    job.emit("a")
    lab.cancel()
    return job


def after(_: object, call: Call[Any]) -> Prepared:
    return same(call)


def two_waiting(lab: Lab) -> Prepared:
    lab.enqueue("a", extra=[("owner", "o"), ("timeoutMs", "5"), ("resultTtlMs", "7"), ("trace", "t")], key="k")
    lab.enqueue("ü b", priority=4)
    return lab.reserve_call(3, request=7), lab.reserve_call(3, request=7, again=True)


def limited(lab: Lab) -> Prepared:
    rules = {"concurrency": 1, "rate": 1, "interval": 60_000, "ownerCap": 1, "maxAttempts": 7}
    lab.raw("HSET", lab.keys.config, *(part for pair in rules.items() for part in pair))
    for id in "abc":
        lab.enqueue(id, extra=[("owner", "o")])
    return lab.reserve_call(3, request=7), lab.reserve_call(3, request=7, again=True)


def second_attempt(lab: Lab) -> Prepared:
    lab.enqueue()
    job = lab.one()
    job.emit("x", "y")
    job.retry()
    return lab.reserve_call(3, request=7), lab.reserve_call(3, request=7, again=True)


def given_back(lab: Lab) -> Prepared:
    lab.running().release()
    return lab.reserve_call(1, request=7), lab.reserve_call(1, request=7, again=True)


def reused(lab: Lab) -> Prepared:
    ended(lab)
    lab.enqueue()
    return lab.reserve_call(1, request=7), lab.reserve_call(1, request=7, again=True)


def foreign(lab: Lab) -> Prepared:
    lab.raw("HSET", lab.keys.job("f"), "id", "f", "payload", "{}")
    lab.raw("ZADD", lab.keys.ready, 1, "f")
    return lab.reserve_call(1, request=7), lab.reserve_call(1, request=7, again=True)


def flush(lab: Lab, *events: tuple[str, str], **options: Any) -> Prepared:
    job = lab.running()
    job.emit("first")
    return job.flush_call(*events, **options), job.flush_call(*events, **options, again=True)


def stepped(lab: Lab) -> Holder:
    job = lab.running()
    job.step("s", "1")
    return job


def stale_steps(lab: Lab) -> Call[Any]:
    job = lab.running()
    lab.raw("HSET", lab.keys.steps(job.id), "gen", "1", "s:old", "old")
    return job.step_call("s", "1", stale=True)


def revival(lab: Lab) -> Prepared:
    ended(lab, "fail")
    return same(calls.retry_dead(lab.keys, "job-a", nonce="n", max_attempts=3, now=lab.now))


EVENTS = (("chunk", "x"), ("data", "{}"), ("chunk", ""))

CALLS: dict[str, Callable[[Lab], Prepared]] = {
    "enqueue": lambda lab: same(lab.enqueue_call(own=False)),
    "enqueue with an own id": lambda lab: same(lab.enqueue_call()),
    "enqueue with a key": lambda lab: same(lab.enqueue_call(key="k", payload_hash="h")),
    "enqueue, delayed": lambda lab: same(lab.enqueue_call(delay_ms=5)),
    "enqueue of a used id": lambda lab: after(ended(lab), lab.enqueue_call()),
    "enqueue of a dead job's id": lambda lab: after(ended(lab, "fail", key="k"), lab.enqueue_call(key="k2")),
    "enqueue that finds the key": lambda lab: after(lab.enqueue(key="k"), lab.enqueue_call("job-b", key="k")),
    "cancel waiting": lambda lab: after(lab.enqueue(key="k"), cancel(lab)),
    "cancel scheduled": lambda lab: after(lab.enqueue(delay_ms=5), cancel(lab)),
    "cancel active": lambda lab: after(lab.running(), cancel(lab)),
    "cancel completed": lambda lab: after(ended(lab), cancel(lab)),
    "reserve": two_waiting,
    "reserve under limits": limited,
    "reserve of a second attempt": second_attempt,
    "reserve of a job that was given back": given_back,
    "reserve of a used id": reused,
    "reserve of a foreign job": foreign,
    "flush": lambda lab: flush(lab, *EVENTS),
    "flush, renewing": lambda lab: flush(lab, *EVENTS, renew=True, progress="0.5"),
    "flush of progress alone": lambda lab: flush(lab, progress="0.5"),
    "renew": lambda lab: same(holding.renew(lab.keys, [lab.running().job], lease_ms=LEASE, now=lab.now + 5)),
    "step": lambda lab: same(lab.running().step_call("s", "1")),
    "step over those of another life": lambda lab: same(stale_steps(lab)),
    "settle with steps": lambda lab: same(stepped(lab).settle_call("completed", "1")),
    "settle with usage": lambda lab: same(lab.running().uses(a=1, b=0.1).settle_call("completed", "1")),
    "retry with usage": lambda lab: same(lab.running().uses(a=1, b=0.1).retry_call(50)),
    "release with usage": lambda lab: same(lab.running().uses(a=1, b=0.1).release_call()),
    "retry of a cancelled job with usage": lambda lab: same(flagged(lab).uses(a=1).retry_call(50)),
    "release of a cancelled job with usage": lambda lab: same(flagged(lab).uses(a=1).release_call()),
    "settle completed": lambda lab: same(lab.running(key="k").settle_call("completed", "1")),
    "settle failed": lambda lab: same(lab.running(key="k").settle_call("failed", "E: x")),
    "settle of a cancelled job": lambda lab: same(flagged(lab, key="k").settle_call("completed", "1")),
    "retry": lambda lab: same(lab.running().retry_call(50)),
    "retry, ringing": lambda lab: same(lab.running().retry_call(50, ring=True)),
    "retry of a cancelled job": lambda lab: same(flagged(lab, key="k").retry_call(50)),
    "release": lambda lab: same(lab.running().release_call()),
    "release, pausing": lambda lab: same(lab.running().release_call(pause_ms=500)),
    "release of a cancelled job": lambda lab: same(flagged(lab, key="k").release_call()),
    "retry_dead": revival,
    "seen": lambda lab: same(holding.seen(lab.keys, "w", "here")),
}


def cancel(lab: Lab) -> Call[Any]:
    return calls.cancel(lab.keys, "job-a", result_ttl_ms=1000, now=lab.now)


def answer(lab: Lab, call: Call[Any]) -> Any:
    """The answer; of a reservation the jobs, because the hint of a repeat says: ask anew for what is free."""
    got = lab.send(call)
    return got.jobs if isinstance(got, holding.Reservation) else got


def still(state: dict[str, Any]) -> dict[str, Any]:
    """A state without the TTLs, which run."""
    return {name: {**key, "ttl_ms": key["ttl_ms"] is not None} for name, key in state.items()}


@pytest.mark.parametrize("name", CALLS)
def test_a_repeat_answers_the_same_and_changes_nothing(name: str, lab: Lab) -> None:
    call, repeat = CALLS[name](lab)
    first = answer(lab, call)
    state = still(lab.state())
    for _ in range(2):
        assert answer(lab, repeat) == first
        assert still(lab.state()) == state
    assert state


def test_a_release_after_output_repeats_too(lab: Lab) -> None:
    job = lab.running()
    job.emit("x")
    call = job.release_call(error="shutting down")
    assert lab.send(call) == "waiting"
    state = still(lab.state())
    assert lab.send(call) == "waiting"
    assert still(lab.state()) == state


# -- late ------------------------------------------------------------------------------------------------------------


def unchanged(lab: Lab, call: Call[Any]) -> Any:
    """The answer to a call that must change nothing."""
    state = still(lab.state())
    answer = lab.send(call)
    assert still(lab.state()) == state
    return answer


@pytest.mark.parametrize("then", ["one", "complete", "fail", "cancel", "retry"])
def test_h01_an_enqueue_that_comes_again_late_makes_no_second_job(then: str, lab: Lab) -> None:
    call = lab.enqueue_call(key="k", own=False)
    first = lab.send(call)
    if then == "cancel":
        lab.cancel()
    else:
        job = lab.one()
        if then != "one":
            getattr(job, then)()
    assert unchanged(lab, call) == first
    assert first.deduplicated is False


def test_of_two_takes_under_way_each_repeat_brings_its_own_jobs(lab: Lab) -> None:
    for name in "abcd":
        lab.enqueue(f"job-{name}")
    first = lab.reserve(2, request=7)
    second = lab.reserve(2, request=8, line=1)
    assert [job.id for job in first.jobs + second.jobs] == ["job-a", "job-b", "job-c", "job-d"]
    assert lab.reserve(2, request=7, again=True).jobs == first.jobs
    assert lab.reserve(2, request=8, line=1, again=True).jobs == second.jobs


def test_a_reserve_that_comes_late_takes_nothing(lab: Lab) -> None:
    lab.enqueue()
    late = lab.reserve_call(stale_at_ms=lab.now + 1000)
    lab.now += 1001
    at = 1 + int(late.args[0])
    call = Call((*late.args[:at], str(lab.now), *late.args[at + 1 :]), late.decode, late.script)
    answer = unchanged(lab, call)
    assert answer.stale
    assert answer.jobs == []
    assert answer.server_now_ms == lab.now


def test_a_reserve_within_its_deadline_takes(lab: Lab) -> None:
    lab.enqueue()
    assert len(lab.reserve(stale_at_ms=lab.now).jobs) == 1


def test_a_repeated_reserve_that_comes_late_takes_nothing_either(lab: Lab) -> None:
    """A repeat lies in a dead socket's buffer; the next repeat found nothing to take; then a job came."""
    assert lab.reserve(request=1).jobs == []
    late = lab.reserve_call(request=1, again=True, stale_at_ms=lab.now - 1)
    lab.enqueue()
    assert unchanged(lab, late).stale


def test_a_repeated_reserve_leaves_out_what_it_no_longer_owns(lab: Lab) -> None:
    for id in ("kept", "settled", "retried", "released", "stolen"):
        lab.enqueue(id)
    jobs = {job.id: job for job in lab.take(5, request=1)}
    jobs["settled"].complete()
    jobs["retried"].retry(5)
    jobs["released"].release()
    assert lab.one(worker="other").id == "released"
    lab.raw("HSET", lab.keys.job("stolen"), "token", "other:9")
    lab.now += 10
    before = still(lab.state())
    answer = lab.reserve(5, request=1, again=True)
    assert [job.id for job in answer.jobs] == ["kept"]
    assert answer.hint_ms == 0  # so that the worker asks anew for the free slots
    assert lab.score("leases", "kept") == lab.now + LEASE
    before["leases"]["members"]["kept"] = str(lab.now + LEASE)
    assert still(lab.state()) == before


def test_a_repeated_reserve_that_had_taken_nothing_takes_now(lab: Lab) -> None:
    assert lab.reserve(request=1).jobs == []
    lab.enqueue()
    assert [job.id for job in lab.reserve(request=1, again=True).jobs] == ["job-a"]


def test_a_repeated_reserve_goes_on_where_the_stream_is(lab: Lab) -> None:
    """The holder's numbering is in its memory; a repeat reads it from the stream."""
    lab.enqueue()
    job = lab.one(request=1)
    job.emit("a", "b")
    [taken] = lab.reserve(request=1, again=True).jobs
    assert (taken.b, taken.n) == (job.job.b, 2)


def test_a_flush_that_is_sent_blindly_twice_errs_without_effect(lab: Lab) -> None:
    job = lab.running()
    call = job.flush_call(("chunk", "a"), ("chunk", "b"), renew=True, progress="0.5")
    lab.send(call)
    state = still(lab.state())
    lab.now += 500
    with pytest.raises(redis.exceptions.ResponseError, match="equal or smaller"):
        lab.send(job.flush_call(("chunk", "a"), ("chunk", "b"), renew=True, progress="0.7"))
    assert still(lab.state()) == state


def test_a_flush_again_writes_if_the_first_never_arrived(lab: Lab) -> None:
    job = lab.running()
    job.emit("a")
    assert job.flush(("chunk", "b"), again=True) == "ok"
    assert [fields["d"] for _, fields in lab.entries()] == ["a", "b"]


def late_calls(job: Holder) -> dict[str, Call[Any]]:
    job.uses(a=1)
    return {
        "flush": job.flush_call(("chunk", "late"), renew=True, progress="0.9"),
        "flush again": job.flush_call(("chunk", "late"), again=True),
        "settle completed": job.settle_call("completed", '"late"'),
        "settle failed": job.settle_call("failed", "late"),
        "retry": job.retry_call(5, ring=True),
        "release": job.release_call(pause_ms=5000),
        "step": job.step_call("late", "1", stale=True),
    }


@pytest.mark.parametrize(
    "name", ["flush", "flush again", "settle completed", "settle failed", "retry", "release", "step"]
)
@pytest.mark.parametrize(
    "then", ["reclaimed", "taken over", "completed by another", "dead", "cancelled", "used again", "gone"]
)
def test_h10_a_stale_token_changes_nothing(name: str, then: str, lab: Lab) -> None:
    job = lab.running(key="k", max_attempts=1 if then == "dead" else 3)
    job.emit("old")
    if then == "cancelled":
        lab.cancel()
    lab.lapse()
    lab.reserve(0)
    match then:
        case "taken over":
            lab.one(worker="other")
        case "completed by another":
            lab.one(worker="other").complete('"new"')
        case "used again":
            lab.one(worker="other").complete()
            lab.enqueue()
            lab.one(worker="third").emit("new")
        case "gone":
            lab.raw("DEL", lab.keys.job("job-a"), lab.keys.events("job-a"), lab.keys.idem("k"))
    job.lab.now = lab.now
    assert unchanged(lab, late_calls(job)[name]) == "lost"
    assert lab.send(holding.renew(lab.keys, [job.job], lease_ms=LEASE, now=lab.now)) == ["lost"]


def test_a_renewal_tells_each_job_apart(lab: Lab) -> None:
    for id in "abcd":
        lab.enqueue(id)
    a, b, c, d = lab.take(4)
    b.complete()
    lab.cancel("c")
    lab.now += 100
    answers = lab.send(holding.renew(lab.keys, [a.job, b.job, c.job, d.job], lease_ms=LEASE, now=lab.now))
    assert answers == ["ok", "lost", "cancel", "ok"]
    assert lab.where("b") == []
    assert {lab.score("leases", id) for id in "acd"} == {lab.now + LEASE}


def test_a_renewal_of_very_many_jobs_fits_into_one_call(lab: Lab) -> None:
    for index in range(250):
        lab.enqueue(f"j{index}", own=False)
    jobs = [job for _ in range(3) for job in lab.take(100)]
    assert len(jobs) == 250
    lab.now += 100
    many = (jobs * 20)[:4500]
    answers = lab.send(holding.renew(lab.keys, [job.job for job in many], lease_ms=LEASE, now=lab.now))
    assert answers == ["ok"] * 4500
    assert {float(score) for score in lab.state()["leases"]["members"].values()} == {lab.now + LEASE}


def test_a_late_retry_or_release_says_what_it_said(lab: Lab) -> None:
    first = lab.running()
    retry = first.retry_call(0)
    lab.send(retry)
    second = lab.one(worker="other")
    assert unchanged(lab, retry) == "scheduled"
    release = second.release_call()
    lab.send(release)
    third = lab.one()
    assert unchanged(lab, release) == "waiting"
    assert unchanged(lab, retry) == "lost"  # only the latest end of an attempt is remembered
    third.complete()


def test_a_late_settle_after_a_revival_changes_nothing(lab: Lab) -> None:
    job = lab.running()
    settle = job.settle_call("failed", "E: x")
    lab.send(settle)
    lab.retry_dead()
    unchanged(lab, settle)
    lab.one(worker="other")
    unchanged(lab, settle)


def test_h25_a_revival_happens_once(lab: Lab) -> None:
    """Two callers at once, one more while it runs, one for a completed job, and a late repeat of the first."""
    job = lab.running(payload='"' + "x" * 100_000 + '"')
    job.emit(*"x" * 50)
    cursor = lab.entries()[-1][0]
    job.fail()
    lab.now += 10
    first = calls.retry_dead(lab.keys, "job-a", nonce="first", max_attempts=3, now=lab.now)
    assert lab.send(first) is True
    assert lab.retry_dead(nonce="second") is False
    run = lab.one()
    assert (run.job.attempt, run.job.starts, len(run.job.payload)) == (1, 2, 100_002)
    assert unchanged(lab, calls.retry_dead(lab.keys, "job-a", nonce="third", max_attempts=3, now=lab.now)) is False
    assert unchanged(lab, first) is True
    run.emit("new")
    run.complete()
    assert unchanged(lab, calls.retry_dead(lab.keys, "job-a", nonce="fourth", max_attempts=3, now=lab.now)) is False
    assert [event.type for event in lab.read(after=cursor)] == ["restarted", "chunk", "completed"]


def test_two_revivals_with_new_nonces_both_happen(lab: Lab) -> None:
    for attempt in range(3):
        job = lab.running() if attempt == 0 else lab.one()
        assert job.job.attempt == 1
        job.fail()
        lab.now += 10
        assert lab.retry_dead() is True
