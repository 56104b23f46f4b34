"""What the rules of a queue allow, on a clock that is moved by hand."""

from __future__ import annotations

from typing import Any

import pytest
from tests.protocol.benni import Benni
from tests.protocol.lab import LEASE, Holder, Lab

from outlast import InvalidArgumentError
from outlast.protocol import holding
from outlast.protocol.keys import LARGE
from outlast.rules import Rules, changes, pause, read, resume, set_rules
from outlast.transport import drive


def rule(lab: Lab, **given: Any) -> None:
    drive(lab, set_rules(lab.keys, changes(given)))


def many(lab: Lab, count: int, *, start: int = 0, **options: Any) -> list[str]:
    ids = [f"j{n:05}" for n in range(start, start + count)]
    for id in ids:
        lab.enqueue(id, own=False, **options)
    return ids


def ids_of(jobs: list[Holder]) -> list[str]:
    return [job.id for job in jobs]


def rooms(lab: Lab) -> int:
    return int(lab.raw("LLEN", lab.keys.room))


# -- concurrency -----------------------------------------------------------------------------------------------------


def test_never_more_run_than_the_limit_and_a_lapsed_lease_still_counts(lab: Lab) -> None:
    rule(lab, concurrency=3)
    many(lab, 10)
    first = lab.take(2, worker="a")
    answer = lab.reserve(4, worker="b")
    assert (len(answer.jobs), answer.limited) == (1, "room")
    assert lab.reserve(4, worker="c").limited == "room"
    first[0].complete()
    [again] = lab.take(4, worker="a", limited="room")
    lab.now += LEASE + 1  # all lapse at once; until they are taken back, they may well run
    assert lab.take(4, worker="b", limited="room") == []
    lab.now += holding.grace_ms(LEASE) + 1
    answer = lab.reserve(4, worker="b", limited="room")
    assert (len(answer.jobs), answer.limited) == (3, "room")
    assert again.complete() == "lost"


def test_limited_means_that_nothing_is_allowed_never_that_less_came_than_was_asked_for(lab: Lab) -> None:
    rule(lab, concurrency=3, rate="100/s", burst=5)
    assert lab.reserve(4).limited == ""
    many(lab, 2)
    answer = lab.reserve(4)
    assert (len(answer.jobs), answer.limited) == (2, "")
    many(lab, 1, start=5)
    answer = lab.reserve(1)
    assert (len(answer.jobs), answer.limited) == (1, "room")


def test_room_is_passed_on_by_whoever_does_not_use_it_and_never_piles_up(lab: Lab) -> None:
    rule(lab, concurrency=1)
    lab.raw("DEL", lab.keys.room)
    job = lab.running()
    assert lab.reserve(1, worker="b").limited == "room"
    assert lab.reserve(1, worker="c").limited == "room"
    job.complete()
    assert rooms(lab) == 0, "who ends a job looks itself, and only then is there room to spare"
    for _ in range(3):
        assert lab.reserve(1, worker="b", limited="room").limited == ""
    assert rooms(lab) == 1
    lab.raw("DEL", lab.keys.room)
    lab.enqueue("next", own=False)
    assert lab.reserve(1, worker="b", limited="room").limited == "room"
    assert rooms(lab) == 0


def test_a_crash_that_is_found_makes_room(lab: Lab) -> None:
    rule(lab, concurrency=1)
    lab.running(max_attempts=1)
    lab.raw("DEL", lab.keys.room)
    assert lab.reserve(1, worker="b").limited == "room"
    lab.lapse()
    lab.reserve(0, worker="c")
    assert rooms(lab) == 1


def test_a_limited_worker_hears_of_leases_that_lapse(lab: Lab) -> None:
    rule(lab, concurrency=1)
    lab.running()
    answer = lab.reserve(1)
    assert (answer.limited, answer.hint_ms) == ("room", LEASE)


def test_a_foreign_worker_counts_and_is_not_disturbed(lab: Lab) -> None:
    """It follows wire.md and knows none of our keys: it takes what it likes, and what it holds counts for us."""
    rule(lab, concurrency=1, rate="1/h", owner_cap=1, max_payload=LARGE)
    benni = Benni(lab)
    lab.now = benni.now
    for n in range(4):
        benni.enqueue(f"f{n}", payload='"' + "x" * 20_000 + '"')
    lab.enqueue("ours", extra=[("owner", "me")], priority=9)
    lab.enqueue("held back", extra=[("owner", "me")], priority=9)
    drive(lab, pause(lab.keys, None))
    runs = [benni.reserve() for _ in range(3)]
    assert [run.id for run in runs if run] == ["ours", "held back", "f0"]
    drive(lab, resume(lab.keys))
    assert lab.reserve(5).limited == "room"
    for run in runs:
        assert run
        assert benni.touch(run, "text") == "ok"
        assert benni.settle(run, "completed", '"done"') == "completed"
        assert lab.get(run.id).result == "done"
    assert ids_of(lab.take(5, limited="room")) == ["f1"]
    waiting = benni.reserve()
    assert waiting
    assert waiting.id == "f2"
    benni.retry(waiting, "Error: x")
    assert benni.cancel("f3")


# -- rate ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "burst", "interval", "most"), [("30/3s", None, 3000, 30), ("30/3s", 10, 3000, 39)])
def test_no_window_holds_more_starts_than_the_rate(
    lab: Lab, rate: str, burst: int | None, interval: int, most: int
) -> None:
    rule(lab, rate=rate, burst=burst)
    many(lab, 150)
    starts: list[int] = []
    limited = 0
    while len(starts) < 150:
        answer = lab.reserve(7)
        starts += [lab.now] * len(answer.jobs)
        if answer.limited:
            assert answer.limited == "rate"
            assert 0 < answer.hint_ms <= 101
            lab.now += answer.hint_ms
            limited += 1
        assert answer.jobs or answer.limited
    in_window = max(sum(at <= start < at + interval for start in starts) for at in starts)
    assert in_window <= most
    assert in_window >= 29
    assert starts[-1] - starts[0] == pytest.approx((150 - (burst or 1)) * 100, abs=200), "nor less than it allows"


def test_a_quiet_time_earns_no_more_than_the_burst(lab: Lab) -> None:
    rule(lab, rate="10/s", burst=3)
    many(lab, 20)
    lab.now += 3_600_000
    assert len(lab.take(20)) == 3
    lab.now += 100
    assert len(lab.take(20)) == 1


def test_a_new_rate_counts_at_once_and_one_that_is_removed_does_not(lab: Lab) -> None:
    rule(lab, rate="1/h")
    many(lab, 20)
    assert len(lab.take(5)) == 1
    assert lab.reserve(5).limited == "rate"
    rule(lab, rate="1000/s")
    assert len(lab.take(5)) == 1
    rule(lab, rate=None)
    assert len(lab.take(5)) == 5


def test_only_takes_use_up_the_rate(lab: Lab) -> None:
    rule(lab, rate="1/m")
    for _ in range(3):
        assert (lab.reserve(5).limited, lab.reserve(0).limited) == ("", "")
    lab.enqueue()
    assert len(lab.take(5)) == 1


# -- pauses ----------------------------------------------------------------------------------------------------------


def test_pauses_of_people_and_of_providers_add_up_to_the_longer_one(lab: Lab) -> None:
    lab.now = int(lab.raw("TIME")[0]) * 1000
    job, other = lab.running(), lab.running("b")
    drive(lab, pause(lab.keys, 60_000))
    drive(lab, pause(lab.keys, 1_000))
    assert 59_000 <= lab.reserve(1).hint_ms <= 62_000
    job.release(pause_ms=90_000)
    other.release(pause_ms=61_000)  # of a call that was answered at the same time
    assert 89_000 <= lab.reserve(1).hint_ms <= 90_000, "an earlier time never shortens a pause"
    drive(lab, pause(lab.keys, None))
    drive(lab, pause(lab.keys, 1_000))
    answer = lab.reserve(1)
    assert (answer.limited, answer.hint_ms, answer.jobs) == ("paused", -1, [])
    lab.now += 86_400_000
    assert lab.reserve(1).limited == "paused"
    lab.raw("DEL", lab.keys.room)
    drive(lab, resume(lab.keys))
    assert rooms(lab) == 1
    assert len(lab.take(9, limited="paused")) == 2
    assert rooms(lab) == 1, "the next one is woken in turn"


def test_order_is_kept_over_a_pause(lab: Lab) -> None:
    lab.enqueue("first")
    lab.enqueue("second")
    lab.one("first").release(pause_ms=1000)
    lab.enqueue("third")
    lab.now += 1000
    assert ids_of(lab.take(3)) == ["first", "second", "third"]
    record = lab.record("first")
    assert (record["attempt"], record["starts"]) == ("1", "2")


# -- a cap for owners ------------------------------------------------------------------------------------------------


def of(owner: str) -> dict[str, Any]:
    return {"extra": [("owner", owner)]}


def end(lab: Lab, job: Holder) -> None:
    job.complete()
    lab.send(holding.admit(lab.keys, job.id, job.job.owner or ""))


def test_one_owners_ten_thousand_jobs_do_not_keep_the_others_waiting(lab: Lab) -> None:
    rule(lab, owner_cap=2)
    many(lab, 10_000, **of("big"))
    lab.enqueue("small", **of("small"))
    lab.enqueue("nobody's")
    got: list[str] = []
    calls_made = 0
    while len(got) < 4:
        answer = lab.reserve(4 - len(got))
        got += [job.id for job in answer.jobs]
        assert answer.hint_ms == 0 or len(got) == 4
        calls_made += 1
    assert got == ["j00000", "j00001", "small", "nobody's"]
    assert calls_made <= 102, "a hundred are held back with one look"
    assert lab.get("j00500").status == "waiting"


def test_held_back_jobs_come_to_their_turn_in_order(lab: Lab) -> None:
    rule(lab, owner_cap=2)
    ids = many(lab, 10, **of("o"))
    seen: list[str] = []
    running: list[Holder] = []
    for _ in range(40):
        running += lab.take(5)
        assert len(running) <= 2
        if not running:
            break
        job = running.pop(0)
        seen.append(job.id)
        end(lab, job)
    assert seen == ids
    assert lab.raw("EXISTS", lab.keys.owner("o")) == 0


def test_a_held_back_job_comes_before_those_that_came_after_it_and_wakes_somebody(lab: Lab) -> None:
    rule(lab, owner_cap=1)
    many(lab, 2, **of("o"))
    [job] = lab.take(2)
    many(lab, 2, start=2, **of("p"))
    lab.raw("DEL", lab.keys.signal)
    end(lab, job)
    assert lab.raw("LLEN", lab.keys.signal) == 1
    assert ids_of(lab.take(1)) == ["j00001"]


def test_a_held_back_job_is_where_any_worker_finds_it_and_can_be_cancelled(lab: Lab) -> None:
    rule(lab, owner_cap=1)
    many(lab, 4, **of("o"))
    [job] = lab.take(4)
    assert [lab.where(f"j0000{n}") for n in range(4)] == [["leases"], ["scheduled"], ["scheduled"], ["scheduled"]]
    assert lab.cancel("j00001") == "cancelled"
    end(lab, job)
    [job] = lab.take(4)
    assert job.id == "j00002"
    lab.now += 3_600_000  # nobody ever let it in: it shows up by itself, and is held back anew
    lab.send(holding.renew(lab.keys, [job.job], lease_ms=LEASE, now=lab.now))
    assert lab.take(4) == []
    assert lab.where("j00003") == ["scheduled"]
    end(lab, job)
    assert ids_of(lab.take(4)) == ["j00003"]


def test_a_job_that_shows_up_and_is_held_back_anew_keeps_its_rank(lab: Lab) -> None:
    rule(lab, owner_cap=1)
    many(lab, 4, **of("o"))
    [job] = lab.take(4)
    lab.raw("ZADD", lab.keys.scheduled, 1, "j00001")
    assert lab.take(4) == []
    end(lab, job)
    assert ids_of(lab.take(4)) == ["j00001"]


def test_what_a_foreign_worker_or_a_crash_ended_does_not_count_for_ever(lab: Lab) -> None:
    rule(lab, owner_cap=2)
    many(lab, 6, **of("o"))
    gone, crashed = lab.take(2)
    assert gone.complete() == "completed"  # as a foreign worker ends it: it lets nobody in
    assert ids_of(lab.take(1)) == ["j00002"]
    assert lab.take(1) == []
    lab.lapse()
    got = lab.take(4)
    assert len(got) == 2
    assert crashed.complete() == "lost"


def test_a_job_that_runs_again_at_once_still_counts(lab: Lab) -> None:
    """Its next take overtakes the word that its last one has ended."""
    rule(lab, owner_cap=1)
    many(lab, 3, **of("o"))
    job = lab.one()
    job.release()
    again = lab.one("j00000")
    lab.send(holding.admit(lab.keys, job.id, "o"))
    assert lab.take(3) == []
    end(lab, again)
    assert len(lab.take(3)) == 1


def test_a_raised_cap_counts_at_once(lab: Lab) -> None:
    rule(lab, owner_cap=1)
    ids = many(lab, 5, **of("o"))
    lab.enqueue("later", delay_ms=86_400_000)
    assert len(lab.take(5)) == 1
    rule(lab, owner_cap=3)
    assert ids_of(lab.take(5)) == ids[1:3]
    rule(lab, owner_cap=None)
    assert ids_of(lab.take(5)) == ids[3:]
    assert lab.where("later") == ["scheduled"]


def test_a_lowered_cap_lets_what_runs_go_on(lab: Lab) -> None:
    rule(lab, owner_cap=3)
    many(lab, 6, **of("o"))
    running = lab.take(3)
    rule(lab, owner_cap=1)
    for job in running:
        assert lab.take(3) == []
        end(lab, job)
    assert len(lab.take(3)) == 1


# -- the other rules -------------------------------------------------------------------------------------------------


def test_a_rule_of_attempts_counts_for_jobs_that_have_no_number_of_their_own(lab: Lab) -> None:
    rule(lab, max_attempts=5)
    lab.enqueue("default", max_attempts=3)
    lab.enqueue("given", max_attempts=1, extra=[("attemptsGiven", "1")])
    default, given = lab.take(2)
    assert (default.job.max_attempts, given.job.max_attempts) == (5, 1)
    assert (lab.record("default")["maxAttempts"], lab.record("given")["maxAttempts"]) == ("5", "1")
    default.fail()
    given.fail()
    lab.retry_dead("default", max_attempts=3)
    lab.retry_dead("given", max_attempts=2, given=True)
    assert [job.job.max_attempts for job in lab.take(2)] == [5, 2]


def test_the_rule_of_the_lease_counts_over_the_workers(lab: Lab) -> None:
    rule(lab, lease=5, timeout=7, result_ttl=11, max_payload=20_000)
    lab.enqueue()
    answer = lab.reserve(1)
    assert answer.terms == holding.Terms(5000, 7000, 11_000, 20_000, None, None)
    assert lab.score("leases") == lab.now + 5000


@pytest.mark.parametrize("how", ["waiting", "scheduled", "crashed"])
def test_the_rule_of_the_result_ttl_counts_however_a_job_ends(lab: Lab, how: str) -> None:
    """A worker knows it from its reserve; a producer that cancels, and whoever finds a crash, from the queue."""
    rule(lab, result_ttl=11)
    for id, extra in (("ruled", []), ("own", [("resultTtlMs", "22000")])):
        lab.enqueue(id, extra=extra, delay_ms=50 if how == "scheduled" else 0)
        if how == "crashed":
            lab.one()
        lab.cancel(id)
    if how == "crashed":
        lab.lapse()
        lab.reserve(0)
    for id, most in (("ruled", 11_000), ("own", 22_000)):
        assert lab.record(id)["status"] == "cancelled"
        for key in (lab.keys.job(id), lab.keys.events(id)):
            assert most - 9000 < lab.raw("PTTL", key) <= most


def test_a_payload_over_the_limit_is_refused_and_nothing_is_written(lab: Lab) -> None:
    rule(lab, max_payload=20_000)
    before = lab.state()
    for payload in ("x" * 20_001, "é" * 10_001):
        with pytest.raises(InvalidArgumentError, match=r"more bytes of JSON than queue .* allows, 20000"):
            lab.enqueue(payload=payload, key="k")
    assert lab.state() == before
    lab.enqueue(payload="é" * 10_000, key="k")
    rule(lab, max_payload=None)
    lab.enqueue("b", payload="x" * 1_000_000)


def test_rules_read_back_as_they_were_set(lab: Lab) -> None:
    assert lab.send(read(lab.keys)) == Rules()
    given: dict[str, Any] = {
        "lease": 2.5,
        "timeout": 60.0,
        "max_attempts": 4,
        "concurrency": 3,
        "rate": "30/60s",
        "burst": 2,
        "owner_cap": 1,
        "max_payload": 20_000,
        "result_ttl": 5.0,
    }
    rule(lab, **given)
    rules = lab.send(read(lab.keys))
    assert rules.set_at is not None
    assert {name: getattr(rules, name) for name in given} == given
    assert not rules.paused
    rule(lab, **dict.fromkeys(given))
    assert lab.send(read(lab.keys)) == Rules(set_at=lab.send(read(lab.keys)).set_at)
    for text, shown in (("10/s", "10/1s"), ("1000/h", "1000/3600s"), ("1/250ms", "1/250ms"), ("7/2d", "7/172800s")):
        rule(lab, rate=text)
        assert lab.send(read(lab.keys)).rate == shown


@pytest.mark.parametrize(
    "given",
    [
        {"rate": rate}
        for rate in ("30", "0/s", "30/0s", "x/s", "30/60", "-1/s", "30/60s ", "1.5/s", 30, "1/", "1/400d", "９/s")
    ]
    + [{"concurrency": 0}, {"concurrency": "3"}, {"concurrency": True}, {"lease": 0}, {"burst": 0}]
    + [{"max_payload": LARGE - 1}, {"owner_cap": 1001}, {"result_ttl": 0.5}, {"speed": 3}],
)
def test_rules_that_are_none_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(given))):
        changes(given)
