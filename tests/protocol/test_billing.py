"""What each operation costs where every command is billed: the EVALSHA and each redis.call inside it, counted.

The numbers are those of PROTOCOL's table, exactly: one that falls is as much news as one that rises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from outlast.protocol import Call, calls, holding

from .lab import LEASE, Lab

FREE = {"info", "config|resetstat"}
"""What the counting itself sends."""

Prepare = Callable[[Lab], Call[Any]]

HOOK = [("webhook", '{"id":"some","queue":"q","url":"https://example.com/"}')]


@pytest.fixture
def lab(own_lab: Lab) -> Lab:
    """A server that nobody else sends commands to."""
    return own_lab


def bill(lab: Lab, call: Call[Any]) -> dict[str, int]:
    """Commands by name. A script that is given the time is made to ask the server for it all the same."""
    command: tuple[str, ...] = call.args
    if call.script:
        given = "    return tonumber(override)\n"
        source = call.script.source
        assert source.count(given) == 1
        sha = lab.raw("SCRIPT", "LOAD", source.replace(given, "    redis.call('TIME')\n" + given))
        command = ("EVALSHA", sha, *command)
    lab.raw("CONFIG", "RESETSTAT")
    call.decode(lab.connection.execute_command(*command))
    return counted(lab)


def counted(lab: Lab) -> dict[str, int]:
    count: dict[str, int] = {}
    for line in lab.raw("INFO", "commandstats").splitlines():
        if line.startswith("cmdstat_"):
            name, _, numbers = line.removeprefix("cmdstat_").partition(":calls=")
            if name not in FREE:
                count[name] = int(numbers.partition(",")[0])
    return count


def reused(lab: Lab, **options: Any) -> Call[Any]:
    job = lab.running()
    job.emit("old")
    job.complete()
    return lab.enqueue_call(**options)


def reused_dead(lab: Lab, key: str = "") -> Call[Any]:
    lab.running(key=key).fail()
    return lab.enqueue_call()


def delayed(lab: Lab, first: bool) -> Call[Any]:
    lab.enqueue("other", delay_ms=2000)
    return lab.enqueue_call(own=False, delay_ms=1000 if first else 3000)


def hit(lab: Lab) -> Call[Any]:
    lab.enqueue(key="k")
    return lab.enqueue_call("job-b", key="k")


def repeat(lab: Lab, **options: Any) -> Call[Any]:
    call = lab.enqueue_call(own=False, **options)
    lab.send(call)
    return call


def in_use(lab: Lab) -> Call[Any]:
    lab.enqueue()
    call = lab.enqueue_call()
    return Call(call.args, lambda reply: reply, call.script)


def run_of(lab: Lab, due: int) -> Call[Any]:
    lab.enqueue("run", schedule=("s", due))
    return lab.enqueue_call("other", schedule=("s", due))


ENQUEUE: dict[str, tuple[int, Prepare]] = {
    "plain": (7, lambda lab: lab.enqueue_call(own=False)),
    "with a webhook": (7, lambda lab: lab.enqueue_call(own=False, extra=HOOK)),
    "with a key": (9, lambda lab: lab.enqueue_call(own=False, key="k")),
    "with a key that is held": (3, hit),
    "with an own id": (8, lambda lab: lab.enqueue_call()),
    "with an own id and a key": (10, lambda lab: lab.enqueue_call(key="k")),
    "of more than 16 KiB": (8, lambda lab: lab.enqueue_call(own=False, payload="x" * 20_000)),
    "again": (2, repeat),
    "again, with a key": (3, lambda lab: repeat(lab, key="k")),
    "with an id in use": (2, in_use),
    "of a schedule": (10, lambda lab: lab.enqueue_call(schedule=("s", 7))),
    "of a schedule, made before": (2, lambda lab: run_of(lab, 7)),
    "with an id that is used again": (12, reused),
    "with an id that is used again and a key": (14, lambda lab: reused(lab, key="k")),
    "with the id of a dead job": (13, reused_dead),
    "with the id of a dead job that had another key": (14, lambda lab: reused_dead(lab, "k")),
    "delayed": (6, lambda lab: delayed(lab, False)),
    "delayed, becoming the earliest": (7, lambda lab: delayed(lab, True)),
}


def with_jobs(lab: Lab, count: int, k: int, **options: Any) -> Call[Any]:
    for index in range(count):
        lab.enqueue(f"job-{index}", own=False)
    return lab.reserve_call(k, **options)


def ruled(lab: Lab, **rules: int) -> Call[Any]:
    lab.raw("HSET", lab.keys.config, *(part for pair in rules.items() for part in pair))
    lab.enqueue(extra=[("owner", "o")])
    return lab.reserve_call()


def crowded(lab: Lab) -> Call[Any]:
    lab.send(ruled(lab, concurrency=1))
    lab.enqueue("job-b")
    return lab.reserve_call()


def leaving(lab: Lab) -> Call[Any]:
    lab.raw("HSET", lab.keys.config, "concurrency", 1)
    return lab.reserve_call(limited="room")


def paused(lab: Lab) -> Call[Any]:
    lab.running().release(pause_ms=5000)
    return lab.reserve_call(3)


def attempted(lab: Lab) -> Call[Any]:
    lab.enqueue()
    job = lab.one()
    job.emit("x")
    job.retry(1000)
    lab.now += 1000
    lab.reserve(0)  # promoted
    return lab.reserve_call()


def due(lab: Lab, count: int, k: int) -> Call[Any]:
    for index in range(count):
        lab.enqueue(f"job-{index}", own=False, delay_ms=1000)
    lab.now += 1000
    return lab.reserve_call(k)


def lapsed(lab: Lab, looks: int, **options: Any) -> Call[Any]:
    lab.running(**options)
    if looks == 1:
        lab.now += LEASE + 1
    else:
        lab.lapse()
    return lab.reserve_call(0)


def spent(lab: Lab) -> Call[Any]:
    job = lab.running(max_attempts=1)
    lab.send(job.flush_call(usage='{"cost":1}'))
    lab.lapse()
    return lab.reserve_call(0)


def taken_before(lab: Lab) -> Call[Any]:
    lab.enqueue("a", own=False)
    lab.enqueue("b", own=False)
    lab.reserve(2, request=5)
    return lab.reserve_call(2, request=5, again=True)


def ahead(lab: Lab, *watchers: str) -> Call[Any]:
    lab.enqueue(delay_ms=1000)
    for watcher in watchers:
        lab.reserve(worker=watcher)
    return lab.reserve_call()


RESERVE: dict[str, tuple[int, Prepare]] = {
    "of 1": (8 + 2, lambda lab: with_jobs(lab, 1, 1)),
    "of 5": (8 + 2 * 5, lambda lab: with_jobs(lab, 5, 5)),
    "of 5, asking for 9": (8 + 2 * 5, lambda lab: with_jobs(lab, 5, 9)),
    "empty": (6, lambda lab: lab.reserve_call()),
    "empty, after a bell": (7, lambda lab: lab.reserve_call(bell=True)),
    "empty, with a time ahead that nobody waits for": (6 + 3, ahead),
    "empty, with a time ahead that it waits for": (6 + 1, lambda lab: ahead(lab, "w")),
    "empty, with a time ahead that another waits for": (6 + 1, lambda lab: ahead(lab, "other")),
    "of none, only to promote and reclaim": (5, lambda lab: with_jobs(lab, 1, 0)),
    "while the queue is paused": (5, paused),
    "of 1 under a concurrency limit": (8 + 2 + 1, lambda lab: ruled(lab, concurrency=5)),
    "of 1 under a rate": (8 + 2 + 1, lambda lab: ruled(lab, rate=5, interval=1000)),
    "of 1 under both": (8 + 2 + 2, lambda lab: ruled(lab, concurrency=5, rate=5, interval=1000)),
    "of 1 of an owner under a cap": (8 + 2 + 3, lambda lab: ruled(lab, ownerCap=5)),
    "of 1 when there is no room": (5 + 1, lambda lab: crowded(lab)),
    "leaving a limit": (6 + 2, lambda lab: leaving(lab)),
    "stale": (2, lambda lab: lab.reserve_call(stale_at_ms=lab.now - 1)),
    "of a job that had an attempt": (8 + 2 + 3, attempted),
    "promoting 1, taking it": (8 + 2 + 3 + 2, lambda lab: due(lab, 1, 1)),
    "promoting 10, taking them": (8 + 20 + 3 + 20, lambda lab: due(lab, 10, 10)),
    "promoting 11, taking them: one more look": (8 + 22 + 4 + 22, lambda lab: due(lab, 11, 11)),
    "promoting 4, ringing for the rest": (8 + 2 + 3 + 8 + 1, lambda lab: due(lab, 4, 1)),
    "finding a lapsed lease": (5 + 2, lambda lab: lapsed(lab, 1)),
    "reclaiming a job": (5 + 1 + 3 + 2 + 1, lambda lab: lapsed(lab, 2)),
    "reclaiming a job for the dead": (5 + 1 + 8, lambda lab: lapsed(lab, 2, max_attempts=1)),
    "reclaiming a job for the dead, with a webhook": (
        5 + 1 + 8 + 4,
        lambda lab: lapsed(lab, 2, max_attempts=1, extra=HOOK),
    ),
    "reclaiming a job for the dead, with usage": (5 + 1 + 8 + 3, spent),
    "again, for 2 jobs that it took": (3 + 2 * 2 + 2, taken_before),
}


def held(lab: Lab, call: Callable[[Any], Call[Any]], **options: Any) -> Call[Any]:
    return call(lab.running(**options))


def again(lab: Lab) -> Call[Any]:
    job = lab.running()
    lab.send(job.flush_call(("chunk", "x")))
    return job.flush_call(("chunk", "x"), again=True)


def renewal(lab: Lab, count: int, relief: bool = False) -> Call[Any]:
    for index in range(count):
        lab.enqueue(f"job-{index}", own=False)
    jobs = [job.job for job in lab.take(count)]
    return holding.renew(lab.keys, jobs, lease_ms=LEASE, relief=relief, now=lab.now)


def emitted(job: Any) -> Call[Any]:
    job.emit("x")
    return job.release_call()


def using(lab: Lab) -> Any:
    lab.running("job-b").uses(a=1).complete()
    return lab.running().uses(a=1, b=2.5, c=3)


def stepped(job: Any) -> Call[Any]:
    job.step("s", "1")
    return job.settle_call("completed", "1")


def stale(lab: Lab, job: Any) -> Call[Any]:
    lab.raw("HSET", lab.keys.steps(job.id), "gen", "1", "s:s", "old")
    return job.step_call("s", "1", stale=True)


def flagged(lab: Lab, call: Callable[[Any], Call[Any]], **options: Any) -> Call[Any]:
    job = lab.running(**options)
    lab.cancel()
    return call(job)


def undelivered(lab: Lab) -> Call[Any]:
    """The delivery queue's doorbell is full of hints that nobody listened to."""
    for _ in range(10):
        lab.raw("LPUSH", lab.keys.base + "hooks:signal", *["1"] * 100)
    return lab.running(extra=HOOK).settle_call("completed", "1")


def settled(lab: Lab) -> Call[Any]:
    call = lab.running().settle_call("completed", "1")
    lab.send(call)
    return call


HOLDER: dict[str, tuple[int, Prepare]] = {
    "flush of 1": (3, lambda lab: held(lab, lambda job: job.flush_call(("chunk", "x")))),
    "flush of 4": (6, lambda lab: held(lab, lambda job: job.flush_call(*[("chunk", "x")] * 4))),
    "flush of 1, renewing": (6, lambda lab: held(lab, lambda job: job.flush_call(("chunk", "x"), renew=True))),
    "flush of progress": (4, lambda lab: held(lab, lambda job: job.flush_call(("progress", "1"), progress="1"))),
    "flush of progress, renewing": (
        6,
        lambda lab: held(lab, lambda job: job.flush_call(("progress", "1"), progress="1", renew=True)),
    ),
    "flush again": (3, again),
    "renewal of 1": (4, lambda lab: renewal(lab, 1)),
    "renewal of 7": (10, lambda lab: renewal(lab, 7)),
    "renewal of 7 with a full database": (11, lambda lab: renewal(lab, 7, relief=True)),
    "settle": (8, lambda lab: held(lab, lambda job: job.settle_call("completed", "1"))),
    "settle with a key": (10, lambda lab: held(lab, lambda job: job.settle_call("completed", "1"), key="k")),
    "settle failed": (9, lambda lab: held(lab, lambda job: job.settle_call("failed", "1"))),
    "settle failed with a key": (11, lambda lab: held(lab, lambda job: job.settle_call("failed", "1"), key="k")),
    "settle of a cancelled job": (8, lambda lab: flagged(lab, lambda job: job.settle_call("failed", "1"))),
    "settle of a cancelled job with a key": (
        10,
        lambda lab: flagged(lab, lambda job: job.settle_call("completed", "1"), key="k"),
    ),
    "settle again": (2, settled),
    "settle with usage": (8 + 2, lambda lab: using(lab).settle_call("completed", "1")),
    "settle with the first usage of the day": (
        8 + 3,
        lambda lab: lab.running().uses(a=1).settle_call("completed", "1"),
    ),
    "retry with usage": (7 + 2, lambda lab: using(lab).retry_call(5)),
    "release with usage": (8 + 2, lambda lab: using(lab).release_call()),
    "flush of 1 with usage": (4, lambda lab: held(lab, lambda job: job.flush_call(("chunk", "x"), usage="{}"))),
    "flush of 1 with usage, renewing": (
        6,
        lambda lab: held(lab, lambda job: job.flush_call(("chunk", "x"), usage="{}", renew=True)),
    ),
    "settle with steps": (9, lambda lab: held(lab, stepped)),
    "settle with a webhook": (
        8 + 4,
        lambda lab: held(lab, lambda job: job.settle_call("completed", "1"), extra=HOOK),
    ),
    "settle with a webhook nobody delivers": (8 + 5, lambda lab: undelivered(lab)),
    "step": (4, lambda lab: held(lab, lambda job: job.step_call("s", "1"))),
    "step over those of another life": (6, lambda lab: held(lab, lambda job: stale(lab, job))),
    "retry": (7, lambda lab: held(lab, lambda job: job.retry_call(5))),
    "retry, ringing": (8, lambda lab: held(lab, lambda job: job.retry_call(5, ring=True))),
    "retry of a cancelled job": (9, lambda lab: flagged(lab, lambda job: job.retry_call(5))),
    "retry of a cancelled job with a key": (11, lambda lab: flagged(lab, lambda job: job.retry_call(5), key="k")),
    "retry of a cancelled job with a webhook": (
        9 + 4,
        lambda lab: flagged(lab, lambda job: job.retry_call(5), extra=HOOK),
    ),
    "release": (8, lambda lab: held(lab, lambda job: job.release_call())),
    "release after output": (11, lambda lab: held(lab, emitted)),
    "release, pausing": (10, lambda lab: held(lab, lambda job: job.release_call(pause_ms=9))),
    "release of a cancelled job": (9, lambda lab: flagged(lab, lambda job: job.release_call())),
    "release of a cancelled job with a webhook": (
        9 + 4,
        lambda lab: flagged(lab, lambda job: job.release_call(), extra=HOOK),
    ),
}


def admits(lab: Lab, count: int) -> Call[Any]:
    lab.raw("HSET", lab.keys.config, "ownerCap", 1)
    for index in range(count):
        lab.enqueue(f"job-{index}", own=False, extra=[("owner", "o")])
    lab.one().complete()
    if count > 1:
        lab.running("job-x", extra=[("owner", "o")], priority=9)
        lab.take(1)
    return holding.admit(lab.keys, "job-0", "o")


def cancel_call(lab: Lab, id: str = "job-a", **options: Any) -> Call[Any]:
    return calls.cancel(lab.keys, id, result_ttl_ms=1000, now=lab.now, **options)


def cancel(lab: Lab, state: Callable[[], Any], **options: Any) -> Call[Any]:
    state()
    return cancel_call(lab, **options)


def second_cancel(lab: Lab) -> Call[Any]:
    lab.running("job-b")
    lab.running()
    lab.cancel("job-b")
    return cancel_call(lab)


def foreign_cancel(lab: Lab) -> Call[Any]:
    lab.running()
    lab.raw("HSET", lab.keys.job("job-a"), "token", "1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed")
    return cancel_call(lab)


def revive(lab: Lab, repeated: bool = False) -> Call[Any]:
    job = lab.running()
    job.emit("x")
    job.fail()
    call = calls.retry_dead(lab.keys, "job-a", nonce="n", max_attempts=3, now=lab.now)
    if repeated:
        lab.send(call)
    return call


def prune(lab: Lab, alive: int, gone: int) -> Call[Any]:
    for index in range(alive + gone):
        lab.running(f"job-{index}").fail()
    for index in range(gone):
        lab.raw("DEL", lab.keys.job(f"job-{index}"))
    return holding.prune_dead(lab.keys)


OTHERS: dict[str, tuple[int, Prepare]] = {
    "admit, nobody": (4, lambda lab: admits(lab, 1)),
    "admit, the next one": (8, lambda lab: admits(lab, 2)),
    "cancel waiting": (8, lambda lab: cancel(lab, lab.enqueue)),
    "cancel scheduled": (8, lambda lab: cancel(lab, lambda: lab.enqueue(delay_ms=9))),
    "cancel waiting with a key": (10, lambda lab: cancel(lab, lambda: lab.enqueue(key="k"))),
    "cancel one that waits for its second attempt": (9, lambda lab: cancel(lab, lambda: lab.running().retry())),
    "cancel waiting with a result TTL of its own": (
        7,
        lambda lab: cancel(lab, lambda: lab.enqueue(extra=[("resultTtlMs", "2000")])),
    ),
    "cancel waiting with a webhook": (8 + 4, lambda lab: cancel(lab, lambda: lab.enqueue(extra=HOOK))),
    "cancel active with a webhook": (6, lambda lab: cancel(lab, lambda: lab.running(extra=HOOK))),
    "cancel active": (6, lambda lab: cancel(lab, lab.running)),
    "cancel active with a full database": (7, lambda lab: cancel(lab, lab.running, relief=True)),
    "cancel a second one of the same worker": (5, second_cancel),
    "cancel one that a foreign worker has": (4, foreign_cancel),
    "cancel active, again": (2, lambda lab: cancel(lab, lambda: (lab.running(), lab.cancel()))),
    "cancel cancelled": (2, lambda lab: cancel(lab, lambda: (lab.enqueue(), lab.cancel()))),
    "cancel completed": (2, lambda lab: cancel(lab, lambda: lab.running().complete())),
    "cancel unknown": (2, lambda lab: cancel(lab, lambda: None)),
    "retry_dead": (15, revive),
    "retry_dead, again": (2, lambda lab: revive(lab, repeated=True)),
    "retry_dead of what is not dead": (
        3,
        lambda lab: calls.retry_dead(lab.keys, "job-a", nonce="n", max_attempts=3, now=lab.now),
    ),
    "prune_dead, nothing gone": (2 + 3, lambda lab: prune(lab, 3, 0)),
    "cancel waiting, when purged": (8, lambda lab: cancel(lab, lab.enqueue, before_ms=lab.now)),
    "cancel active, when purged": (2, lambda lab: cancel(lab, lab.running, before_ms=lab.now)),
    "purge_dead, nothing": (2, lambda lab: calls.purge_dead(lab.keys, lab.now)),
    "purge_dead of three": (2 + 3 + 2, lambda lab: (prune(lab, 3, 0), calls.purge_dead(lab.keys, lab.now))[1]),
    "prune_dead, some gone": (2 + 3 + 1, lambda lab: prune(lab, 1, 2)),
    "get": (1, lambda lab: cancel(lab, lab.enqueue) and calls.get(lab.keys, "job-a", lab.queue)),
}

ROWS = {
    f"{group} {name}".strip(): row
    for group, rows in (("enqueue", ENQUEUE), ("reserve", RESERVE), ("", HOLDER), ("", OTHERS))
    for name, row in rows.items()
}


@pytest.mark.parametrize("name", ROWS)
def test_billed_commands(name: str, lab: Lab) -> None:
    expected, prepare = ROWS[name]
    count = bill(lab, prepare(lab))
    assert sum(count.values()) == expected, count


BUDGETS = {
    # DESIGN §3.5
    "enqueue plain": 8,
    "enqueue with an own id": 8,
    "enqueue delayed, becoming the earliest": 8,
    "enqueue with a webhook": 8,
    "enqueue of more than 16 KiB": 8,
    "enqueue with a key": 10,
    "enqueue with an own id and a key": 10,
    "flush of 1": 3,
    "flush of 1, renewing": 6,
    "flush of progress, renewing": 6,
    "settle": 8,
    "settle with a key": 10,
    "settle with a webhook nobody delivers": 8 + 5,
    "settle failed": 9,
    "settle failed with a key": 11,
    # 7 and 9, and 1 for the rule of the queue on how long results are kept
    "cancel waiting": 7 + 1,
    "cancel scheduled": 7 + 1,
    "cancel waiting with a key": 9 + 1,
    "cancel active": 7,
    "reserve of 1": 8 + 2,
    "reserve of 5": 8 + 2 * 5,
    "reserve of 1 under both": 8 + 2 + 2,
    "reserve empty": 7,
    "reserve empty, after a bell": 7,
}


def test_the_rows_are_within_the_design_budgets() -> None:
    assert {name: ROWS[name][0] for name, most in BUDGETS.items() if ROWS[name][0] > most} == {}


def test_a_silent_job_costs_26_with_its_blpop() -> None:
    assert ROWS["enqueue plain"][0] + ROWS["reserve of 1"][0] + ROWS["settle"][0] + 1 == 26


def test_the_count_is_that_of_the_script_as_it_is(lab: Lab) -> None:
    call = lab.enqueue_call(own=False, now=None)
    lab.send(lab.enqueue_call("warm", own=False))
    lab.raw("CONFIG", "RESETSTAT")
    lab.send(call)
    assert counted(lab) == {"evalsha": 1, "hmget": 1, "time": 1, "hset": 1, "incr": 1, "zadd": 1, "lpush": 1}


def test_quiet_reads_need_no_script(lab: Lab) -> None:
    """get, watch, wait, stats and dead work with a token that may only read."""
    lab.running().emit("x")
    lab.raw("CONFIG", "RESETSTAT")
    lab.get()
    lab.stats()
    lab.dead()
    lab.read()
    lab.read(record_first=True)
    assert set(counted(lab)) <= {"hmget", "xread", "xrevrange", "zcard", "zrange", "zrangebyscore", "time"}
