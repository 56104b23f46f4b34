"""What is written comes back: ids, keys and texts of every kind, through every path; and how records are read."""

from __future__ import annotations

import time

import pytest

from outlast import ReplyShapeError
from outlast.protocol import Keys, calls, holding

from .lab import Lab, text_of

IDS = [
    "a:b",
    ":a",
    "a:b:c",
    "-rf",
    "--help",
    "123",
    "007",
    "{x}",
    "}{",
    "a b",
    " a",
    "a/b?c#d%2F",
    "..",
    ".",
    "é",
    "e\u0301",
    "🙂",
    "None",
    "null",
    "*",
    "a*",
    "a?",
    "[a]",
    "%d%s",
    "0 5:x",
    "w:1",
    "ready",
    "events:1",
    "job:1",
    "signal",
    "x" * 512,
]


def test_h43_every_id_works_in_every_call(lab: Lab) -> None:
    """All of them at once in one queue: no two share a record, and each id is the key of another job as well."""
    for id in IDS:
        assert lab.enqueue(id, key=f"key of {id}", payload=f'"{len(id)}"').id == id
    first = lab.reserve(len(IDS), request=1).jobs
    assert [job.id for job in first] == IDS
    assert lab.reserve(len(IDS), request=1, again=True).jobs == first
    lab.lapse()
    held = lab.take(len(IDS))
    assert sorted(job.id for job in held) == sorted(IDS)
    for job in held:
        assert job.emit(f"text of {job.id}") == "ok"
        assert job.fail(f"E: {job.id}") == "failed"
    assert sorted(lab.dead()) == sorted(IDS)
    lab.now += 10
    for id in IDS:
        assert lab.retry_dead(id)
        assert lab.cancel(id) == "cancelled"
        assert lab.enqueue(id, key=id).id == id
        assert lab.get(id).error is None
    for job in lab.take(len(IDS)):
        job.emit(f"new text of {job.id}")
        assert lab.cancel(job.id) == "requested"
        assert job.complete() == "cancelled"
    for id in IDS:
        assert text_of(lab.read(id)) == f"new text of {id}"
        assert lab.get(id).status == "cancelled"
    assert lab.raw("LLEN", lab.keys.ctl("w")) == len(IDS)


def test_h44_keys_of_one_queue_or_job_are_never_those_of_another(lab: Lab, queue_name: str) -> None:
    ids = ["ready", "events:1", "job:1", "1:lock", "signal", "idem:x", "seq"]
    labs = [Lab(lab.connection, Keys(name)) for name in (queue_name, f"{queue_name}:job", f"{queue_name}:events")]
    for each in labs:
        for id in ids:
            each.enqueue(id, key=id)
    for count, each in enumerate(labs, 1):
        for job in each.take(count, worker="ready"):
            job.emit("x")
            job.complete()
        each.take(1)
        each.cancel(ids[-1])
    for count, each in enumerate(labs, 1):
        stats = each.stats()
        assert (stats.waiting, stats.active, stats.scheduled, stats.dead) == (len(ids) - count - 2, 1, 0, 0)
    names = [each.keys.base + name for each in labs for name in each.state()]
    assert len(names) == len(set(names))


TEXTS = [
    '{"a":[],"b":{},"c":[[]],"":1,"__proto__":1,"ключ":[],"n":{"deep":[]}}',
    "[9007199254740993,9223372036854775807,-9223372036854775808," + "1" + "0" * 30 + ",0.1,1e-320,-0.0,1.0]",
    '["106242075399214372653","007","1e5",true,null]',
    "[" * 400 + "]" * 400,
    '"\\u0000 \\ud83d\\ude42 🙂 \n\r\u2028"',
    "",
    " ",
    "not json at all",
    "0",
    "null",
    "x" * 100_000,
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:20])
def test_h40_h41_texts_survive_every_path_unchanged(text: str, lab: Lab) -> None:
    """No script parses, prints or rounds what users store."""
    lab.enqueue(payload=text, delay_ms=5, max_attempts=9)
    lab.now += 5
    job = lab.one()
    assert job.job.payload == text
    job.emit(text)
    job.progress("0.3333333333333333")
    job.retry(5, text)
    lab.now += 5
    assert lab.one().job.payload == text
    lab.lapse()
    job = lab.one()
    assert job.job.payload == text
    job.fail(text)
    assert lab.get().error == text
    lab.now += 5
    lab.retry_dead()
    [again] = lab.reserve(1, request=99).jobs
    assert lab.reserve(1, request=99, again=True).jobs == [again]
    assert again.payload == text
    job = type(job)(lab, again)
    job.emit(text)
    job.complete(text)
    assert lab.raw("HGET", lab.keys.job("job-a"), "result") == text
    assert [event.data for event in lab.step(lab.tail()) if event.type == "chunk"] == [text]


def test_h42_progress_is_kept_over_attempts_as_it_was_written(lab: Lab) -> None:
    job = lab.running()
    for value in ("0", "0.3333333333333333", "0.30000000000000004", "1e-7", "1"):
        job.progress(value)
        assert lab.get().progress == float(value)
    job.retry()
    job = lab.one()
    assert lab.get().progress == 1.0
    assert [event.type for event in lab.read()] == ["restarted"]


# -- reading records -------------------------------------------------------------------------------------------------


def test_get_of_a_record_with_foreign_or_broken_fields(lab: Lab) -> None:
    lab.raw("HSET", lab.keys.job("job-a"), "id", "job-a")
    job = lab.get()
    assert (job.status, job.attempt, job.starts, job.max_attempts, job.priority) == ("waiting", 0, 0, 1, 0)
    assert (job.progress, job.created_at, job.result, job.error, job.idempotency_key) == (0.0, None, None, None, None)
    lab.raw(
        "HSET", lab.keys.job("job-a"), "attempt", "many", "progress", "half", "createdAt", "soon", "priority", "inf"
    )
    job = lab.get()
    assert (job.attempt, job.progress, job.created_at, job.priority) == (0, 0.0, None, 0)
    lab.raw("HSET", lab.keys.job("job-a"), "createdAt", "9" * 30, "status", "completed", "result", b"\xff")
    job = lab.get()
    assert job.created_at is None
    with pytest.raises(ReplyShapeError):
        _ = job.result


def test_get_of_nothing_is_none(lab: Lab) -> None:
    assert lab.get("unknown") is None
    lab.raw("HSET", lab.keys.job("half"), "status", "active")
    assert lab.get("half") is None


@pytest.mark.parametrize("reply", [None, 5, "x", [], ["x"]])
def test_get_of_a_strange_reply_is_an_error_of_ours(reply: object, lab: Lab) -> None:
    with pytest.raises(ReplyShapeError):
        calls.get(lab.keys, "x", lab.queue).decode(reply)


def test_stats_count_and_know_the_oldest(lab: Lab) -> None:
    lab.now = None  # type: ignore[assignment]  # ages are by the server's clock
    assert lab.stats().oldest_waiting is None
    lab.enqueue("old", priority=2)
    lab.enqueue("urgent", priority=9)
    lab.enqueue("low")
    lab.enqueue("later", delay_ms=60_000)
    lab.raw("HSET", lab.keys.job("old"), "updatedAt", str(int(time.time() * 1000) - 90_000))
    stats = lab.stats()
    assert (stats.waiting, stats.scheduled, stats.active, stats.dead) == (3, 1, 0, 0)
    assert 89 <= stats.oldest_waiting < 120
    lab.one("urgent").fail()
    lab.one("old")
    stats = lab.stats()
    assert (stats.waiting, stats.scheduled, stats.active, stats.dead) == (1, 1, 1, 1)
    assert stats.oldest_waiting < 30


def test_workers_say_that_they_live_and_go(lab: Lab) -> None:
    for worker in ("w1", "w2"):
        lab.send(holding.seen(lab.keys, worker, f"info of {worker}"))
    assert lab.send(calls.workers(lab.keys)) == {"w1": "info of w1", "w2": "info of w2"}
    lab.send(holding.seen(lab.keys, "w1", None))
    assert lab.send(calls.workers(lab.keys)) == {"w2": "info of w2"}
