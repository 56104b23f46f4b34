"""Every transition in every variant, once, on one queue: what there is to see of keys and commands, is seen here."""

from __future__ import annotations

from outlast.protocol import calls, holding

from .lab import LEASE, Lab

HOOK = [("webhook", '{"id":"some","queue":"q","url":"https://example.com/"}')]


def tour(lab: Lab) -> None:
    keys = lab.keys

    # enqueue: minted and own ids, keys, delays, reuse of an id, of a foreign record, of a dead job with another key
    lab.enqueue("minted", own=False, extra=HOOK)
    call = lab.enqueue_call("own", key="k", payload_hash="h", extra=HOOK)
    lab.send(call)
    lab.send(call)
    lab.enqueue("other", key="k")
    lab.enqueue("delayed", delay_ms=1000, expires_ms=5000, deadline_ms=9000, extra=[("owner", "me")])
    lab.enqueue("later", own=False, delay_ms=2000)
    lab.enqueue("gone", own=False)
    lab.raw("DEL", keys.job("gone"))
    lab.raw("HSET", keys.job("foreign"), "id", "foreign", "payload", "{}")
    lab.raw("ZADD", keys.ready, 1, "foreign")
    lab.enqueue("foreign", extra=HOOK)

    # reserve: several, one again, promoted, lapsed with each end, empty after a bell
    minted, own, foreign = lab.take(4)
    lab.reserve(2, worker="w", request=1, again=True)
    lab.now += 2000
    delayed, later = lab.take(2, worker="v", bell=True)
    lab.take(1, worker="v", bell=True)

    # holders: flush, renew, retry, release, settle; repeats of each
    for job in (minted, own, foreign, delayed, later):
        job.emit("a", "b")
    call = own.flush_call(("chunk", "c"), renew=True, progress="0.5")
    lab.send(call)
    own.flush(("chunk", "c"), renew=True, progress="0.5", again=True)
    for job in (own, minted, delayed):
        assert job.step("one", "1") == "ok"
        assert job.step("two", "2", stale=True) == "ok"
    for job in (own, minted, delayed):
        job.uses(tokens=7, cost=0.25)
    lab.raw("HSET", keys.steps("minted"), "gen", "1")
    assert minted.step("one", "1", stale=True) == "ok"
    lab.send(holding.renew(keys, [minted.job, own.job], lease_ms=LEASE, now=lab.now, relief=True))
    own.complete('"ok"')
    own.complete('"ok"')
    minted.retry(10, ring=True)
    minted.retry(10, ring=True)
    delayed.release(pause_ms=100)
    foreign.release()
    foreign.release()
    lab.reserve(1)
    lab.now += 100
    minted, foreign, delayed = sorted(lab.take(3), key=lambda job: ["minted", "foreign", "delayed"].index(job.id))
    later.fail()

    # cancel in each state; a cancelled job with a key; reuse with a free and a held key
    assert lab.cancel("minted") == "requested"
    assert lab.cancel("foreign", relief=True) == "requested"
    assert lab.cancel("delayed") == "requested"
    assert minted.renew() == "cancel"
    delayed.stepped = True
    assert [minted.release(), foreign.retry(), delayed.complete()] == ["cancelled"] * 3
    for id in ("minted", "own", "unknown"):
        lab.cancel(id)
    lab.enqueue("waits", key="k2", extra=HOOK)
    lab.cancel("waits")
    lab.enqueue("scheduled", delay_ms=5000)
    lab.cancel("scheduled")
    # A job that a stray lists twice.
    lab.enqueue("twice", delay_ms=5000)
    lab.raw("ZADD", keys.ready, 1, "twice")
    lab.one("twice").complete()

    # keys and dead letters: fail with a key, revive, reuse a dead job's id, lapse of the last attempt, prune
    failing = lab.running("dies", key="k3")
    failing.emit("x")
    failing.fail()
    lab.retry_dead("dies")
    lab.one("dies").fail()
    lab.enqueue("dies", key="k4")
    lab.raw("SET", keys.idem("k4"), "dies")
    lab.one("dies").fail()
    lab.raw("SET", keys.idem("k4"), "dies")
    lab.enqueue("dies")
    lab.one("dies").retry(5)
    lab.now += 5
    lab.one("dies").release()
    lab.cancel("dies")
    lab.running("last", max_attempts=1, key="k5", extra=HOOK)
    lab.running("flagged", key="k6")
    lab.cancel("flagged")
    lab.running("again")
    lab.lapse()
    lab.reserve(0)
    lab.raw("ZADD", keys.dead, 1, "nobody")
    lab.send(holding.prune_dead(keys))
    lab.one("again").complete()
    for id, end in (("r1", "retry"), ("r2", "release"), ("r3", "complete")):
        job = lab.running(id, key=f"key-{id}")
        lab.cancel(id)
        assert getattr(job, end)() == "cancelled"
    lab.running("runs")
    lab.cancel("runs")
    lab.enqueue("stays", delay_ms=5000)
    lab.enqueue("run", delay_ms=5000, schedule=("nightly", 7))
    lab.enqueue("waiting", own=False, key="k7")
    lab.send(holding.seen(keys, "w", "here"))

    # limits: an owner's cap holds back, lets in, outlives a foreign end and a crash; concurrency, rate, large payloads
    lab.raw("DEL", keys.ready, keys.leases)
    lab.running("purged").fail()
    lab.send(calls.purge_dead(keys, lab.now))
    rules = {"concurrency": 3, "rate": 10, "interval": 1000, "burst": 3, "ownerCap": 1, "maxAttempts": 1}
    lab.raw("HSET", keys.config, *(part for pair in rules.items() for part in pair), "leaseMs", LEASE)
    lab.enqueue("large", own=False, payload="x" * 20_000)
    for id in ("o1", "o2", "o3", "o4"):
        lab.enqueue(id, extra=[("owner", "me")])
    large, o1 = lab.take(3)
    o1.complete()
    assert lab.send(holding.admit(keys, "o1", "me"))
    lab.now += 1000
    lab.one("o2", limited="room")
    lab.raw("ZREM", keys.leases, "o2")
    lab.raw("ZADD", keys.scheduled, 1, "o3")
    lab.one("o3")
    lab.lapse()
    lab.reserve(0)
    large.complete()
    lab.now += 1000
    lab.enqueue("owned", extra=[("owner", "you")])
    lab.take(1)
    lab.enqueue("much-later", delay_ms=5000)
