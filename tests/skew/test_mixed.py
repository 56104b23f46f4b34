"""A deploy is never everywhere at once: clients, workers and watchers of two releases on one queue."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.faults.audit import audit_keys
from tests.faults.processes import until
from tests.protocol.benni import Benni
from tests.protocol.lab import Lab

from outlast.protocol import Keys
from outlast.protocol.digests import DIGESTS

from .conftest import Actor, Build

Act = Callable[..., Actor]


async def ends_well(worker: Actor) -> None:
    """With 0; or with 1, a hand-back, where the reply to its last settle was still on the way: it has no grace."""
    code = await worker.exit_code()
    errors = worker.errors()
    assert code == 0 or (code == 1 and "hands 0 running jobs back" in errors), errors


def test_the_two_builds_differ_in_every_script_that_a_job_meets(old_build: Path) -> None:
    before: dict[str, Any] = {}
    exec((old_build / "client/src/outlast/protocol/digests.py").read_text(), before)
    assert set(before["DIGESTS"]) < set(DIGESTS)
    assert all(before["DIGESTS"][name] != DIGESTS[name] for name in ("enqueue", "reserve", "flush", "settle", "retry"))


@pytest.mark.parametrize(
    ("producers", "workers"),
    [(["old"], ["new", "new"]), (["new"], ["old", "old"]), (["old", "new"], ["old", "new", "old", "new"])],
    ids=["an old client and new workers", "a new client and old workers", "both at once"],
)
async def test_h70_nothing_is_lost_or_doubled_while_two_releases_share_a_queue(
    act: Act, raw: redis.Redis, queue_name: str, producers: list[Build], workers: list[Build]
) -> None:
    """Retries, dead letters, delays, priorities, keys, cancels; a worker is killed, another hands its jobs back."""
    running = [act(build, "work") for build in workers]
    for worker in running:
        assert ((await worker.wait_for("up"))["settle"] == DIGESTS["settle"]) is (worker.build == "new")
    making = [act(build, "produce", f"by-{build}") for build in producers]
    made: dict[str, str] = {}
    for producer in making:
        made |= (await producer.wait_for("made"))["jobs"]
    watching = [act(build, "watch", [*made]) for build in ("old", "new")]

    await running[0].wait_for("start", 2)
    running[0].kill()
    await running[1].wait_for("start", 2)
    running[1].signal(signal.SIGTERM)  # with no grace: what runs is handed back
    running += [act(build, "work") for build in workers[:2]]
    for producer in making:
        assert (await producer.wait_for("cancelled all", seconds=60))["left"] == []
        assert await producer.exit_code() == 0
    seen = [(await watcher.wait_for("seen", seconds=90))["jobs"] for watcher in watching]

    right: dict[str, list[Any]] = {
        id: {"never": ["failed", "TerminalJobError: never"], "hang": ["cancelled"], "cancelled": ["cancelled"]}.get(
            do, ["completed", f"{id}:abc", {"id": id, "ü": [1, 2.5, None]}]
        )
        for id, do in made.items()
    }
    assert seen == [right, right], "watchers of both builds see each job end once, with the text of its last attempt"
    await until(lambda: raw.zcard(Keys(queue_name).leases) == 0, "nothing runs any more")
    assert audit_keys(raw, queue_name, [*made], at_rest=True) == []
    ended = Counter(line["id"] for worker in running for line in worker.said("end"))
    again = {id: count for id, count in ended.items() if count > 1}
    assert len(again) <= 3, f"only what the killed worker had in hand may have run to its end twice: {again}"
    for worker in running[2:]:
        worker.signal(signal.SIGTERM)
        await ends_well(worker)


@pytest.mark.parametrize("first", ["old", "new"])
async def test_h70_a_release_takes_over_what_the_other_left_in_mid_run(
    act: Act, raw: redis.Redis, queue_name: str, first: Build
) -> None:
    """Forwards in a deploy, backwards in a rollback. Fields that a build does not know stay as they were."""
    second: Build = "new" if first == "old" else "old"
    keys = Keys(queue_name)
    worker = act(first, "work")
    await worker.wait_for("up")
    client = act(first, "produce", "mid")
    made = (await client.wait_for("made"))["jobs"]
    await worker.wait_for("start", 3)
    for id in made:
        raw.hset(keys.job(id), "ofALaterRelease", "kept")
    worker.kill()
    other = act(second, "work")
    watcher = act(second, "watch", [*made])
    await client.wait_for("cancelled all", seconds=60)
    seen = (await watcher.wait_for("seen", seconds=60))["jobs"]
    assert Counter(end[0] for end in seen.values()) == {"completed": 21, "failed": 3, "cancelled": 6}
    assert all(end[1] == f"{id}:abc" for id, end in seen.items() if end[0] == "completed")
    assert {raw.hget(keys.job(id), "ofALaterRelease") for id in made} == {b"kept"}
    assert audit_keys(raw, queue_name, [*made], at_rest=True) == []
    other.signal(signal.SIGTERM)
    await ends_well(other)


@pytest.mark.parametrize("build", ["old", "new"])
async def test_records_of_the_typescript_side_run_whatever_fields_they_have(
    act: Act, raw: redis.Redis, queue_name: str, build: Build
) -> None:
    keys = Keys(queue_name)
    payload = json.dumps({"do": "text"})
    Benni(Lab(raw, keys)).enqueue("whole", payload)
    records = {
        "bare": {"id": "bare", "payload": payload},
        "unknown": {
            "id": "unknown",
            "payload": payload,
            "status": "waiting",
            "attempt": "0",
            "shape": "9",
            "é": "\x00",
        },
        "status": {"id": "status", "payload": payload, "status": "parked", "maxAttempts": "2"},
        "numbers": {"id": "numbers", "payload": payload, "attempt": "", "priority": "x", "createdAt": "1.8e12"},
    }
    for n, (id, record) in enumerate(records.items()):
        raw.hset(keys.job(id), mapping=record)
        raw.zadd(keys.ready, {id: n})
    worker = act(build, "work")
    watcher = act("old" if build == "new" else "new", "watch", [*records, "whole"])
    seen = (await watcher.wait_for("seen", seconds=60))["jobs"]
    assert {id: end[:2] for id, end in seen.items()} == {id: ["completed", f"{id}:abc"] for id in [*records, "whole"]}
    assert raw.hmget(keys.job("unknown"), "shape", "é") == [b"9", b"\x00"], "what it does not know it leaves alone"
    worker.signal(signal.SIGTERM)
    await ends_well(worker)
