"""All transitions in any order, with lost replies, late repeats, strays and a moving clock, against a plain model.

The model says for each set which ids are in it at which score, so "each job is in exactly one place" and much more
follows from comparing it with the database after every step. `OUTLAST_LONG=500` runs so many cases, new ones each time.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from outlast import JobInUseError
from outlast.protocol import Call, Keys, Tail, calls, holding
from outlast.protocol.keys import RANK
from outlast.records import TERMINAL

from .lab import LEASE, Holder, Lab, text_of

LONG = int(os.environ.get("OUTLAST_LONG", "0"))
GRACE = holding.grace_ms(LEASE)
MARK = 1 / 512
"""Of a worker whose id does not begin with hexadecimal digits."""
LAPSED = "Worker lease expired before the job finished"
OWN = ["a", "b", "c"]
GHOSTS = ["ghost-1", "ghost-2"]


@dataclass
class Job:
    """What the model knows of a job."""

    id: str
    status: str = "waiting"
    attempt: int = 0
    starts: int = 0
    most: int = 3
    priority: int = 0
    key: str = ""
    token: str | None = None
    flagged: bool = False
    text: str = ""
    error: str | None = None
    result: str | None = None
    settles: int = 0
    """How often a take of the current life was brought to an end by its holder."""
    takes: int = 0
    hook: bool = False
    steps: dict[str, str] = field(default_factory=dict)


@dataclass
class Model:
    jobs: dict[str, Job] = field(default_factory=dict)
    ready: dict[str, float] = field(default_factory=dict)
    scheduled: dict[str, float] = field(default_factory=dict)
    leases: dict[str, float] = field(default_factory=dict)
    dead: dict[str, float] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    seq: int = 0
    paused_until: int = 0
    limit: int | None = None
    told: list[tuple[str, str, int]] = field(default_factory=list)
    """What the webhooks must hear: id, end and time of it, one for each end of each life."""

    def queue_up(self, job: Job, now: int, delay: int = 0) -> None:
        if delay:
            job.status = "scheduled"
            self.scheduled[job.id] = now + delay
        else:
            job.status = "waiting"
            self.seq += 1
            self.ready[job.id] = (9 - job.priority) * RANK + self.seq

    def end(self, job: Job, status: str, now: int) -> None:
        job.status, job.token = status, None
        if job.hook:
            self.told.append((job.id, status, now))
        if status == "failed":
            self.dead[job.id] = now
        if status != "completed" and self.keys.get(job.key) == job.id:
            del self.keys[job.key]

    def reserve(self, k: int, token: str, now: int) -> list[Job]:
        moved = []
        for id in self._due(self.scheduled, now):
            del self.scheduled[id]
            if id in self.jobs and self.jobs[id].status in ("waiting", "scheduled"):
                moved.append(self.jobs[id])
        for id in self._due(self.leases, now):
            if self.leases[id] % 1 == 0:
                self.leases[id] = now + GRACE + MARK
                continue
            del self.leases[id]
            job = self.jobs.get(id)
            if job and job.status == "active":
                job.token = None
                if job.flagged:
                    self.end(job, "cancelled", now)
                elif job.attempt >= job.most:
                    job.error = LAPSED
                    self.end(job, "failed", now)
                else:
                    job.error = LAPSED
                    moved.append(job)
        for job in moved:
            self.queue_up(job, now)
        taken = []
        if self.limit is not None:
            k = min(k, max(0, self.limit - len(self.leases)))
        if now >= self.paused_until:
            for id in sorted(self.ready, key=lambda id: (self.ready[id], id))[:k]:
                del self.ready[id]
                job = self.jobs.get(id)
                if job and job.status in ("waiting", "scheduled"):
                    self.scheduled.pop(id, None) if job.status == "scheduled" else None
                    job.status, job.token = "active", token
                    job.attempt += 1
                    job.starts += 1
                    job.takes += 1
                    job.text = ""
                    self.leases[id] = now + LEASE
                    taken.append(job)
        return taken

    @staticmethod
    def _due(entries: dict[str, float], now: int) -> list[str]:
        return sorted((id for id, score in entries.items() if score <= now), key=lambda id: (entries[id], id))


class Machine(RuleBasedStateMachine):
    connection: redis.Redis
    runs = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).runs += 1
        self.lab = Lab(self.connection, Keys(f"state{os.getpid()}-{self.runs}"))
        self.model = Model()
        self.holders: list[Holder] = []
        self.sent: list[tuple[Call[Any], int]] = []
        self.minted = 0
        self.tainted: set[str] = set()
        """Ids that a stray listing was made for: they may be listed twice until a reserve comes by it."""
        self.tails: dict[str, Tail[Any]] = {}
        self.shown: dict[str, str] = {}
        self.cursors: list[tuple[str, str, str]] = []
        self.requests = 0

    def teardown(self) -> None:
        names = [self.lab.keys.base + name for name in self.lab.state()]
        if names:
            self.lab.raw("DEL", *names)

    def send(self, call: Call[Any], lost: bool, repeat: Call[Any] | None = None) -> Any:
        """Send a call; if its reply is lost, send the repeat and take that answer."""
        self.sent.append((call, self.lab.now))
        if lost:
            self.lab.reply(call)
            call = repeat or call
        return self.lab.send(call)

    # -- producers -----------------------------------------------------------------------------------------------

    @rule(
        id=st.sampled_from([*OWN, None]),
        key=st.sampled_from(["", "", "k1", "k2"]),
        delay=st.sampled_from([0, 0, 1000, 5000]),
        priority=st.sampled_from([0, 0, 5, 9]),
        most=st.integers(1, 3),
        lost=st.booleans(),
        hook=st.booleans(),
    )
    def enqueue(self, id: str | None, key: str, delay: int, priority: int, most: int, lost: bool, hook: bool) -> None:
        own = id is not None
        if id is None:
            self.minted += 1
            id = f"minted-{self.minted}"
        options = {"own": own, "key": key, "delay_ms": delay, "priority": priority, "max_attempts": most}
        call = self.lab.enqueue_call(id, **options, extra=[("webhook", f'{{"id":"{id}"}}')] if hook else [])
        old = self.model.jobs.get(id)
        if key and key in self.model.keys:
            answer = self.send(call, lost)
            assert (answer.id, answer.deduplicated) == (self.model.keys[key], True)
        elif old and old.status not in TERMINAL:
            with pytest.raises(JobInUseError):
                self.send(call, False)
        else:
            answer = self.send(call, lost)
            assert (answer.id, answer.deduplicated) == (id, False)
            if old and self.model.keys.get(old.key) == id:
                del self.model.keys[old.key]
            if old and old.status == "failed":
                self.model.dead.pop(id, None)
            self.model.jobs[id] = job = Job(id, most=most, priority=priority, key=key, hook=hook)
            if key:
                self.model.keys[key] = id
            self.model.queue_up(job, self.lab.now, delay)

    @rule(id=st.sampled_from([*OWN, "minted-1", "minted-2", "foreign-1", "unknown"]), lost=st.booleans())
    def cancel(self, id: str, lost: bool) -> None:
        job = self.model.jobs.get(id)
        answer = self.send(calls.cancel(self.lab.keys, id, result_ttl_ms=50_000, now=self.lab.now), lost)
        if job is None:
            assert answer == "unknown"
        elif job.status == "active":
            assert answer == "requested"
            job.flagged = True
        elif job.status == "cancelled":
            assert answer == "cancelled"
        elif job.status in TERMINAL:
            assert answer == "finished"
        else:
            assert answer == "cancelled"
            lists = [self.model.scheduled, self.model.ready]
            for entries in lists if job.status == "scheduled" else reversed(lists):
                if entries.pop(id, None) is not None:
                    break
            job.flagged = True
            self.model.end(job, "cancelled", self.lab.now)

    @rule(data=st.data(), most=st.integers(1, 3), lost=st.booleans(), keep=st.booleans())
    @precondition(lambda self: self.model.jobs)
    def retry_dead(self, data: st.DataObject, most: int, lost: bool, keep: bool) -> None:
        job = self.model.jobs[data.draw(st.sampled_from(sorted(self.model.dead) or sorted(self.model.jobs)))]
        self.requests += 1
        call = calls.retry_dead(
            self.lab.keys, job.id, nonce=f"n{self.requests}", max_attempts=most, keep_steps=keep, now=self.lab.now
        )
        answer = self.send(call, lost)
        assert answer is (job.status == "failed")
        if answer:
            del self.model.dead[job.id]
            job.attempt, job.most, job.text, job.flagged, job.result = 0, most, "", False, None
            job.steps = job.steps if keep else {}
            self.model.queue_up(job, self.lab.now)

    # -- workers -------------------------------------------------------------------------------------------------

    @rule(
        worker=st.sampled_from(["w1", "w2"]),
        k=st.integers(0, 3),
        lost=st.booleans(),
        bell=st.booleans(),
        limited=st.sampled_from(["", "room", "paused"]),
    )
    def reserve(self, worker: str, k: int, lost: bool, bell: bool, limited: str) -> None:
        self.requests += 1
        options: dict[str, Any] = {"worker": worker, "request": self.requests, "bell": bell, "limited": limited}
        call = self.lab.reserve_call(k, stale_at_ms=self.lab.now + 1000, **options)
        answer = self.send(call, lost, self.lab.reserve_call(k, again=True, **options))
        taken = self.model.reserve(k, f"{worker}:{self.requests}", self.lab.now)
        if lost and not taken:
            # The repeat of a request that took nothing is a request like any other; it found what the first left.
            taken = self.model.reserve(k, f"{worker}:{self.requests}", self.lab.now)
        assert [job.id for job in answer.jobs] == [job.id for job in taken]
        if self.lab.now < self.model.paused_until:
            assert answer.limited == "paused"
        elif k > 0 and not (lost and taken):  # a repeat says nothing of limits
            full = self.model.limit is not None and len(self.model.leases) >= self.model.limit
            assert answer.limited == ("room" if full else "")
        for reserved, job in zip(answer.jobs, taken, strict=True):
            assert (reserved.attempt, reserved.starts) == (job.attempt, job.starts)
            assert (reserved.max_attempts, reserved.priority, reserved.key) == (job.most, job.priority, job.key)
            self.holders.append(Holder(self.lab, reserved))

    def holder(self, data: st.DataObject) -> tuple[Holder, Job | None]:
        """One that took a job once, and the job if it still holds it."""
        latest = self.holders[-6:]
        holder = data.draw(st.sampled_from(latest))
        job = self.model.jobs.get(holder.id)
        return holder, job if job and job.token == holder.job.token else None

    @rule(data=st.data(), count=st.integers(1, 3), renew=st.booleans(), lost=st.booleans())
    @precondition(lambda self: self.holders)
    def flush(self, data: st.DataObject, count: int, renew: bool, lost: bool) -> None:
        holder, job = self.holder(data)
        texts = [f"{holder.job.token}/{holder.n + n} " for n in range(count)]
        events = [("chunk", text) for text in texts]
        call = holder.flush_call(*events, renew=renew)
        answer = self.send(call, lost, holder.flush_call(*events, renew=renew, again=True))
        assert answer == ("lost" if job is None else "cancel" if job.flagged else "ok")
        if job:
            holder.n += count
            holder.emitted = True
            job.text += "".join(texts)
            if renew:
                self.model.leases[job.id] = self.lab.now + LEASE

    @rule(data=st.data(), name=st.sampled_from(["a", "b", "gen"]), lost=st.booleans())
    @precondition(lambda self: self.holders)
    def step(self, data: st.DataObject, name: str, lost: bool) -> None:
        holder, job = self.holder(data)
        found, stale = holder.steps()
        if job:
            assert found == job.steps
        if name in found:
            return  # the holder returns what is kept
        answer = self.send(holder.step_call(name, holder.job.token, stale=stale), lost)
        assert answer == ("lost" if job is None else "cancel" if job.flagged else "ok")
        if job:
            job.steps[name] = holder.job.token

    @rule(worker=st.sampled_from(["w1", "w2"]), lost=st.booleans())
    @precondition(lambda self: self.holders)
    def renew(self, worker: str, lost: bool) -> None:
        held = [holder for holder in self.holders[-8:] if holder.job.token.startswith(worker)]
        call = holding.renew(self.lab.keys, [holder.job for holder in held], lease_ms=LEASE, now=self.lab.now)
        for holder, answer in zip(held, self.send(call, lost), strict=True):
            job = self.model.jobs.get(holder.id)
            mine = job and job.token == holder.job.token
            assert answer == ("lost" if not job or not mine else "cancel" if job.flagged else "ok")
            if job and mine:
                self.model.leases[job.id] = self.lab.now + LEASE

    @rule(
        data=st.data(),
        how=st.sampled_from(["completed", "completed", "failed", "retry", "retry later", "release", "pause"]),
        lost=st.booleans(),
    )
    @precondition(lambda self: self.holders)
    def finish(self, data: st.DataObject, how: str, lost: bool) -> None:
        holder, job = self.holder(data)
        now = self.lab.now
        call: Call[Any]
        if how in ("completed", "failed"):
            call, expected = holder.settle_call(how, f'"{holder.job.token}"'), how  # type: ignore[arg-type]
        elif how.startswith("retry"):
            call, expected = holder.retry_call(3000 if "later" in how else 0), "scheduled"
        else:
            call, expected = holder.release_call(2000 if how == "pause" else None), "waiting"
        settled = self.lab.raw("HGET", self.lab.keys.job(holder.id), "settled") == holder.job.token
        answer = self.send(call, lost)
        if job is None:
            assert answer == "lost" or settled
            return
        assert answer == ("cancelled" if job.flagged else expected)
        job.settles += 1
        job.token = None
        self.model.leases.pop(job.id, None)
        if how.startswith("retry"):
            job.error = "Error: again"
        if job.flagged:
            self.model.end(job, "cancelled", now)
        elif how in ("completed", "failed"):
            if how == "completed":
                job.result = f'"{holder.job.token}"'
            else:
                job.error = f'"{holder.job.token}"'
            self.model.end(job, how, now)
        elif how.startswith("retry"):
            job.status = "scheduled"
            self.model.scheduled[job.id] = now + (3000 if "later" in how else 0)
        else:
            job.status = "waiting"
            job.attempt -= 1
            if holder.emitted:
                job.text = ""
            self.model.ready[job.id] = float(holder.job.rank)
            if how == "pause":
                self.model.paused_until = max(self.model.paused_until, now + 2000)

    # -- time, faults, strangers ---------------------------------------------------------------------------------

    @rule(ms=st.sampled_from([1, 400, 1001, 3000, LEASE // 2, LEASE + 1]))
    def time_passes(self, ms: int) -> None:
        self.lab.now += ms

    @rule(limit=st.sampled_from([None, 1, 2]))
    def an_operator_sets_a_limit(self, limit: int | None) -> None:
        command = ("HDEL", "concurrency") if limit is None else ("HSET", "concurrency", limit)
        self.lab.raw(command[0], self.lab.keys.config, *command[1:])
        self.model.limit = limit

    @rule()
    def every_lease_lapses(self) -> None:
        self.lab.now += LEASE + 1
        for _ in range(2):
            self.requests += 1
            self.lab.reserve(0, request=self.requests)
            self.model.reserve(0, "", self.lab.now)
            self.lab.now += GRACE + 1

    @rule(id=st.sampled_from(GHOSTS), entries=st.sampled_from(["ready", "scheduled", "leases"]), old=st.booleans())
    def an_entry_has_no_record(self, id: str, entries: str, old: bool) -> None:
        score = 17.5 if old else 17
        self.lab.raw("ZADD", self.lab.keys.base + entries, score, id)
        getattr(self.model, entries)[id] = score

    @rule(data=st.data(), entries=st.sampled_from(["ready", "scheduled", "leases"]))
    @precondition(lambda self: self.model.jobs)
    def a_job_strays_into_a_set(self, data: st.DataObject, entries: str) -> None:
        """As a lost delete leaves it. Not a lease of a running job: that would be a lease that lapsed."""
        id = data.draw(st.sampled_from(sorted(self.model.jobs)))
        if id in getattr(self.model, entries):
            return
        score = 19.5 if entries == "leases" else self.lab.now
        self.lab.raw("ZADD", self.lab.keys.base + entries, score, id)
        getattr(self.model, entries)[id] = score
        self.tainted.add(id)

    @rule(n=st.integers(1, 2))
    def a_foreign_producer_makes_a_minimal_record(self, n: int) -> None:
        id = f"foreign-{n}"
        if id in self.model.jobs:
            return
        self.lab.raw("HSET", self.lab.keys.job(id), "id", id, "payload", "{}")
        self.lab.raw("ZADD", self.lab.keys.ready, RANK + n, id)
        self.model.jobs[id] = Job(id, most=1)
        self.model.ready[id] = RANK + n

    @rule(data=st.data())
    @precondition(lambda self: self.sent)
    def a_request_comes_again_late(self, data: st.DataObject) -> None:
        """Out of a dead socket's buffer, any time later: it must change nothing."""
        call, at = data.draw(st.sampled_from(self.sent[-12:]))
        assert call.script
        arguments = call.args[1 + int(call.args[0]) :]
        named = dict(zip(call.script.argv, arguments, strict=False))
        match call.script.name:
            case "enqueue" if self.lab.raw("HGET", call.args[1], "nonce") != named["nonce"]:
                return  # the id has been used again, or the key was found: a call like any other
            case "retry_dead" if self.lab.raw("HGET", call.args[1], "revived") != named["nonce"]:
                return
            case "cancel":
                return  # as good as a cancel that comes first now
            case "reserve" if self.lab.now <= at + 1000:
                return  # within its time it is no late request
            case "renew":
                return  # prolongs what is held, as it should
            case "flush" if "leases?" in call.script.keys and int(call.args[0]) == 3:
                return
            case _:
                pass
        # The argument `now` stands for the server's clock, which has gone on.
        position = 1 + int(call.args[0])
        late = call
        if call.script.argv[0] == "now":
            arguments_now = (*call.args[:position], str(self.lab.now), *call.args[position + 1 :])
            late = Call(arguments_now, call.decode, call.script)
        before = self.contents()
        try:
            self.lab.reply(late)
        except redis.exceptions.ResponseError as error:
            assert call.script.name == "flush"
            assert "equal or smaller" in str(error)  # noqa: PT017
        assert self.contents() == before

    def contents(self) -> dict[str, Any]:
        return {name: {**key, "ttl_ms": key["ttl_ms"] is None} for name, key in self.lab.state().items()}

    # -- readers -------------------------------------------------------------------------------------------------

    @rule(id=st.sampled_from([*OWN, "minted-1", "foreign-1"]))
    def a_watcher_looks(self, id: str) -> None:
        """One watcher for each id, over all its lives: after an end it resumes with the end's cursor."""
        job = self.model.jobs.get(id)
        if job is None:
            return
        tail = self.tails.get(id)
        if tail is None or tail.done:
            tail = self.tails[id] = self.lab.tail(id, after=tail and tail.cursor)
        events = self.lab.drain(tail)
        text = self.shown.get(id, "")
        for event in events:
            text = "" if event.type in ("restarted", "gap") else text + (event.data if event.type == "chunk" else "")
            self.cursors.append((id, event.id, text))
        self.shown[id] = text
        assert text == job.text
        assert tail.done == (job.status in TERMINAL)

    @rule(data=st.data(), limit=st.sampled_from([1, 2, 500]))
    @precondition(lambda self: self.cursors)
    def a_reader_resumes_from_long_ago(self, data: st.DataObject, limit: int) -> None:
        id, cursor, text = data.draw(st.sampled_from(self.cursors[-20:]))
        job = self.model.jobs[id]
        tail = self.lab.tail(id, after=cursor, limit=limit)
        for event in self.lab.drain(tail):
            text = "" if event.type in ("restarted", "gap") else text + (event.data if event.type == "chunk" else "")
        assert text == job.text
        assert tail.done == (job.status in TERMINAL)

    # -- what must always be true --------------------------------------------------------------------------------

    @initialize()
    def scripts_are_loaded(self) -> None:
        self.lab.reserve(0)

    @invariant()
    def the_database_is_what_the_model_says(self) -> None:
        state, model = self.lab.state(), self.model
        for name in ("ready", "scheduled", "leases", "dead"):
            members = {id: float(score) for id, score in state.pop(name, {"members": {}})["members"].items()}
            assert members == getattr(model, name), name
        for id, job in model.jobs.items():
            record = state.pop(f"job:{id}")
            fields = record["fields"]
            assert fields["id"] == id
            assert fields.get("status", "waiting") == job.status
            assert int(fields.get("attempt", 0)) == job.attempt
            assert int(fields.get("starts", fields.get("attempt", 0))) == job.starts
            assert fields.get("token") == job.token
            assert fields.get("error") == job.error
            assert fields.get("result") == job.result
            assert (fields.get("cancelRequested") == "1") == job.flagged
            assert (record["ttl_ms"] is not None) == (job.status in TERMINAL)
            assert ("finishedAt" in fields) == (job.status in TERMINAL)
            # Each take ends once: by its holder, or by the reserve that found it lapsed.
            assert job.settles <= job.takes
            steps = state.pop(f"steps:{id}", None)
            assert bool(steps) == bool(job.steps)
            if steps:
                assert steps["fields"].pop("gen") == fields["gen"]
                assert {name.removeprefix("s:"): value for name, value in steps["fields"].items()} == job.steps
                assert steps["ttl_ms"] is not None
            stream = state.pop(f"events:{id}", None)
            if stream:
                assert (stream["ttl_ms"] is not None) == (job.status in TERMINAL)
                ends = [fields["t"] for _, fields in stream["entries"] if fields["t"] in TERMINAL]
                assert ends == ([job.status] if job.status in TERMINAL else [])
                assert len({fields["a"] for _, fields in stream["entries"]}) <= 2
            else:
                assert job.text == ""
                assert job.status not in TERMINAL
            if id not in self.tainted:
                places = [n for n in ("ready", "scheduled", "leases", "dead") if id in getattr(model, n)]
                home = {"waiting": ["ready"], "active": ["leases"], "failed": ["dead"], "scheduled": ["scheduled"]}
                assert places == home.get(job.status, [])
        for key, id in model.keys.items():
            mapping = state.pop(f"idem:{key}")
            assert mapping["value"] == id
            assert (mapping["ttl_ms"] is not None) == (model.jobs[id].status in TERMINAL)
        hooks = {name.removeprefix("hooks:"): state.pop(name) for name in list(state) if name.startswith("hooks:")}
        told = {name.partition("-")[2]: key["fields"]["payload"] for name, key in hooks.items() if "job:" in name}
        heard = [json.loads(told[number]) for number in sorted(told, key=int)]
        assert [(end["id"], end["status"], end["at"]) for end in heard] == model.told
        assert len(hooks.get("ready", {"members": ()})["members"]) == len(told)
        # What is left are the queue's own keys, and no key without an owner.
        assert {name.partition(":")[0] for name in state} <= {"seq", "signal", "take", "ctl", "config", "room", "watch"}
        for name, key in state.items():
            assert (key["ttl_ms"] is not None) == name.startswith(("take:", "ctl:", "watch"))

    @invariant()
    def fresh_readers_see_the_text_of_this_life(self) -> None:
        for id, job in list(self.model.jobs.items())[-4:]:
            tail = self.lab.tail(id)
            events = self.lab.drain(tail)
            assert text_of(events) == job.text
            assert "gap" not in [event.type for event in events]
            assert tail.done == (job.status in TERMINAL)


@pytest.mark.timeout(0 if LONG else 120)
def test_every_job_is_in_one_place_whatever_happens(connection: redis.Redis) -> None:
    run_state_machine_as_test(
        type("Machine", (Machine,), {"connection": connection}),
        settings=settings(
            max_examples=LONG or 40,
            stateful_step_count=80 if LONG else 50,
            deadline=None,
            database=None,
            derandomize=not LONG,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
