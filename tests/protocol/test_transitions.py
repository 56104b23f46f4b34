"""The rules of the transitions that neither the golden states nor the repeats show."""

from __future__ import annotations

import pytest
import redis

from outlast import IdempotencyConflictError, JobInUseError
from outlast.protocol import calls, holding
from outlast.protocol.keys import BATCH, LATER, RANK

from .lab import LEASE, RESULT_TTL, T0, Lab, text_of
from .test_replay import still

# -- idempotency keys ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["remove", "expire", "cancel", "retry_dead", "settle", "reuse"])
def test_h03_a_key_is_released_only_by_the_job_that_it_points_to(then: str, lab: Lab) -> None:
    lab.running("A", key="k").fail()
    lab.enqueue("B", key="k", delay_ms=60_000)
    match then:
        case "remove":
            lab.raw("DEL", lab.keys.job("A"))
            lab.raw("ZADD", lab.keys.leases, lab.now - 0.5, "A")
            lab.reserve(0)
            lab.send(holding.prune_dead(lab.keys))
        case "expire":
            lab.raw("PEXPIRE", lab.keys.job("A"), 0)
            lab.send(holding.prune_dead(lab.keys))
        case "cancel":
            lab.retry_dead("A")
            assert lab.cancel("A") == "cancelled"
        case "retry_dead":
            assert lab.retry_dead("A")
        case "settle":
            for how in ("complete", "fail"):
                lab.retry_dead("A")
                getattr(lab.one("A"), how)()
                lab.enqueue("A")
                lab.one("A").fail()
        case "reuse":
            lab.enqueue("A", key="other")
    again = lab.enqueue("C", key="k")
    assert (again.id, again.deduplicated) == ("B", True)
    assert lab.raw("PTTL", lab.keys.idem("k")) == -1


@pytest.mark.parametrize("end", ["lapse", "lapse cancelled", "cancel", "release", "retry"])
def test_h03_also_when_the_older_job_ends_otherwise(end: str, lab: Lab) -> None:
    """A foreign peer can leave two live jobs with one key; the older one's end must not free the newer one's."""
    job = lab.running("A", key="k", max_attempts=1)
    lab.raw("DEL", lab.keys.idem("k"))
    lab.enqueue("B", key="k", delay_ms=10**9)
    if end != "lapse":
        lab.cancel("A")
    if end.startswith("lapse"):
        lab.lapse()
        lab.reserve(0)
    elif end in ("release", "retry"):
        assert getattr(job, end)() == "cancelled"
    else:
        job.complete()
    assert lab.raw("GET", lab.keys.idem("k")) == "B"


def test_h04_a_key_never_lives_longer_than_its_record(lab: Lab) -> None:
    lab.running(key="k", key_ttl_ms=60_000).complete(ttl=2000)
    assert 0 < lab.raw("PTTL", lab.keys.idem("k")) <= 2000
    assert 0 < lab.raw("PTTL", lab.keys.job("job-a")) <= 2000


def test_h04_a_key_whose_record_is_gone_makes_a_new_job(lab: Lab) -> None:
    lab.enqueue("A", key="k")
    lab.raw("DEL", lab.keys.job("A"))
    made = lab.enqueue("B", key="k")
    assert (made.id, made.deduplicated) == ("B", False)
    assert lab.raw("GET", lab.keys.idem("k")) == "B"


def test_h04_so_does_a_key_whose_record_is_half_a_record(lab: Lab) -> None:
    lab.raw("SET", lab.keys.idem("k"), "A")
    lab.raw("HSET", lab.keys.job("A"), "status", "active", "attempt", "1")
    assert lab.enqueue("B", key="k").id == "B"


def test_one_key_with_two_payloads_is_a_conflict_and_writes_nothing(lab: Lab) -> None:
    lab.enqueue("A", key="k", payload_hash="h1")
    state = still(lab.state())
    with pytest.raises(IdempotencyConflictError) as conflict:
        lab.enqueue("B", key="k", payload_hash="h2")
    assert conflict.value.job_id == "A"
    assert still(lab.state()) == state
    assert lab.enqueue("B", key="k", payload_hash="h1").deduplicated
    assert lab.enqueue("B", key="k", payload_hash="h2", check_payload=False).deduplicated
    assert still(lab.state()) == state


def test_a_record_without_a_hash_matches_any_payload(lab: Lab) -> None:
    lab.enqueue("A", key="k")
    assert lab.enqueue("B", key="k", payload_hash="h2").id == "A"


def test_a_key_that_is_held_hides_an_own_id_in_use(lab: Lab) -> None:
    lab.enqueue("A", key="k")
    lab.enqueue("B")
    assert lab.enqueue("B", key="k").id == "A"


# -- ids -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["waiting", "scheduled", "active", "retrying", "flagged"])
def test_an_id_in_use_is_refused_and_nothing_is_written(state: str, lab: Lab) -> None:
    lab.enqueue(delay_ms=1000 if state == "scheduled" else 0)
    if state not in ("waiting", "scheduled"):
        job = lab.one()
        if state == "retrying":
            job.retry(1000)
        if state == "flagged":
            lab.cancel()
    before = still(lab.state())
    with pytest.raises(JobInUseError):
        lab.enqueue(key="k")
    assert still(lab.state()) == before


def test_h15_an_id_is_free_once_its_cancelled_run_has_settled(lab: Lab) -> None:
    job = lab.running("x")
    job.emit("old")
    assert lab.cancel("x") == "requested"
    with pytest.raises(JobInUseError):
        lab.enqueue("x")
    assert job.complete() == "cancelled"
    lab.enqueue("x")
    again = lab.one("x")
    assert (again.job.attempt, again.job.starts) == (1, 1)
    assert again.emit("new") == "ok"  # no cancel flag of the life before
    again.complete()
    assert [event.type for event in lab.read("x")] == ["restarted", "chunk", "completed"]


def test_a_used_id_starts_clean(lab: Lab) -> None:
    job = lab.running(key="k", extra=[("owner", "me")], priority=3)
    job.emit("old")
    job.progress("0.5")
    job.retry(0, "Error: first")
    lab.one().complete('"old"')
    old = lab.record()
    lab.enqueue(payload='"new"')
    record = lab.record()
    assert not {"result", "error", "finishedAt", "startedAt", "owner", "settled", "token", "starts"} & set(record)
    assert (record["attempt"], record["progress"], record["idempotencyKey"]) == ("0", "0", "")
    assert int(record["gen"]) > int(old["gen"])
    assert lab.raw("PTTL", lab.keys.job("job-a")) == -1
    assert lab.raw("PTTL", lab.keys.events("job-a")) == -1
    assert lab.raw("EXISTS", lab.keys.idem("k")) == 0


def test_the_first_event_of_every_life_is_number_one(lab: Lab) -> None:
    """The marker of a used id is {gen}-0, so that the holder counts from {gen}-1 in each life."""
    for life in range(4):
        lab.enqueue()
        job = lab.one()
        gen = lab.record()["gen"]
        assert (job.job.b, job.job.n) == (gen, 0)
        job.emit("x")
        ids = [id for id, _ in lab.entries()]
        assert ids == [f"{gen}-1"] if life == 0 else [f"{gen}-0", f"{gen}-1"]
        if life == 2:
            lab.cancel()
        job.complete()


def test_a_life_lies_above_the_one_before_even_if_clocks_go_back(lab: Lab) -> None:
    lab.running().complete()
    old = lab.entries()[-1][0]
    lab.now -= 3_600_000
    lab.enqueue()
    lab.one().emit("x")
    assert all(_order(id) > _order(old) for id, _ in lab.entries())


def test_a_life_lies_above_its_record_when_the_stream_has_expired(lab: Lab) -> None:
    lab.running().complete()
    gen = int(lab.record()["gen"])
    lab.raw("DEL", lab.keys.events("job-a"))
    lab.now -= 3_600_000
    lab.enqueue()
    assert int(lab.record()["gen"]) == gen + 1


def test_a_life_lies_above_the_stream_when_the_record_does_not_tell(lab: Lab) -> None:
    """As after a foreign life of the id, or with a record that was evicted alone."""
    lab.raw("XADD", lab.keys.events("job-a"), f"{T0 + 5000}-3", "t", "chunk", "d", "old")
    lab.enqueue()
    assert lab.record()["gen"] == str(T0 + 5001)
    assert [id for id, _ in lab.entries()] == [f"{T0 + 5001}-0"]


def _order(id: str) -> tuple[int, ...]:
    return tuple(map(int, id.split("-")))


@pytest.mark.parametrize("delay", [0, 5000])
@pytest.mark.parametrize("listed", ["ready", "scheduled", "leases", "dead"])
def test_an_unfinished_foreign_record_is_replaced_and_listed_once(listed: str, delay: int, lab: Lab) -> None:
    """wire.md §1.6: an id whose status is absent or unknown may be used; its old listing must go."""
    lab.raw("HSET", lab.keys.job("job-a"), "id", "job-a", "payload", "old", "status", "parked")
    lab.raw("ZADD", lab.keys.base + listed, lab.now, "job-a")
    lab.enqueue(delay_ms=delay)
    assert lab.where() == ["scheduled" if delay else "ready"]
    assert lab.record()["payload"] == "{}"


@pytest.mark.parametrize("status", ["waiting", "active"])
def test_half_a_record_does_not_block_its_id(status: str, lab: Lab) -> None:
    """A foreign worker makes half a record, without an id, for an entry that has none. Nobody can ever end it."""
    lab.raw("HSET", lab.keys.job("job-a"), "status", status, "attempt", "1", "token", "t")
    lab.raw("ZADD", lab.keys.leases, lab.now + LEASE, "job-a")
    assert lab.get() is None
    lab.enqueue()
    assert lab.where() == ["ready"]
    assert "token" not in lab.record()


def test_a_stale_dead_entry_does_not_show_a_newer_job_as_dead(lab: Lab) -> None:
    lab.running("x").fail()
    lab.running("y").fail()
    lab.raw("DEL", lab.keys.job("x"), lab.keys.events("x"))  # expired
    lab.enqueue("x")
    assert lab.dead() == ["y"]
    assert lab.retry_dead("x") is False
    assert lab.where("x") == ["ready"]


def test_dead_pages_past_expired_entries(lab: Lab) -> None:
    for index in range(7):
        lab.running(f"j{index}").fail()
        lab.now += 1
    lab.raw("DEL", *(lab.keys.job(f"j{index}") for index in (0, 1, 2, 4)))
    assert lab.dead(2) == ["j3", "j5"]
    assert lab.dead() == ["j3", "j5", "j6"]
    assert lab.send(holding.prune_dead(lab.keys)) == 4
    assert list(lab.state()["dead"]["members"]) == ["j3", "j5", "j6"]


def test_prune_takes_a_batch_and_asks_to_be_called_again(lab: Lab) -> None:
    lab.raw("ZADD", lab.keys.dead, *(part for index in range(BATCH + 5) for part in (index, f"gone-{index}")))
    assert [lab.send(holding.prune_dead(lab.keys)) for _ in range(3)] == [BATCH, 5, 0]


def test_a_purge_of_the_dead_spares_a_newer_job_under_the_same_id(lab: Lab) -> None:
    lab.enqueue("x")
    lab.raw("ZADD", lab.keys.dead, 1, "x")  # left behind by a foreign reuse of the id
    assert lab.send(calls.purge_dead(lab.keys, lab.now)) == 1
    assert lab.get("x").status == "waiting"
    assert lab.where("x") == ["ready"]


def test_a_purge_that_meets_a_job_that_has_just_started_lets_it_run(lab: Lab) -> None:
    job = lab.running()
    assert lab.cancel(before_ms=lab.now) == "kept"
    assert job.renew() == "ok"
    assert job.complete() == "completed"


def test_what_a_job_was_given_reaches_its_holder(lab: Lab) -> None:
    extra = [("owner", "me"), ("timeoutMs", "5000"), ("resultTtlMs", "7000"), ("trace", "00-1-2-01")]
    lab.enqueue(payload='"p"', max_attempts=4, priority=6, key="k", expires_ms=9000, deadline_ms=20_000, extra=extra)
    lab.now += 50
    job = lab.one().job
    assert (job.id, job.payload, job.attempt, job.starts, job.max_attempts) == ("job-a", '"p"', 1, 1, 4)
    assert (job.priority, job.key, job.created_at_ms, job.owner, job.trace) == (6, "k", T0, "me", "00-1-2-01")
    assert (job.timeout_ms, job.result_ttl_ms) == (5000, 7000)
    assert (job.expires_at_ms, job.deadline_at_ms) == (T0 + 9000, T0 + 20_000)
    assert lab.get().owner == "me"


def test_what_a_job_was_not_given_is_none_of_its_holders_business(lab: Lab) -> None:
    job = lab.running().job
    assert (job.owner, job.trace, job.timeout_ms, job.result_ttl_ms) == (None, None, None, None)
    assert (job.expires_at_ms, job.deadline_at_ms, job.key) == (None, None, "")
    assert not {"expiresAt", "deadlineAt", "starts", "payloadHash"} & set(lab.record())


# -- order -----------------------------------------------------------------------------------------------------------


def test_higher_priorities_first_and_in_order_within_one(lab: Lab) -> None:
    for id, priority in (("a0", 0), ("b5", 5), ("c0", 0), ("d9", 9), ("e5", 5), ("f9", 9)):
        lab.enqueue(id, priority=priority)
    assert [job.id for job in lab.take(4)] == ["d9", "f9", "b5", "e5"]
    assert [job.id for job in lab.take(4)] == ["a0", "c0"]


def test_h26_an_urgent_job_jumps_the_backlog_once_due(lab: Lab) -> None:
    for index in range(300):
        lab.enqueue(f"low-{index}", own=False)
    lab.enqueue("urgent", priority=9, delay_ms=2000)
    assert lab.one().id == "low-0"
    lab.now += 2000
    assert lab.one().id == "urgent"


def test_h27_a_reclaimed_or_retried_job_keeps_its_priority(lab: Lab) -> None:
    for index in range(20):
        lab.enqueue(f"low-{index}", own=False)
    lab.enqueue("urgent", priority=9)
    lab.one("urgent")
    lab.lapse()
    job = lab.one("urgent")
    assert job.job.attempt == 2
    job.retry(500)
    assert lab.one().id == "low-0"
    lab.now += 500
    assert lab.one("urgent").job.attempt == 3


def test_a_job_that_is_handed_back_keeps_its_rank(lab: Lab) -> None:
    for id in "abc":
        lab.enqueue(id)
    first, second = lab.take(2)
    rank = second.job.rank
    second.emit("x")
    second.release(error="worker is stopping")
    first.release()
    assert lab.score("ready", "b") == float(rank)
    jobs = lab.take(3)
    assert [job.id for job in jobs] == ["a", "b", "c"]
    assert [(job.job.attempt, job.job.starts) for job in jobs] == [(1, 2), (1, 2), (1, 1)]
    assert lab.get("b").error == "worker is stopping"
    assert lab.get("a").error is None


def test_a_job_from_a_repeated_reserve_is_handed_back_at_its_rank_too(lab: Lab) -> None:
    for id in "abc":
        lab.enqueue(id)
    lab.reserve(2, request=1)
    jobs = lab.reserve(2, request=1, again=True).jobs
    for job in jobs:
        lab.send(holding.release(lab.keys, job, cancel_ttl_ms=1, count=0, emitted=False, now=lab.now))
    assert [job.id for job in lab.take(3)] == ["a", "b", "c"]


def test_due_jobs_queue_up_in_the_order_of_their_times(lab: Lab) -> None:
    for id, delay in (("c", 300), ("a", 100), ("b", 200)):
        lab.enqueue(id, delay_ms=delay)
    lab.enqueue("now")
    lab.now += 250
    assert [job.id for job in lab.take(9)] == ["now", "a", "b"]


# -- cancel ----------------------------------------------------------------------------------------------------------


def test_h14_cancel_in_every_state(lab: Lab) -> None:
    lab.enqueue("waiting")
    lab.enqueue("delayed", delay_ms=9000)
    lab.running("retrying", priority=1).retry(9000)
    lab.running("running", priority=1)
    lab.running("completed", priority=1).complete()
    lab.running("dead", priority=1).fail()
    lab.enqueue("cancelled")
    lab.cancel("cancelled")
    answers = {
        "waiting": "cancelled",
        "delayed": "cancelled",
        "retrying": "cancelled",
        "running": "requested",
        "completed": "finished",
        "dead": "finished",
        "cancelled": "cancelled",
        "unknown": "unknown",
    }
    assert {id: lab.cancel(id) for id in answers} == answers
    for id in ("waiting", "delayed", "retrying", "cancelled"):
        assert [event.type for event in lab.read(id)][-1] == "cancelled"
        assert lab.where(id) == []
        assert lab.get(id).status == "cancelled"
    assert lab.where("running") == ["leases"]
    assert not [name for name in lab.state() if "unknown" in name]
    assert lab.take(9) == []


@pytest.mark.parametrize("end", ["complete", "fail", "retry", "release"])
def test_a_cancel_that_came_first_wins_over_every_outcome(end: str, lab: Lab) -> None:
    job = lab.running(key="k")
    job.emit("x")
    lab.cancel()
    assert job.emit("y") == "cancel"
    assert getattr(job, end)() == "cancelled"
    shown = lab.get()
    assert (shown.status, shown.result, shown.cancel_requested) == ("cancelled", None, True)
    assert [event.type for event in lab.read()] == ["chunk", "chunk", "cancelled"]
    assert lab.where() == []
    assert lab.raw("EXISTS", lab.keys.idem("k")) == 0


def test_cancel_is_pushed_to_the_worker_that_holds_the_job(lab: Lab) -> None:
    job = lab.running(worker="host:1:abc")
    lab.cancel()
    lab.cancel()
    assert lab.raw("LRANGE", lab.keys.ctl("host:1:abc"), 0, -1) == [f"{job.job.token} job-a"]


def test_a_foreign_holder_gets_no_push(lab: Lab) -> None:
    lab.running()
    lab.raw("HSET", lab.keys.job("job-a"), "token", "1b9d6bcd-bbfd-4b2d-9b5d-ab8dfbbd4bed")
    assert lab.cancel() == "requested"
    assert not [name for name in lab.state() if name.startswith("ctl")]
    assert lab.get().cancel_requested


def test_h16_cancel_while_the_owner_is_dead(lab: Lab) -> None:
    lab.running().emit("x")
    lab.cancel()
    lab.lapse()
    assert lab.take() == []
    assert lab.get().status == "cancelled"
    assert [event.type for event in lab.read()] == ["chunk", "cancelled"]
    assert lab.get().starts == 1


def test_a_jobs_own_result_ttl_decides_when_it_is_cancelled(lab: Lab) -> None:
    lab.enqueue(extra=[("resultTtlMs", "20000")])
    lab.cancel()
    assert 0 < lab.raw("PTTL", lab.keys.job("job-a")) <= 20_000
    lab.running("b", extra=[("resultTtlMs", "20000")])
    lab.cancel("b")
    lab.lapse()
    lab.reserve(0)
    assert 0 < lab.raw("PTTL", lab.keys.job("b")) <= 20_000


# -- leases ----------------------------------------------------------------------------------------------------------


def test_h12_after_a_stall_live_owners_renew_before_anybody_reclaims(lab: Lab) -> None:
    for index in range(25):
        lab.enqueue(f"j{index}", own=False)
    jobs = lab.take(25)
    lab.now += LEASE + 10_000  # everybody was frozen
    assert lab.take(5, worker="idle") == []
    assert lab.reserve(5, worker="idle").hint_ms == 1001
    dead, live = jobs[:2], jobs[2:]
    assert set(lab.send(holding.renew(lab.keys, [job.job for job in live], lease_ms=LEASE, now=lab.now))) == {"ok"}
    lab.now += 1001
    assert {job.id for job in lab.take(25, worker="idle")} == {job.id for job in dead}
    assert all(job.complete() == "completed" for job in live)
    assert [job.complete() for job in dead] == ["lost", "lost"]


def test_a_lapsed_lease_that_nobody_took_is_renewed_by_a_flush(lab: Lab) -> None:
    job = lab.running()
    lab.now += LEASE + 1
    lab.reserve(0)
    assert lab.score("leases") % 1 != 0
    assert job.emit("x", renew=True) == "ok"
    assert lab.score("leases") == lab.now + LEASE


def test_a_second_look_waits_for_the_grace(lab: Lab) -> None:
    lab.running()
    lab.now += LEASE
    assert lab.reserve(1).hint_ms == 1001
    lab.now += 1000
    assert lab.take() == []
    lab.now += 1
    assert lab.one().job.attempt == 2


def test_the_hint_of_a_lapsed_lease_is_not_short_of_it(lab: Lab) -> None:
    """A timer of exactly the hint must find the lease due, or the worker would spin for the last half millisecond."""
    lab.running()
    lab.now += LEASE
    lab.reserve(0)
    hint = lab.reserve(0).hint_ms
    lab.now += hint
    assert lab.one().job.attempt == 2


def test_grace_is_at_most_a_third_of_the_lease() -> None:
    assert [holding.grace_ms(ms) for ms in (300, 2999, 3000, 60_000)] == [100, 999, 1000, 1000]


def test_h13_cleanup_never_turns_a_finished_job_into_a_failed_one(lab: Lab) -> None:
    ends = {"completed": "complete", "failed": "fail", "cancelled": "cancel"}
    for status, how in ends.items():
        job = lab.running(status, max_attempts=1)
        if how == "cancel":
            lab.cancel(status)
            job.complete()
        else:
            getattr(job, how)()
    for set in ("leases", "ready", "scheduled"):
        lab.raw("ZADD", lab.keys.base + set, *(part for id in ends for part in (1, id)))
    lab.raw("ZADD", lab.keys.leases, *(part for id in ends for part in (lab.now - 5, id)))
    before = {id: (lab.record(id), lab.entries(id)) for id in ends}
    for _ in range(3):
        assert lab.take(9) == []
        lab.now += 1001
    assert {id: (lab.record(id), lab.entries(id)) for id in ends} == before
    assert {id: lab.where(id) for id in ends} == {"completed": [], "failed": ["dead"], "cancelled": []}


def test_a_waiting_job_with_a_stray_lease_is_not_reclaimed(lab: Lab) -> None:
    lab.enqueue()
    lab.raw("ZADD", lab.keys.leases, lab.now - 5, "job-a")
    lab.reserve(0)
    lab.now += 1001
    lab.reserve(0)
    assert lab.where() == ["ready"]
    assert "error" not in lab.record()


def test_h22_a_job_that_kills_its_worker_every_time_ends_dead(lab: Lab) -> None:
    lab.enqueue(max_attempts=3, key="k")
    for attempt in (1, 2, 3):
        assert lab.one().job.attempt == attempt
        lab.lapse()
    assert lab.take() == []
    assert lab.get().error == "Worker lease expired before the job finished"
    assert lab.dead() == ["job-a"]
    assert [event.type for event in lab.read()][-1] == "failed"
    assert lab.raw("EXISTS", lab.keys.idem("k")) == 0


# -- bounds ----------------------------------------------------------------------------------------------------------


def test_a_call_promotes_a_batch_and_asks_to_be_called_again(lab: Lab) -> None:
    for index in range(250):
        lab.enqueue(f"j{index:03}", own=False, delay_ms=1000 + index)
    lab.now += 2000
    seen = []
    for _ in range(4):
        answer = lab.reserve(0)
        stats = lab.stats()
        seen.append((answer.hint_ms, stats.waiting, stats.scheduled))
    assert seen == [(0, 100, 150), (0, 200, 50), (-1, 250, 0), (-1, 250, 0)]
    assert [job.id for job in lab.take(3)] == ["j000", "j001", "j002"]


def test_exactly_a_batch_that_is_due_leaves_nothing_to_call_again_for(lab: Lab) -> None:
    for index in range(BATCH):
        lab.enqueue(f"j{index}", own=False, delay_ms=1000)
    lab.enqueue("later", delay_ms=9000)
    lab.now += 1000
    assert lab.reserve(0).hint_ms == 8000


def test_a_call_reclaims_a_batch_and_asks_to_be_called_again(lab: Lab) -> None:
    for index in range(250):
        lab.enqueue(f"j{index}", own=False)
    for _ in range(3):
        lab.take(100)
    lab.now += LEASE + 1
    assert [lab.reserve(0).hint_ms for _ in range(4)] == [0, 0, 1001, 1001]
    lab.now += 1001
    seen = []
    for _ in range(3):
        answer = lab.reserve(0)
        stats = lab.stats()
        seen.append((answer.hint_ms, stats.waiting, stats.active))
    assert seen == [(0, 100, 150), (0, 200, 50), (-1, 250, 0)]


def test_a_call_takes_a_batch_at_most(lab: Lab) -> None:
    for index in range(150):
        lab.enqueue(f"j{index}", own=False)
    answer = lab.reserve(5000)
    assert (len(answer.jobs), answer.hint_ms) == (BATCH, 0)
    answer = lab.reserve(5000)
    assert (len(answer.jobs), answer.hint_ms) == (50, LEASE)


def test_a_reply_that_would_be_too_big_puts_the_rest_back(lab: Lab) -> None:
    for id in "abcd":
        lab.enqueue(id, payload="x" * 60)
    answer = lab.reserve(4, max_bytes=130)
    assert [job.id for job in answer.jobs] == ["a", "b"]
    assert answer.hint_ms == 0
    assert [lab.score("ready", id) for id in "cd"] == [9 * RANK + 3, 9 * RANK + 4]
    assert [lab.record(id)["attempt"] for id in "abcd"] == ["1", "1", "0", "0"]
    assert [job.id for job in lab.take(4)] == ["c", "d"]


def test_one_payload_over_the_limit_is_taken_all_the_same(lab: Lab) -> None:
    lab.enqueue("a", payload="x" * 60)
    lab.enqueue("b", payload="x" * 60)
    assert [job.id for job in lab.reserve(2, max_bytes=10).jobs] == ["a"]
    assert [job.id for job in lab.reserve(2, max_bytes=10).jobs] == ["b"]


def test_the_doorbell_list_is_bounded(lab: Lab) -> None:
    lab.raw("LPUSH", lab.keys.signal, *["1"] * 10_000)
    lab.enqueue()
    assert lab.raw("LLEN", lab.keys.signal) == 1000


# -- records that are not there --------------------------------------------------------------------------------------


@pytest.mark.parametrize("listed", ["ready", "scheduled", "leases"])
def test_an_entry_without_a_record_is_dropped_never_made_half_a_record(listed: str, lab: Lab) -> None:
    lab.enqueue("real", delay_ms=1)
    lab.raw("ZADD", lab.keys.base + listed, lab.now - 10.5 if listed == "leases" else 1, "ghost")
    lab.now += 1
    answer = lab.reserve(1)
    if listed == "ready":
        assert (answer.jobs, answer.hint_ms) == ([], 0)
        answer = lab.reserve(1)
    assert [job.id for job in answer.jobs] == ["real"]
    assert not [name for name in lab.state() if "ghost" in name]
    assert lab.where("ghost") == []


def test_a_stray_among_real_jobs_does_not_leave_a_slot_empty_in_silence(lab: Lab) -> None:
    lab.raw("ZADD", lab.keys.ready, 1, "ghost")
    for id in "ab":
        lab.enqueue(id)
    answer = lab.reserve(2)
    assert [job.id for job in answer.jobs] == ["a"]
    assert answer.hint_ms == 0


def test_a_dead_entry_without_a_record_heals_when_it_is_revived(lab: Lab) -> None:
    lab.raw("ZADD", lab.keys.dead, 1, "ghost")
    assert lab.retry_dead("ghost") is False
    assert lab.state() == {}


def test_a_job_that_strays_into_ready_before_its_time_is_in_one_place(lab: Lab) -> None:
    lab.enqueue(delay_ms=5000)
    lab.raw("ZADD", lab.keys.ready, 1, "job-a")
    lab.one("job-a")
    assert lab.where() == ["leases"]


def test_a_minimal_foreign_record_runs_once(lab: Lab) -> None:
    lab.raw("HSET", lab.keys.job("m"), "id", "m", "payload", '"p"')
    lab.raw("ZADD", lab.keys.ready, 1, "m")
    job = lab.one("m")
    assert (job.job.payload, job.job.attempt, job.job.max_attempts, job.job.priority) == ('"p"', 1, 1, 0)
    assert job.job.gen == str(lab.now) == lab.record("m")["gen"]
    job.emit("x")
    lab.lapse()
    assert lab.take() == []
    assert lab.get("m").status == "failed"


# -- doorbell, delays, pauses ----------------------------------------------------------------------------------------


def bells(lab: Lab) -> int:
    return int(lab.raw("LLEN", lab.keys.signal))


def test_reserve_never_takes_a_bell_and_clears_them_when_there_is_nothing(lab: Lab) -> None:
    for id in "ab":
        lab.enqueue(id)
    lab.take(1, bell=True)
    assert bells(lab) == 2
    lab.take(1, bell=True)
    assert bells(lab) == 2
    lab.take(1)
    assert bells(lab) == 2
    lab.take(1, bell=True)
    assert bells(lab) == 0


def test_promoting_or_reclaiming_more_than_is_taken_rings_for_the_rest(lab: Lab) -> None:
    for index in range(5):
        lab.enqueue(f"j{index}", own=False, delay_ms=10)
    lab.raw("DEL", lab.keys.signal)
    lab.now += 10
    lab.take(2)
    assert bells(lab) == 3
    lab.take(3)
    lab.raw("DEL", lab.keys.signal)
    lab.lapse()
    lab.reserve(0)
    assert bells(lab) == 5


def test_a_delayed_job_rings_only_when_it_becomes_the_earliest(lab: Lab) -> None:
    lab.enqueue("a", delay_ms=500)
    assert bells(lab) == 1
    lab.enqueue("b", delay_ms=600)
    assert bells(lab) == 1
    lab.enqueue("c", delay_ms=400)
    assert bells(lab) == 2
    assert lab.reserve(1).hint_ms == 400


def test_a_retry_rings_only_for_a_worker_that_stops(lab: Lab) -> None:
    lab.running("a").retry(50)
    assert bells(lab) == 1
    lab.running("b").retry(50, ring=True)
    assert bells(lab) == 3


def test_h29_the_hint_says_when_the_next_job_is_due(lab: Lab) -> None:
    assert lab.reserve(1).hint_ms == -1
    lab.enqueue("far", delay_ms=3_600_000)
    lab.enqueue("near", delay_ms=2000)
    assert lab.reserve(1).hint_ms == 2000
    lab.enqueue("now")
    lab.one("now")
    assert lab.reserve(1).hint_ms == 2000
    lab.now += 2500
    assert lab.one("near")


def test_a_release_can_pause_the_queue_and_a_pause_never_shortens(lab: Lab) -> None:
    for id in "abc":
        lab.enqueue(id)
    a, b, c = lab.take(3)
    a.release(pause_ms=5000)
    b.release(pause_ms=2000)
    answer = lab.reserve(9)
    assert (answer.jobs, answer.limited, answer.hint_ms) == ([], "paused", 5000)
    lab.now += 4999
    assert lab.reserve(9).limited
    c.release(pause_ms=100)
    lab.now += 1
    assert (lab.reserve(9).limited, lab.reserve(9).hint_ms) == ("paused", 99)
    lab.now += 99
    assert [job.id for job in lab.take(9)] == ["a", "b", "c"]


def test_a_paused_queue_still_promotes_and_reclaims(lab: Lab) -> None:
    """A cancelled job of a dead worker must not wait for the end of a long pause."""
    lab.running("pauses").release(pause_ms=10_000_000)
    lab.enqueue("due", delay_ms=50)
    answer = lab.reserve(9)
    assert (answer.limited, answer.hint_ms) == ("paused", 50)
    lab.now += 50
    answer = lab.reserve(9)
    assert (answer.limited, answer.jobs) == ("paused", [])
    assert lab.where("due") == ["ready"]


def test_h16_a_job_cancelled_under_a_pause_ends_when_its_lease_lapses(lab: Lab) -> None:
    lab.enqueue("dies", priority=1)
    lab.enqueue("pauses")
    _, pauses = lab.take(2)
    pauses.release(pause_ms=10_000_000)
    lab.cancel("dies")
    assert lab.reserve(9).hint_ms == LEASE
    lab.now += LEASE
    assert lab.reserve(9).hint_ms == 1001
    lab.now += 1001
    lab.reserve(9)
    assert lab.get("dies").status == "cancelled"


def test_a_handed_back_attempt_starts_the_output_over(lab: Lab) -> None:
    job = lab.running()
    job.emit("one", "two")
    tail = lab.tail()
    assert text_of(lab.drain(tail)) == "onetwo"
    job.release()
    assert [event.type for event in lab.drain(tail)] == ["restarted"]
    again = lab.one()
    assert (again.job.attempt, again.job.starts) == (1, 2)
    again.emit("three")
    again.complete()
    assert [event.type for event in lab.drain(tail)] == ["chunk", "completed"]
    assert text_of(lab.read()) == "three"


def test_a_release_with_an_unresolved_flush_is_never_half_applied(lab: Lab) -> None:
    """The flush landed but its reply was lost, so the holder's count is behind the stream."""
    job = lab.running()
    job.emit("a")
    lab.send(job.flush_call(("chunk", "b"), ("chunk", "c")))
    assert job.release(emitted=True) == "waiting"
    assert lab.where() == ["ready"]
    assert [fields["t"] for _, fields in lab.entries()] == ["restarted"]
    assert lab.one().emit("new") == "ok"


def test_an_attempt_that_was_given_back_without_its_marker_gets_it_from_the_next(lab: Lab) -> None:
    """A holder that did not know of its own output: the attempt is the first again, and only `starts` tells."""
    job = lab.running()
    job.emit("old")
    assert job.release(emitted=False) == "waiting"
    again = lab.one()
    assert (again.job.attempt, again.job.starts) == (1, 2)
    assert [fields["t"] for _, fields in lab.entries()] == ["restarted"]


def test_a_release_that_may_have_emitted_but_did_not(lab: Lab) -> None:
    assert lab.running().release(emitted=True) == "waiting"
    assert lab.entries() == []
    job = lab.one()
    job.emit("x")
    job.release()
    again = lab.one()
    again.release(emitted=True)  # the top is a marker already
    assert [fields["t"] for _, fields in lab.entries()] == ["restarted"]


# -- streams ---------------------------------------------------------------------------------------------------------


def test_ids_rise_over_attempts_and_the_marker_takes_a_number(lab: Lab) -> None:
    job = lab.running()
    b = job.job.b
    job.emit("a", "b")
    job.retry()
    job = lab.one()
    assert [id for id, _ in lab.entries()] == [f"{b}-3"]
    assert (job.job.b, job.job.n) == (b, 3)
    job.emit("c")
    lab.lapse()
    job = lab.one()
    assert [(id, fields["d"]) for id, fields in lab.entries()] == [(f"{b}-5", "3")]
    job.complete()
    assert [(id == f"{b}-5", fields["t"]) for id, fields in lab.entries()] == [
        (True, "restarted"),
        (False, "completed"),
    ]


def test_a_silent_attempt_adds_no_second_marker(lab: Lab) -> None:
    lab.running().retry()
    lab.one().retry()
    assert [fields["d"] for _, fields in lab.entries()] == ["2"]
    lab.one()
    assert [fields["d"] for _, fields in lab.entries()] == ["2"]


def test_a_revived_job_that_lost_its_end_still_gets_its_marker(lab: Lab) -> None:
    """A failover can lose the terminal entry and yet the stream remembers its id: nothing may be half applied."""
    job = lab.running()
    job.emit("a")
    job.fail()
    lab.raw("XDEL", lab.keys.events("job-a"), lab.entries()[-1][0])
    lab.now += 1000
    assert lab.retry_dead()
    assert lab.where() == ["ready"]
    assert [fields["t"] for _, fields in lab.entries()] == ["restarted"]
    lab.one().complete()


def test_a_dead_job_whose_output_is_gone_is_revived_too(lab: Lab) -> None:
    lab.running().fail()
    lab.raw("DEL", lab.keys.events("job-a"))
    lab.now += 10
    assert lab.retry_dead()
    assert [(id, fields["t"]) for id, fields in lab.entries()] == [(f"{lab.now}-1", "restarted")]
    job = lab.one()
    job.emit("x")
    assert text_of(lab.read()) == "x"


def test_a_revived_job_lives_on_without_a_ttl(lab: Lab) -> None:
    job = lab.running()
    job.emit("a")
    job.fail()
    lab.now += 10
    lab.retry_dead(max_attempts=7)
    assert lab.raw("PTTL", lab.keys.job("job-a")) == lab.raw("PTTL", lab.keys.events("job-a")) == -1
    record = lab.record()
    assert (record["attempt"], record["maxAttempts"], record["starts"]) == ("0", "7", "1")
    assert "finishedAt" not in record
    job = lab.one()
    job.emit("b")
    job.complete()
    assert text_of(lab.read()) == "b"


def test_a_result_of_each_life_has_the_time_to_live_of_its_settler(lab: Lab) -> None:
    lab.running().complete(ttl=RESULT_TTL // 2)
    for name in (lab.keys.job("job-a"), lab.keys.events("job-a")):
        assert 0 < lab.raw("PTTL", name) <= RESULT_TTL // 2


def test_the_time_of_the_end_is_the_time_of_its_event(lab: Lab) -> None:
    """Without an override of the clock, as in production."""
    lab.now = None  # type: ignore[assignment]
    job = lab.running()
    job.emit("x")
    job.complete()
    end = lab.entries()[-1][0]
    assert lab.record()["finishedAt"] == end.partition("-")[0]
    assert int(lab.record()["finishedAt"]) < T0 * 2


# -- who waits for what is due -----------------------------------------------------------------------------------------


def test_one_worker_waits_for_the_next_due_time_and_the_others_come_a_second_later(lab: Lab) -> None:
    lab.enqueue("late", delay_ms=5000)
    assert lab.reserve(worker="one").hint_ms == 5000
    assert lab.reserve(worker="two").hint_ms == 5000 + LATER
    assert lab.reserve(worker="one").hint_ms == 5000
    # An earlier time is somebody else's to wait for; the one before has to be woken for neither.
    lab.enqueue("soon", delay_ms=2000)
    assert lab.reserve(worker="two").hint_ms == 2000
    assert lab.reserve(worker="one").hint_ms == 2000 + LATER
    # Whoever comes at that time finds the job, and waits for the next.
    lab.now += 2000
    taken = lab.reserve(worker="two")
    assert [job.id for job in taken.jobs] == ["soon"]
    assert taken.hint_ms == 3000


def test_a_worker_that_died_waiting_is_replaced_a_second_later(lab: Lab) -> None:
    lab.enqueue("late", delay_ms=5000)
    lab.reserve(worker="dead")
    assert lab.reserve(worker="two").hint_ms == 5000 + LATER
    lab.now += 5000 + LATER
    assert [job.id for job in lab.reserve(worker="two").jobs] == ["late"]


def test_a_lapsed_lease_is_waited_for_by_whoever_found_it_and_the_others_come_a_second_later(lab: Lab) -> None:
    lab.running()
    lab.now += LEASE
    grace = holding.grace_ms(LEASE)
    assert lab.reserve(worker="aa").hint_ms == grace + 1
    assert grace < lab.reserve(worker="bb").hint_ms - LATER <= grace + 1
    # Also when it looks again meanwhile, which it may for any other reason.
    lab.now += 100
    assert lab.reserve(worker="aa").hint_ms == grace + 1 - 100
    assert lab.reserve(worker="bb").jobs == []
    # It died: the next one takes the job at its own time.
    lab.now += grace - 100 + LATER + 1
    assert [job.attempt for job in lab.reserve(worker="bb").jobs] == [2]


def test_who_waits_is_noted_on_a_full_database_too(own_lab: Lab, own_connection: redis.Redis) -> None:
    own_lab.enqueue("late", delay_ms=5000)
    own_connection.config_set("maxmemory", 1)
    try:
        assert own_lab.reserve(worker="one").hint_ms == 5000
    finally:
        own_connection.config_set("maxmemory", 0)
