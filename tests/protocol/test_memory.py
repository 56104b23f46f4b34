"""A database without memory: what would need more is refused whole, what ends work still passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis

from outlast import StoreFullError
from outlast.protocol import Call, calls, holding
from outlast.transport import server_error

from .lab import LEASE, Lab
from .test_replay import still


@contextmanager
def full(lab: Lab) -> Iterator[None]:
    """Every command that needs memory is refused, as with maxmemory and noeviction on a server that is full."""
    lab.raw("CONFIG", "SET", "maxmemory", "1")
    try:
        yield
    finally:
        lab.raw("CONFIG", "SET", "maxmemory", "0")


def refused_whole(lab: Lab, call: Call[object]) -> None:
    before = still(lab.state())
    with full(lab), pytest.raises(redis.exceptions.ResponseError) as caught:
        lab.reply(call)
    if not isinstance(caught.value, redis.exceptions.OutOfMemoryError):  # Redis before 7 has the word somewhere else
        assert isinstance(server_error(str(caught.value)), StoreFullError)
    assert still(lab.state()) == before


@pytest.fixture
def lab(own_lab: Lab) -> Lab:
    with full(own_lab), pytest.raises(redis.exceptions.OutOfMemoryError):
        own_lab.raw("SET", "x", "y")  # the premise
    return own_lab


@pytest.mark.parametrize("variant", ["plain", "own", "key", "delayed", "reused", "reused dead", "stream expired"])
def test_enqueue_is_refused_whole(variant: str, lab: Lab) -> None:
    """Also where the script frees something on the way: nothing may be dropped for a job that is not made."""
    if variant.startswith("reused"):
        job = lab.running(key="old")
        job.emit("x")
        getattr(job, "fail" if "dead" in variant else "complete")()
    if variant == "stream expired":
        lab.running().complete()
        lab.raw("DEL", lab.keys.events("job-a"))
    lab.enqueue("warm")
    options = {"key": {"key": "k"}, "delayed": {"delay_ms": 5}}.get(variant, {})
    refused_whole(lab, lab.enqueue_call(own=variant != "plain", **options))


def test_a_flush_is_refused_whole_and_lands_later(lab: Lab) -> None:
    job = lab.running()
    job.emit("a")
    call = job.flush_call(("chunk", "b"), ("chunk", "c"), renew=True, progress="0.5")
    refused_whole(lab, call)
    assert lab.send(call) == "ok"
    assert [fields["d"] for _, fields in lab.entries()] == ["a", "b", "c"]


@pytest.mark.parametrize("how", ["complete", "fail", "retry", "release", "cancelled"])
def test_h49_settle_retry_and_release_pass(how: str, lab: Lab) -> None:
    job = lab.running(key="k")
    job.emit("x")
    if how == "cancelled":
        lab.cancel()
    ends = {"complete": "completed", "fail": "failed", "retry": "scheduled", "release": "waiting"}
    with full(lab):
        answer = job.complete('"result"') if how == "cancelled" else getattr(job, how)()
    assert answer == ends.get(how, "cancelled")
    assert lab.get().status == answer
    assert len(lab.where()) == (0 if how in ("complete", "cancelled") else 1)
    assert lab.read()


@pytest.mark.parametrize("delay", [0, 5000])
def test_h49_cancel_of_a_job_that_has_not_started_passes(delay: int, lab: Lab) -> None:
    lab.enqueue(delay_ms=delay, key="k")
    with full(lab):
        assert lab.cancel() == "cancelled"
    assert lab.where() == []
    assert [event.type for event in lab.read()] == ["cancelled"]


def test_cancel_of_a_running_job_passes_with_relief(lab: Lab) -> None:
    job = lab.running()
    refused_whole(lab, calls.cancel(lab.keys, "job-a", result_ttl_ms=1000, now=lab.now))
    with full(lab):
        assert lab.cancel(relief=True) == "requested"
    assert job.renew() == "cancel"
    assert lab.raw("LLEN", lab.keys.ctl("w")) == 1


def test_a_renewal_passes_with_relief(lab: Lab) -> None:
    job = lab.running()
    lab.now += 100
    refused_whole(lab, holding.renew(lab.keys, [job.job], lease_ms=LEASE, now=lab.now))
    with full(lab):
        answers = lab.send(holding.renew(lab.keys, [job.job], lease_ms=LEASE, relief=True, now=lab.now))
    assert answers == ["ok"]
    assert lab.score("leases") == lab.now + LEASE


def test_lapsed_leases_do_not_stop_a_worker_that_comes_to_free_memory(lab: Lab) -> None:
    """All memory is payloads and all workers have died: only running the jobs can free any of it."""
    lab.running(max_attempts=1)
    lab.enqueue("next")
    lab.now += LEASE + 1
    with full(lab):
        [taken] = lab.reserve(1, request=77).jobs
        assert taken.id == "next"
        assert lab.reserve(1, request=77, again=True).jobs == [taken]
        lab.now += 1001
        lab.reserve(0)
    assert lab.get().status == "failed"


def test_a_revival_passes(lab: Lab) -> None:
    lab.running().fail()
    lab.now += 10
    with full(lab):
        assert lab.retry_dead()
    assert lab.where() == ["ready"]
    assert lab.one().complete() == "completed"
