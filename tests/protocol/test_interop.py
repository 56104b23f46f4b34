"""One queue for two implementations: producers, workers and watchers of either side, in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from outlast.protocol import calls

from .benni import Benni
from .lab import Lab, text_of


@pytest.fixture
def lab(lab: Lab) -> Lab:
    lab.now = None  # type: ignore[assignment]  # the server's clock: the ids of both sides depend on it
    return lab


@pytest.fixture
def benni(lab: Lab) -> Benni:
    return Benni(lab)


def tick() -> None:
    """Let the clock show another millisecond."""
    time.sleep(0.002)


class Watchers:
    """Readers of both kinds: one live, and one that is cut after each event and resumed later."""

    def __init__(self, lab: Lab, benni: Benni, id: str = "job-a") -> None:
        self.lab, self.benni, self.id = lab, benni, id
        self.live = lab.tail(id)
        self.events: list[object] = []
        self.theirs = ("", "0", None)
        self.cuts: list[tuple[str, str]] = []

    def look(self) -> None:
        for event in self.lab.drain(self.live):
            self.events.append(event)
            self.cuts.append((event.id, text_of(self.events)))  # type: ignore[arg-type]
        self.theirs = self.benni.watch(self.id, *self.theirs[1::-1])

    def texts(self) -> Iterator[str]:
        """What each of them has now."""
        self.look()
        yield text_of(self.events)  # type: ignore[arg-type]
        yield text_of(self.lab.read(self.id))
        yield self.theirs[0]
        yield self.benni.watch(self.id)[0]
        for cursor, before in self.cuts:
            text = before
            for event in self.lab.read(self.id, after=cursor):
                text = (
                    "" if event.type in ("restarted", "gap") else text + (event.data if event.type == "chunk" else "")
                )
            yield text


def test_our_job_on_their_worker(lab: Lab, benni: Benni) -> None:
    lab.enqueue(payload='{"n":1}', key="k", payload_hash="h")
    watchers = Watchers(lab, benni)
    run = benni.reserve()
    assert run
    assert (run.payload, run.attempt, run.max_attempts) == ('{"n":1}', 1, 3)
    for chunk in ("Hel", "lo", ""):
        assert benni.touch(run, chunk) == "ok"
        tick()
    assert set(watchers.texts()) == {"Hello"}
    assert benni.settle(run, "completed", '"done"') == "completed"
    assert set(watchers.texts()) == {"Hello"}
    assert [event.type for event in lab.read()] == ["chunk", "chunk", "chunk", "completed"]
    assert lab.get().result == "done"
    assert lab.enqueue("other", key="k", payload_hash="h").id == "job-a"


def test_their_job_on_our_worker(lab: Lab, benni: Benni) -> None:
    benni.enqueue("job-a", '"p"', key="k", priority=4)
    watchers = Watchers(lab, benni)
    job = lab.one("job-a")
    assert (job.job.payload, job.job.priority, job.job.key, job.job.starts) == ('"p"', 4, "k", 1)
    job.emit("Hel", "lo")
    assert set(watchers.texts()) == {"Hello"}
    job.complete('"done"')
    assert set(watchers.texts()) == {"Hello"}
    assert watchers.theirs[2] == "completed"
    assert benni.enqueue("job-b", key="k") == "job-a"


def test_both_producers_share_one_order(lab: Lab, benni: Benni) -> None:
    lab.enqueue("a0")
    benni.enqueue("b5", priority=5)
    benni.enqueue("c0")
    lab.enqueue("d5", priority=5)
    order = [lab.one().id if turn % 2 else benni.reserve().id for turn in range(4)]  # type: ignore[union-attr]
    assert order == ["b5", "d5", "a0", "c0"]


def test_their_key_is_found_by_us_whatever_the_payload(lab: Lab, benni: Benni) -> None:
    benni.enqueue("job-a", "1", key="k")
    answer = lab.enqueue("job-b", payload="2", key="k", payload_hash="h2")
    assert (answer.id, answer.deduplicated) == ("job-a", True)


@pytest.mark.parametrize("first", ["ours", "theirs"])
@pytest.mark.parametrize("end", ["retry", "lapse"])
def test_five_alternating_attempts_show_every_watcher_the_last_one_alone(
    first: str, end: str, lab: Lab, benni: Benni
) -> None:
    lab.enqueue(max_attempts=9) if first == "ours" else benni.enqueue("job-a", max_attempts=9)
    watchers = Watchers(lab, benni)
    for attempt in range(1, 6):
        ours = (attempt % 2 == 1) == (first == "ours")
        chunks = [f"{attempt}a ", f"{attempt}b "]
        if ours:
            job = lab.one()
            assert job.job.attempt == attempt
            for chunk in chunks:
                assert job.emit(chunk) == "ok"
                assert set(watchers.texts()) == {"".join(chunks[: chunks.index(chunk) + 1])}
                tick()
        else:
            run = benni.reserve()
            assert run
            assert run.attempt == attempt
            for chunk in chunks:
                assert benni.touch(run, chunk) == "ok"
                assert set(watchers.texts()) == {"".join(chunks[: chunks.index(chunk) + 1])}
                tick()
        if attempt < 5:
            if end == "lapse":
                lab.raw("ZADD", lab.keys.leases, 1.5, "job-a")  # looked at before, so that either side takes it now
            elif ours:
                job.retry()
            else:
                benni.retry(run, "Error: again")
            tick()
    job.complete('"end"') if ours else benni.settle(run, "completed", '"end"')
    assert set(watchers.texts()) == {"5a 5b "}
    assert [watchers.live.done, watchers.theirs[2]] == [True, "completed"]
    assert "gap" not in [event.type for event in watchers.events]  # type: ignore[attr-defined]


def test_attempts_that_say_nothing_are_no_trouble(lab: Lab, benni: Benni) -> None:
    lab.enqueue(max_attempts=9)
    watchers = Watchers(lab, benni)
    lab.one().retry()
    run = benni.reserve()
    assert run
    benni.retry(run, "Error: again")
    tick()
    lab.one().retry()
    run = benni.reserve()
    assert run
    benni.touch(run, "x")
    benni.retry(run, "Error: again")
    assert set(watchers.texts()) == {"x"}
    job = lab.one()
    job.emit("y")
    job.complete()
    assert set(watchers.texts()) == {"y"}


def test_an_attempt_given_back_by_us_starts_over_with_them(lab: Lab, benni: Benni) -> None:
    """They write no marker at attempt 1, so our release has to."""
    lab.enqueue()
    watchers = Watchers(lab, benni)
    job = lab.one()
    job.emit("ours ")
    assert set(watchers.texts()) == {"ours "}
    job.release()
    tick()
    run = benni.reserve()
    assert run
    assert run.attempt == 1
    benni.touch(run, "theirs ")
    assert set(watchers.texts()) == {"theirs "}
    benni.settle(run, "completed", "1")
    assert set(watchers.texts()) == {"theirs "}


def test_their_revival_of_our_dead_job(lab: Lab, benni: Benni) -> None:
    """It deletes the stream and writes no marker; our next attempt does, above everything that was seen."""
    lab.enqueue()
    watchers = Watchers(lab, benni)
    job = lab.one()
    job.emit("old ")
    job.fail()
    watchers.look()
    tick()
    assert benni.retry_dead("job-a")
    tick()
    job = lab.one()
    assert job.job.attempt == 1
    job.emit("new ")
    job.complete()
    watchers.live = lab.tail(after=watchers.live.cursor)
    assert set(watchers.texts()) == {"new "}
    assert lab.get().status == "completed"
    assert lab.raw("PTTL", lab.keys.events("job-a")) > 0


def test_our_revival_of_their_dead_job(lab: Lab, benni: Benni) -> None:
    benni.enqueue("job-a")
    watchers = Watchers(lab, benni)
    run = benni.reserve()
    assert run
    benni.touch(run, "old ")
    benni.settle(run, "failed", "Error: bad")
    watchers.look()
    tick()
    assert lab.retry_dead()
    run = benni.reserve()
    assert run
    assert run.attempt == 1
    tick()
    benni.touch(run, "new ")
    benni.settle(run, "completed", "1")
    watchers.live = lab.tail(after=watchers.live.cursor)
    assert set(watchers.texts()) == {"new "}


def test_their_reuse_of_our_id_drops_our_fields_and_joins_nothing(lab: Lab, benni: Benni) -> None:
    lab.enqueue(extra=[("owner", "me"), ("timeoutMs", "5")], key="k")
    watchers = Watchers(lab, benni)
    job = lab.one()
    old_gen = int(job.job.gen)
    job.emit("old1 ", "old2 ")
    watchers.look()
    job.complete()
    tick()
    benni.enqueue("job-a")
    assert not {"gen", "nonce", "owner", "settled"} & set(lab.record())
    tick()
    job = lab.one()
    assert int(job.job.gen) > old_gen
    assert (job.job.owner, job.job.timeout_ms, job.job.n) == (None, None, 0)
    job.emit("new1 ", "new2 ")
    ours = [watchers.live, *(lab.tail(after=cursor) for cursor, _ in watchers.cuts)]
    for tail in ours:
        assert text_of(events := lab.drain(tail)) == "new1 new2 "
        assert events[0].type == "restarted"


def test_our_reuse_of_their_id(lab: Lab, benni: Benni) -> None:
    benni.enqueue("job-a", key="k")
    watchers = Watchers(lab, benni)
    run = benni.reserve()
    assert run
    benni.touch(run, "old ")
    benni.settle(run, "completed", "1")
    watchers.look()
    lab.enqueue()
    run = benni.reserve()
    assert run
    tick()
    benni.touch(run, "new ")
    watchers.live = lab.tail(after=watchers.live.cursor)
    assert set(watchers.texts()) == {"new "}
    assert lab.raw("EXISTS", lab.keys.idem("k")) == 0


def test_their_cancel_of_a_job_on_our_worker(lab: Lab, benni: Benni) -> None:
    job = lab.running()
    assert benni.cancel("job-a")
    assert job.renew() == "cancel"
    assert job.emit("x") == "cancel"
    assert job.complete() == "cancelled"
    assert benni.watch("job-a")[2] == "cancelled"


def test_our_cancel_of_a_job_on_their_worker(lab: Lab, benni: Benni) -> None:
    lab.enqueue(key="k")
    run = benni.reserve()
    assert run
    assert lab.cancel() == "requested"
    assert not [name for name in lab.state() if name.startswith("ctl")]
    assert benni.touch(run, "last") == "cancel"
    assert benni.settle(run, "completed", "1") == "cancelled"
    assert [event.type for event in lab.read()] == ["chunk", "cancelled"]


def test_cancels_of_waiting_jobs_in_both_directions(lab: Lab, benni: Benni) -> None:
    benni.enqueue("theirs")
    lab.enqueue("ours")
    assert lab.cancel("theirs") == "cancelled"
    assert benni.cancel("ours")
    assert benni.reserve() is None
    assert lab.take() == []
    assert [event.type for id in ("ours", "theirs") for event in lab.read(id)] == ["cancelled", "cancelled"]


def test_they_reclaim_a_lease_that_we_have_looked_at_once(lab: Lab, benni: Benni) -> None:
    job = lab.running()
    job.emit("old ")
    lab.raw("ZADD", lab.keys.leases, 5, "job-a")
    lab.reserve(0)
    assert lab.score("leases") % 1 != 0
    lab.raw("ZADD", lab.keys.leases, 5.5, "job-a")  # the grace is over
    run = benni.reserve()
    assert run
    assert run.attempt == 2
    assert [job.complete(), job.emit("x"), job.renew()] == ["lost", "lost", "lost"]
    assert benni.settle(run, "completed", "1") == "completed"


def test_we_reclaim_from_them_and_they_are_fenced(lab: Lab, benni: Benni) -> None:
    lab.enqueue()
    run = benni.reserve()
    assert run
    lab.raw("ZADD", lab.keys.leases, 5.5, "job-a")
    job = lab.one("job-a")
    assert (job.job.attempt, job.job.starts) == (2, 2)
    assert [benni.touch(run, "x"), benni.settle(run, "completed", "1")] == ["lost", "lost"]
    job.complete()


def test_half_a_record_of_theirs_is_nobodys_job(lab: Lab, benni: Benni) -> None:
    """Their reserve makes one for an entry without a record (golden state 30)."""
    lab.raw("ZADD", lab.keys.ready, 1, "ghost")
    run = benni.reserve()
    assert run
    assert lab.get("ghost") is None
    assert lab.cancel("ghost") == "unknown"
    lab.raw("ZADD", lab.keys.leases, 5.5, "ghost")
    lab.reserve(0)
    assert lab.where("ghost") == []
    lab.enqueue("ghost")
    lab.one("ghost").complete()
    assert lab.get("ghost").status == "completed"


def test_their_spelling_of_numbers_is_read(lab: Lab, benni: Benni) -> None:
    benni.enqueue("job-a")
    lab.raw("HSET", lab.keys.job("job-a"), "createdAt", "1.8e12", "progress", "1e-7")
    shown = lab.get()
    assert shown.created_at.timestamp() == 1_800_000_000
    assert shown.progress == 1e-7
    assert lab.one().job.created_at_ms == 1_800_000_000_000


def test_a_status_of_a_later_version_reads_as_waiting_and_runs(lab: Lab) -> None:
    lab.enqueue()
    lab.raw("HSET", lab.keys.job("job-a"), "status", "parked")
    assert lab.get().status == "waiting"
    assert lab.one().complete() == "completed"
    lab.enqueue("b", delay_ms=1)
    lab.raw("HSET", lab.keys.job("b"), "status", "parked")
    tick()
    assert lab.one().id == "b"
    lab.enqueue("c")
    lab.raw("HSET", lab.keys.job("c"), "status", "parked")
    assert lab.send(calls.cancel(lab.keys, "c", result_ttl_ms=1000)) == "cancelled"
    assert lab.where("c") == []
