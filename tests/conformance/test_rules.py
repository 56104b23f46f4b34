"""rules, set_rules, pause, resume, usage, and budgets: the same through every transport."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis

import outlast
from outlast.protocol import Keys

from .conftest import Hand


def test_rules_are_set_and_read(jobs: Any, raw: redis.Redis, keys: Keys) -> None:
    assert jobs.rules() == outlast.Rules()
    jobs.set_rules(concurrency=3, rate="30/60s", lease=timedelta(seconds=5), owner_cap=2, max_payload=20_000)
    rules = jobs.rules()
    assert (rules.concurrency, rules.rate, rules.lease, rules.owner_cap) == (3, "30/60s", 5.0, 2)
    assert raw.hget(keys.config, "leaseMs") == b"5000"
    jobs.set_rules(concurrency=None, owner_cap=None)
    assert (jobs.rules().concurrency, jobs.rules().rate) == (None, "30/60s")
    with pytest.raises(outlast.InvalidArgumentError, match="rate"):
        jobs.set_rules(rate="often")
    with pytest.raises(outlast.InvalidArgumentError, match=r"allows, 20000: store it elsewhere"):
        jobs.enqueue("x" * 20_000)


def test_a_pause_lets_nothing_be_taken_until_it_is_lifted(jobs: Any, hand: Hand) -> None:
    jobs.enqueue(1)
    jobs.pause(60)
    assert jobs.rules().paused_until is not None
    assert hand.reserve() == []
    jobs.pause()
    assert jobs.rules().paused
    jobs.resume()
    assert not jobs.rules().paused
    assert len(hand.reserve()) == 1


def test_usage_is_read_from_job_and_day(jobs: Any, raw: redis.Redis, keys: Keys) -> None:
    assert jobs.usage() == {}
    made = jobs.enqueue(1, budget={"cost": 0.5})
    assert raw.hget(keys.job(made.id), "budget") == b'{"cost":0.5}'
    raw.hset(keys.job(made.id), "usage", '{"cost":0.25,"tokens":7}')
    assert jobs.get(made.id).usage == {"cost": 0.25, "tokens": 7}
    today = str(datetime.fromtimestamp(raw.time()[0], UTC).date())
    raw.hset(keys.usage(today), mapping={"cost": "0.25", "tokens": "7"})
    assert jobs.usage(days=2)[today] == {"cost": 0.25, "tokens": 7}
    with pytest.raises(outlast.InvalidArgumentError, match="days"):
        jobs.usage(days=0)


def test_steps_of_a_dead_job_are_kept_unless_told_otherwise(
    jobs: Any, hand: Hand, raw: redis.Redis, keys: Keys
) -> None:
    made = jobs.enqueue(1, max_attempts=1)
    for keep in (True, False):
        assert hand.settle(hand.take(), "failed", "E: bad") == "failed"
        raw.hset(keys.steps(made.id), mapping={"gen": "1", "s:a": "1"})
        assert jobs.retry_dead(made.id, keep_steps=keep)
        assert bool(raw.exists(keys.steps(made.id))) is keep
