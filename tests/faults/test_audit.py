"""The auditor finds what is planted. Each rule that a fault run relies on has one plant here at least."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis
from tests.faults.audit import (
    KINDS,
    KINDS_OF,
    audit_calls,
    audit_history,
    audit_keys,
    read_aof,
    read_calls,
    read_history,
)
from tests.faults.servers import journalled

from outlast import Client, Queue
from outlast.protocol import Keys, holding
from outlast.protocol.keys import KEY_TABLE
from outlast_worker.tcp import TcpTransport

TIMES = {"lease_ms": 60_000, "result_ttl_ms": 60_000, "dead_ttl_ms": 60_000}


@pytest.fixture
def accepted(valkey_url: str, queue_name: str, keys: Keys) -> set[str]:
    """One job in each state: waiting, scheduled, active, completed, dead, cancelled."""
    transport = TcpTransport(valkey_url)
    with Client(redis_url=valkey_url) as client:
        jobs = client.queue(Queue(queue_name))
        for end in ("completed", "failed", None):
            jobs.enqueue(end, id=f"job-{end or 'active'}", idempotency_key=f"key-{end or 'active'}")
            taken = transport.send(holding.reserve(keys, worker="w", request=len(end or ""), k=1, **TIMES)).jobs[0]
            transport.send(holding.flush(keys, taken, first=taken.n + 1, events=[("chunk", "text")], max_len=100))
            if end is not None:
                transport.send(
                    holding.settle(keys, taken, status=end, body='"R"', ttl_ms=60_000, cancel_ttl_ms=60_000, count=1)  # type: ignore[arg-type]
                )
        jobs.enqueue(None, id="job-cancelled", idempotency_key="key-cancelled")
        assert jobs.cancel("job-cancelled")
        jobs.enqueue(None, id="job-scheduled", delay=60)
        jobs.enqueue(None, id="job-waiting", idempotency_key="key-waiting")
    return {f"job-{state}" for state in ("completed", "failed", "active", "cancelled", "scheduled", "waiting")}


def test_a_queue_in_order_has_no_findings(raw: redis.Redis, queue_name: str, accepted: set[str]) -> None:
    assert audit_keys(raw, queue_name, accepted) == []
    assert [line.partition(":")[0] for line in audit_keys(raw, queue_name, accepted, at_rest=True)] == ["lost"] * 3


def test_the_auditor_knows_each_key_that_a_queue_has() -> None:
    table = {name.partition(":")[0]: kind.encode() for name, kind, _, _ in KEY_TABLE}
    assert table == {**KINDS, **KINDS_OF, "absent": b"none", "hooks": b"any"}
    assert {name for name, *_ in KEY_TABLE if ":" not in name} == {*KINDS, "absent"}


Plant = Callable[[redis.Redis, Keys], Any]
PLANTS: dict[str, tuple[str, Plant]] = {
    "a record that vanished": ("lost", lambda raw, keys: raw.delete(keys.job("job-completed"))),
    "a waiting job that no list has": ("lost", lambda raw, keys: raw.zrem(keys.ready, "job-waiting")),
    "an owned job without its lease": ("lost", lambda raw, keys: raw.zrem(keys.leases, "job-active")),
    "a waiting job that is leased too": ("two places", lambda raw, keys: raw.zadd(keys.leases, {"job-waiting": 1})),
    "a scheduled job that is ready too": ("two places", lambda raw, keys: raw.zadd(keys.ready, {"job-scheduled": 1})),
    "a lease of nobody": ("lease without a job", lambda raw, keys: raw.zadd(keys.leases, {"nobody": 1})),
    "a lease of a finished job": ("lease without a job", lambda raw, keys: raw.zadd(keys.leases, {"job-completed": 1})),
    "a ready id without a record": ("listing without a job", lambda raw, keys: raw.zadd(keys.ready, {"nobody": 1})),
    "a dead entry of a completed job": (
        "listing without a job",
        lambda raw, keys: raw.zadd(keys.dead, {"job-completed": 1}),
    ),
    "a job nobody was told of": (
        "phantom",
        lambda raw, keys: raw.hset(keys.job("extra"), mapping={"id": "extra", "payload": "1", "status": "waiting"}),
    ),
    "half a record": ("half a record", lambda raw, keys: raw.hdel(keys.job("job-waiting"), "id")),
    "a token after the end": ("token", lambda raw, keys: raw.hset(keys.job("job-failed"), "token", "w:1")),
    "an owned job without a token": ("token", lambda raw, keys: raw.hdel(keys.job("job-active"), "token")),
    "a live record that expires": ("expiry", lambda raw, keys: raw.pexpire(keys.job("job-waiting"), 60_000)),
    "a live output that expires": ("expiry", lambda raw, keys: raw.pexpire(keys.events("job-active"), 60_000)),
    "a finished record that stays for ever": ("expiry", lambda raw, keys: raw.persist(keys.job("job-completed"))),
    "steps that stay for ever": ("expiry", lambda raw, keys: raw.hset(keys.steps("job-active"), "a", "1")),
    "a second end": (
        "settled twice",
        lambda raw, keys: raw.xadd(keys.events("job-completed"), {"t": "failed", "d": "x"}),
    ),
    "an end of a running job": (
        "settled twice",
        lambda raw, keys: raw.xadd(keys.events("job-active"), {"t": "completed", "d": "1"}),
    ),
    "an output without its end": ("end", lambda raw, keys: raw.xtrim(keys.events("job-completed"), maxlen=0)),
    "text after the end": ("end", lambda raw, keys: raw.xadd(keys.events("job-completed"), {"t": "chunk", "d": "x"})),
    "another result than was told": ("end", lambda raw, keys: raw.hset(keys.job("job-completed"), "result", '"other"')),
    "another end than was told": ("end", lambda raw, keys: raw.hset(keys.job("job-completed"), "status", "cancelled")),
    "text of an attempt before": (
        "restart",
        lambda raw, keys: raw.xadd(keys.events("job-active"), {"t": "restarted", "d": "2"}),
    ),
    "an output of nobody": ("orphan key", lambda raw, keys: raw.xadd(keys.events("nobody"), {"t": "chunk", "d": ""})),
    "a key of a made-up name": ("orphan key", lambda raw, keys: raw.set(keys.base + "lock", 1)),
    "a key of another type": ("orphan key", lambda raw, keys: raw.set(keys.room, 1)),
    "a push list that stays for ever": ("orphan key", lambda raw, keys: raw.lpush(keys.ctl("w"), ".")),
    "a watch that stays for ever": ("orphan key", lambda raw, keys: raw.set(keys.watch, "somebody 1")),
    "a mapping to nobody": ("orphan key", lambda raw, keys: raw.set(keys.idem("key-x"), "nobody")),
    "a mapping that a failed job holds": (
        "orphan key",
        lambda raw, keys: raw.set(keys.idem("key-failed"), "job-failed"),
    ),
    "a live mapping that expires": ("orphan key", lambda raw, keys: raw.pexpire(keys.idem("key-waiting"), 60_000)),
    "doorbells without bound": ("orphan key", lambda raw, keys: raw.lpush(keys.signal, *range(1001))),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_violation_of_the_keys_is_found(
    raw: redis.Redis, queue_name: str, keys: Keys, accepted: set[str], name: str
) -> None:
    rule, plant = PLANTS[name]
    plant(raw, keys)
    assert rule in {line.partition(":")[0] for line in audit_keys(raw, queue_name, accepted)}


def test_the_journal_shows_what_the_keys_no_longer_do(queue_name: str, keys: Keys) -> None:
    with (
        journalled() as server,
        redis.Redis(port=server.port) as raw,
        Client(redis_url=server.connection_url) as client,
    ):
        jobs = client.queue(Queue(queue_name))
        transport = TcpTransport(server.connection_url)
        ids = [jobs.enqueue(n).id for n in range(4)]
        for n, taken in enumerate(transport.send(holding.reserve(keys, worker="w", request=1, k=3, **TIMES)).jobs):
            transport.send(
                holding.settle(
                    keys, taken, status="completed", body=str(n), ttl_ms=60_000, cancel_ttl_ms=60_000, count=0
                )
            )
        assert jobs.cancel(ids[3])

        def history() -> dict[str, Any]:
            return read_history(read_aof(server.data_dir), queue_name)

        assert audit_history(history(), ids, at_rest=True) == []
        assert [life.ends[0][0] for lives in history().values() for life in lives] == ["completed"] * 3 + ["cancelled"]
        # Settled a second time, and the trace of the first time trimmed away.
        raw.xadd(keys.events(ids[0]), {"t": "completed", "d": "2"})
        raw.xtrim(keys.events(ids[0]), maxlen=1, approximate=False)
        # Taken although it has ended, without a trace.
        raw.hset(keys.job(ids[1]), "token", "w:2")
        raw.hdel(keys.job(ids[1]), "token")
        assert audit_keys(raw, queue_name, ids) == ["end: " + line for line in _times(raw, keys, ids[0])]
        found = audit_history(history(), [*ids, "never written"], at_rest=True)
        assert [line.partition(":")[0] for line in found] == ["settled twice", "run after its end", "lost"]
        # Started over, with no end of the run before.
        raw.hset(keys.job(ids[2]), mapping={"id": ids[2], "payload": "1", "status": "waiting"})
        assert audit_history(history(), ids[2:3], at_rest=True)[0].startswith("lost")
        transport.close()


def _times(raw: redis.Redis, keys: Keys, id: str) -> list[str]:
    """What the keys alone show of it: a time of the end that fits no more."""
    ended: Any = raw.hget(keys.job(id), "finishedAt")
    [(at, _)] = raw.xrange(keys.events(id))  # type: ignore[misc]
    assert at.partition(b"-")[0] != ended
    return [
        f"the record of job {id!r} says completed, and its output completed, or another text",
        f"job {id!r} ended at {ended.decode()}, and its output at {at.decode()}",
    ]


def test_a_call_after_a_cancel_is_found_unless_its_process_was_frozen(tmp_path: Any) -> None:
    log = tmp_path / "calls"
    log.write_text(
        '{"job": "a", "at": 900, "pid": 1}\n{"job": "a", "at": 2000, "pid": 1}\n{"job": "b", "at": 9, "pid": 1}\n'
    )
    lives = read_history(
        [
            [b"HSET", b"{q}:job:a", b"id", b"a", b"payload", b"1"],
            [b"XADD", b"{q}:events:a", b"MAXLEN", b"=", b"10", b"1000-0", b"t", b"cancelled", b"d", b""],
        ],
        "q",
    )
    [found] = audit_calls(read_calls(log), lives)
    assert found == "call after cancel: job 'a' called its provider 1000 ms after it was cancelled"
    assert audit_calls(read_calls(log), lives, excused=lambda pid, ended, at: (pid, ended, at) == (1, 1000, 2000)) == []
