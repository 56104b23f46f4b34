"""The end of a job that has a webhook puts one delivery on the queue's own delivery queue, in the same script."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import redis

from outlast import InvalidArgumentError, Queue
from outlast.protocol import Keys

from .lab import LEASE, T0, Lab

WEBHOOK = '{"id":"job-a","queue":"some","url":"https://example.com/hook"}'
HOOK = [("webhook", WEBHOOK)]


def hooks_of(lab: Lab) -> Lab:
    """The delivery queue, driven like any other."""
    hooks = Lab(lab.connection, Keys(f"{{{lab.keys.name}}}:hooks"))
    hooks.now = lab.now
    return hooks


def deliveries(lab: Lab) -> list[dict[str, Any]]:
    return [json.loads(job.job.payload) for job in hooks_of(lab).take(10)]


def completed(lab: Lab) -> str:
    return lab.running(extra=HOOK).complete('"result"')


def failed(lab: Lab) -> str:
    return lab.running(extra=HOOK).fail()


def cancelled_running(lab: Lab) -> str:
    job = lab.running(extra=HOOK)
    lab.cancel()
    return job.complete()


def cancelled_at_retry(lab: Lab) -> str:
    job = lab.running(extra=HOOK)
    lab.cancel()
    return job.retry()


def cancelled_at_release(lab: Lab) -> str:
    job = lab.running(extra=HOOK)
    lab.cancel()
    return job.release()


def cancelled_waiting(lab: Lab) -> str:
    lab.enqueue(extra=HOOK)
    return lab.cancel()


def cancelled_scheduled(lab: Lab) -> str:
    lab.enqueue(delay_ms=1000, extra=HOOK)
    return lab.cancel()


def reclaimed(lab: Lab) -> str:
    lab.running(max_attempts=1, extra=HOOK)
    lab.lapse()
    lab.reserve(0)
    return "failed"


def reclaimed_cancelled(lab: Lab) -> str:
    lab.running(extra=HOOK)
    lab.cancel()
    lab.lapse()
    lab.reserve(0)
    return "cancelled"


ENDS: list[Callable[[Lab], str]] = [
    completed,
    failed,
    cancelled_running,
    cancelled_at_retry,
    cancelled_at_release,
    cancelled_waiting,
    cancelled_scheduled,
    reclaimed,
    reclaimed_cancelled,
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_every_end_puts_exactly_one_delivery(lab: Lab, end: Callable[[Lab], str]) -> None:
    status = end(lab)
    assert lab.get().status == status
    told = {"status": status, "at": int(lab.record()["finishedAt"]), **json.loads(WEBHOOK)}
    assert deliveries(lab) == [told]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_a_job_without_a_webhook_leaves_nothing(
    lab: Lab, end: Callable[[Lab], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "HOOK", [])
    end(lab)
    assert not [name for name in lab.state() if name.startswith("hooks:")]


def test_repeats_of_the_end_put_no_second_delivery(lab: Lab) -> None:
    job = lab.running(extra=HOOK)
    call = job.settle_call("completed", "1")
    assert [lab.send(call) for _ in range(3)] == ["completed"] * 3
    assert lab.cancel() == "finished"
    lab.enqueue("job-b", extra=HOOK)
    assert [lab.cancel("job-b") for _ in range(3)] == ["cancelled"] * 3
    assert len(deliveries(lab)) == 2


def test_neither_retries_nor_hand_backs_deliver(lab: Lab) -> None:
    lab.running(extra=HOOK).retry()
    lab.one().release()
    lab.one()
    lab.lapse()
    lab.reserve(0)
    assert deliveries(lab) == []


def test_who_lost_the_lease_delivers_nothing(lab: Lab) -> None:
    old = lab.running(extra=HOOK)
    lab.lapse()
    new = lab.one()
    assert old.complete() == "lost"
    assert deliveries(lab) == []
    new.complete()
    assert len(deliveries(lab)) == 1


def test_a_dead_job_that_is_retried_delivers_each_end(lab: Lab) -> None:
    failed(lab)
    lab.now += 1
    lab.retry_dead()
    lab.one().complete()
    assert [told["status"] for told in deliveries(lab)] == ["failed", "completed"]


def test_deliveries_are_jobs_like_any_other(lab: Lab) -> None:
    """They wait in order, ring their own doorbell, are retried, die and are put back; their ids never repeat."""
    for id in ("a", "b"):
        lab.enqueue(id, extra=HOOK)
        lab.cancel(id)
    hooks = hooks_of(lab)
    assert lab.raw("LLEN", hooks.keys.signal) == 2
    first, second = hooks.take(2)
    assert (first.id, second.id) == (f"{T0}-1", f"{T0}-2")
    assert hooks.get(first.id).status == "active"
    assert first.retry(1000) == "scheduled"
    assert second.complete() == "completed"
    assert [entry["t"] for _, entry in hooks.entries(second.id)] == ["completed"]
    hooks.now += 1000
    assert hooks.one(first.id).fail() == "failed"
    assert hooks.dead() == [first.id]
    assert hooks.retry_dead(first.id)
    assert hooks.one(first.id).job.attempt == 1
    hooks.now += LEASE + 2000
    assert hooks.stats().active == 1


def test_an_id_that_needs_care_in_lua_or_json(lab: Lab) -> None:
    id = 'a%d"\\é:-'
    lab.running(id, extra=[("webhook", json.dumps({"id": id, "url": "https://example.com/%s"}))]).complete()
    [told] = deliveries(lab)
    assert (told["id"], told["url"]) == (id, "https://example.com/%s")


def test_a_full_database_takes_the_end_with_its_delivery(own_lab: Lab, own_connection: redis.Redis) -> None:
    lab = own_lab
    job = lab.running(extra=HOOK)
    lab.enqueue("job-b", extra=HOOK)
    own_connection.execute_command("CONFIG", "SET", "maxmemory", "1")
    try:
        assert job.complete() == "completed"
        assert lab.cancel("job-b") == "cancelled"
    finally:
        own_connection.execute_command("CONFIG", "SET", "maxmemory", "0")
    assert [told["status"] for told in deliveries(lab)] == ["completed", "cancelled"]


def test_the_delivery_queue_shares_the_hash_tag_whatever_the_namespace() -> None:
    keys = Keys("preview.{generate}:hooks")
    assert (keys.base, keys.tag) == ("{preview.generate}:hooks:", "preview.generate")
    assert Keys("generate").tag == "generate"
    assert Queue("{generate}:hooks").name == "{generate}:hooks"
    for name in ("{a}", "{a}:hook", "a{b}:hooks", "{a}b}:hooks", "{}:hooks", "{{a}:hooks", "{a}:hooks:hooks"):
        with pytest.raises(InvalidArgumentError):
            Queue(name)
