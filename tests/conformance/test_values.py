"""Payloads, results and events come back as they went in, over every transport and every path through the queue."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from pydantic import BaseModel

import outlast
from outlast.protocol import Keys, calls

from .conftest import Hand, Open


def same(left: Any, right: Any) -> bool:
    """Equal in value and in type, all the way down; 0.0 and -0.0 differ."""
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and repr(left) == repr(right)


FALSY = [None, False, 0, 0.0, "", [], {}, "false", "null", "0"]


@pytest.mark.parametrize("value", FALSY, ids=repr)
def test_h39_a_falsy_result_is_a_result(jobs: Any, hand: Hand, value: Any) -> None:
    id = jobs.enqueue(value, idempotency_key="k").id
    assert same(jobs.get(id).payload, value)
    assert jobs.get(id).result is None
    assert jobs.get(id).status == "waiting"
    hand.run(result=json.dumps(value))
    job = jobs.get(id)
    assert (job.status, same(job.result, value)) == ("completed", True)
    assert same(jobs.wait(id, timeout=5), value)
    assert same(list(jobs.watch(id))[-1].result, value)
    assert same(jobs.wait(jobs.enqueue(value, idempotency_key="k").id, timeout=5), value)


NUMBERS = {
    "numbers": [2**53 + 1, 2**63, -(2**63), 10**30, 0.1, 1e-320, -0.0, 1.0, True, None],
    "digits": ["106242075399214372653", "007", "1e5", "-0"],
    "nested": [[[2**53 + 1]], {"n": {"n": 1.0}}],
}
SHAPES = {
    "a": [],
    "b": {},
    "c": [[]],
    "": 1,
    "__proto__": 1,
    "ключ": [],
    "n": {"deep": []},
    "text": 'žluťoučký 🐎 \u2028 \x00 \x7f \\ " / <>&',
}


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize("value", [NUMBERS, SHAPES, nested(200)], ids=["h40-numbers", "h41-shapes", "h41-deep"])
def test_h40_h41_values_survive_delay_retry_reclaim_and_retry_dead(
    jobs: Any, hand: Hand, value: Any, keys: Keys
) -> None:
    id = jobs.enqueue(value, delay=0.001, max_attempts=3).id
    until = time.monotonic() + 10
    while not (taken := hand.reserve()):  # promoted once it is due
        assert time.monotonic() < until
        time.sleep(0.002)
    hand.emit(taken[0], ("data", json.dumps(value)), progress="0.5")
    hand.retry(taken[0])
    hand.take()
    lapsed = int(time.time() * 1000) + 2 * hand.LEASE_MS
    hand.reserve(0, now=lapsed)  # marks the lease
    [reclaimed] = hand.reserve(now=lapsed + 5000)
    assert reclaimed.attempt == 3
    hand.emit(reclaimed, ("data", json.dumps(value)))
    assert same(jobs.get(id).payload, value)
    assert same([e.value for e in jobs.events(id).events if e.type == "data"], [value])
    hand.settle(reclaimed, "failed", "no")
    assert jobs.retry_dead(id)
    last = hand.take()
    assert same(json.loads(last.payload), value)
    hand.settle(last, body=json.dumps(value))
    assert same(jobs.get(id).payload, value)
    assert same(jobs.get(id).result, value)
    assert same(jobs.wait(id, timeout=5), value)


@pytest.mark.parametrize(
    "value",
    [
        nested(5000),
        {1: "x"},
        {"a": {2: 3}},
        float("nan"),
        [float("inf")],
        {1, 2},
        object(),
        b"x",
        "\ud83d",
        {"\udc00": 1},
    ],
    ids=lambda value: type(value).__name__,
)
def test_h41_what_json_cannot_hold_is_refused_without_being_quoted(jobs: Any, value: Any) -> None:
    with pytest.raises(outlast.InvalidArgumentError, match="payload"):
        jobs.enqueue(value)
    assert jobs.stats().waiting == 0


def test_an_integer_that_is_too_long_is_called_that(jobs: Any) -> None:
    with pytest.raises(outlast.InvalidArgumentError, match="integer of more digits"):
        jobs.enqueue(10**5000)


def test_a_payload_over_the_limit_is_refused_and_not_quoted(open_jobs: Open, queue_name: str) -> None:
    jobs = open_jobs(outlast.Queue(queue_name, max_payload=100))
    jobs.enqueue("x" * 98)
    with pytest.raises(outlast.InvalidArgumentError, match="101 bytes") as caught:
        jobs.enqueue("x" * 99)
    assert "xxx" not in str(caught.value)


def test_h42_progress_comes_back_exactly(jobs: Any, hand: Hand) -> None:
    id = jobs.enqueue(1).id
    job = hand.take()
    values = [0.0, 1 / 3, 0.1 + 0.2, 1.0]
    for value in values:
        hand.emit(job, ("progress", repr(value)), progress=repr(value))
        assert jobs.get(id).progress == value
    assert [e.value for e in jobs.watch(id, timeout=0) if e.type == "progress"] == values
    hand.settle(job)


CHUNKS = [
    "", " ", " hello", "hello ", "\t", "\n", "a\nb", "\r", "\r\n", "a\u2028b", "\u2029", "\x85", "\x0b", "\x0c", "\x00",
    "data: x", ": x", "id: 9", "event: completed", "\n\n", "OK", "🐎", *(f" token{n}" for n in range(200)),
]  # fmt: skip


def test_h32_h33_every_chunk_comes_back_as_it_was(jobs: Any, hand: Hand) -> None:
    id = jobs.enqueue(1).id
    hand.run(CHUNKS)
    events = list(jobs.watch(id))
    assert [e.data for e in events[:-1]] == CHUNKS
    assert events[-1].type == "completed"


class Prompt(BaseModel):
    prompt: str
    n: int = 1


class Answer(BaseModel):
    text: str


def test_typed_payloads_and_results(open_jobs: Open, queue_name: str, hand: Hand) -> None:
    jobs = open_jobs(outlast.Queue(queue_name, payload=Prompt, result=Answer))
    id = jobs.enqueue(Prompt(prompt="hi")).id
    assert jobs.get(id).payload == Prompt(prompt="hi", n=1)
    hand.run(result='{"text":"yes"}')
    assert jobs.wait(id, timeout=5) == Answer(text="yes")
    assert jobs.get(id).result == Answer(text="yes")
    with pytest.raises(outlast.InvalidArgumentError) as caught:
        jobs.enqueue({"prompt": ["a secret prompt"]})
    assert "secret" not in str(caught.value)


def test_a_foreign_writers_bytes_are_shown_not_raised(jobs: Any, hand: Hand, raw: Any, keys: Keys, driver: str) -> None:
    """Bytes that are not UTF-8, a status of a later version, numbers with an exponent."""
    id = jobs.enqueue(1).id
    raw.hset(
        keys.job(id),
        mapping={
            "error": "bad" if driver.startswith("upstash") else b"\xff\xfe",
            "status": "new",
            "createdAt": "1.8e12",
        },
    )
    job = jobs.get(id)
    assert (job.status, job.error) == ("waiting", "bad" if driver.startswith("upstash") else "\ufffd\ufffd")
    assert job.created_at.year == 2027
    raw.xadd(keys.events(id), {"t": "thinking", "d": "?"})
    raw.xadd(keys.events(id), {"t": "chunk", "d": "foreign"})
    assert [e.data for e in jobs.watch(id, timeout=0)] == ["foreign"]


def test_a_hash_without_an_id_is_no_job(jobs: Any, raw: Any, keys: Keys) -> None:
    raw.hset(keys.job("half"), "attempt", "1")
    assert jobs.get("half") is None


def test_the_calls_decode_text_as_they_decode_bytes(hand: Hand) -> None:
    """upstash-redis hands over str where the others hand over bytes."""
    for reply in (b"cancelled", "cancelled"):
        assert calls.cancel(Keys("x"), "y", result_ttl_ms=1).decode(reply) == "cancelled"
