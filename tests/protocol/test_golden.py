"""The database states that benni's queue left behind, made again through Calls on a real server.

Every difference between its state and ours must be in the table of `differences`, and every entry of the table must
still be needed. `golden/README.md` says what the files hold and what was normalised.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from outlast import Event, JobInUseError
from outlast.records import TERMINAL, Enqueued

from .differences import ABSENT, ANY, DIFFERENCES
from .lab import T0, Holder, Lab

GOLDEN = {path.stem: path for path in sorted((Path(__file__).parent / "golden").glob("*.json"))}
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Play:
    """One scenario: what the calls answered, and the states at the moments that the golden file has."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.api: dict[str, Any] = {}
        self.states: list[dict[str, Any]] = []

    def at(self, ms: int) -> None:
        self.lab.now = T0 + ms

    def snapshot(self) -> None:
        self.states.append(self.lab.state())

    def stats(self) -> None:
        stats = self.lab.stats()
        self.api["stats"] = {name: getattr(stats, name) for name in ("waiting", "scheduled", "active", "dead")}

    def get(self, id: str) -> None:
        job = self.lab.get(id)
        self.api[f"get {id}"] = job and {
            "id": job.id,
            "status": job.status,
            "payload": job.payload,
            "attempt": job.attempt,
            "maxAttempts": job.max_attempts,
            "priority": job.priority,
            "createdAt": _ms(job.created_at),
            "updatedAt": _ms(job.updated_at),
            "startedAt": _ms(job.started_at),
            "finishedAt": _ms(job.finished_at),
            "result": job.result,
            "error": job.error,
            "progress": job.progress,
            "idempotencyKey": job.idempotency_key,
            "cancelRequested": job.cancel_requested,
        }

    def watch(self, id: str = "job-a") -> None:
        self.api[f"watch {id} from 0"] = [_event(event) for event in self.lab.read(id)]

    def wait(self, id: str = "job-a") -> None:
        [end] = self.lab.read(id, record_first=True)
        self.api[f"wait {id}"] = end.result if end.type == "completed" else f"Error: {end.error}"  # type: ignore[union-attr]

    def dead(self) -> None:
        self.api["dead"] = self.lab.dead()

    def cancelled(self, name: str, id: str = "job-a") -> None:
        """The answer as the client gives it: will the job produce no result?"""
        self.api[name] = self.lab.cancel(id) in ("cancelled", "requested")


def _ms(moment: datetime | None) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)


def _enqueued(answer: Enqueued) -> dict[str, Any]:
    return {"id": answer.id, "deduplicated": answer.deduplicated}


def _event(event: Event[Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {"id": event.id, "type": event.type}
    match event.type:
        case "chunk":
            shown["data"] = event.data
        case "progress":
            shown["progress"] = event.value
        case "restarted":
            shown["attempt"] = event.attempt
        case "completed":
            shown["result"] = event.result
        case "failed":
            shown["error"] = event.error
    return shown


SCENARIOS: dict[str, Callable[[Play, Lab], None]] = {}


def scenario(name: str) -> Callable[[Callable[[Play, Lab], None]], Callable[[Play, Lab], None]]:
    def register(play: Callable[[Play, Lab], None]) -> Callable[[Play, Lab], None]:
        SCENARIOS[name] = play
        return play

    return register


X = '{"prompt":"x"}'
N1 = '{"n":1}'
BAD = "TerminalJobError: bad"


@scenario("01-waiting")
def _(play: Play, lab: Lab) -> None:
    low = '{"prompt":"hé 🚀 \\"q\\"","n":1.5,"list":[1,null,true]}'
    for at, id, payload, priority, attempts in (
        (0, "job-low", low, 0, 3),
        (10, "job-high", '{"prompt":"high"}', 9, 3),
        (20, "job-mid", '"text payload"', 5, 7),
    ):
        play.at(at)
        answer = lab.enqueue(id, payload=payload, priority=priority, max_attempts=attempts)
        play.api[f"enqueue {id}"] = _enqueued(answer)
    play.get("job-low")
    play.stats()
    play.snapshot()


@scenario("02-waiting-default-id")
def _(play: Play, lab: Lab) -> None:
    lab.enqueue(str(uuid.uuid4()), own=False, payload="null")
    play.snapshot()


@scenario("03-scheduled")
def _(play: Play, lab: Lab) -> None:
    lab.enqueue(payload='{"prompt":"later"}', priority=3, delay_ms=60_000)
    play.stats()
    play.snapshot()


@scenario("04-promoted")
def _(play: Play, lab: Lab) -> None:
    lab.enqueue("job-a", payload="1", delay_ms=1000)
    lab.enqueue("job-b", payload="2", delay_ms=1000)
    play.at(1000)
    lab.one("job-a")
    play.snapshot()


@scenario("05-active")
def _(play: Play, lab: Lab) -> None:
    lab.enqueue(payload=X)
    play.at(1000)
    lab.one("job-a")
    play.get("job-a")
    play.snapshot()


def stream(play: Play, lab: Lab, *, renew: bool) -> None:
    job = lab.running(payload=X)
    play.at(500)
    job.emit("The capital ", renew=renew)
    play.at(1000)
    job.emit("of – ünïcode\n", renew=renew)
    play.at(1500)
    job.progress("0.3333333333333333", renew=renew)
    play.at(2500)
    job.emit("", renew=renew)
    play.snapshot()


@scenario("06-streaming")
def _(play: Play, lab: Lab) -> None:
    stream(play, lab, renew=False)


@scenario("07-completed")
def _(play: Play, lab: Lab) -> None:
    job = lab.running(payload=X, priority=2)
    play.at(1000)
    job.emit("hello")
    job.progress("1")
    play.at(2000)
    job.complete('{"text":"hé 🚀","usage":{"out":12,"ratio":0.25},"none":null}')
    play.get("job-a")
    play.wait()
    play.cancelled("cancel job-a")
    play.watch()
    play.snapshot()


@scenario("08-completed-void")
def _(play: Play, lab: Lab) -> None:
    lab.running(payload="null").complete("null")
    play.wait()
    play.snapshot()


@scenario("09-failed-terminal")
def _(play: Play, lab: Lab) -> None:
    job = lab.running(payload=X)
    job.emit("partial")
    play.at(250)
    job.fail("TerminalJobError: model refused the request")
    play.stats()
    play.dead()
    play.wait()
    play.watch()
    play.snapshot()


@scenario("10-retry-scheduled")
def _(play: Play, lab: Lab) -> None:
    job = lab.running(payload=X)
    job.emit("The capital of")
    job.progress("0.5")
    play.at(100)
    job.retry(30_000, "Error: provider is overloaded")
    play.get("job-a")
    play.snapshot()


@scenario("11-retry-after")
def _(play: Play, lab: Lab) -> None:
    lab.running(payload=X).retry(1500, "RetryJobError: rate limited")
    play.snapshot()


@scenario("12-restarted")
def _(play: Play, lab: Lab) -> None:
    job = lab.running(payload=X)
    job.emit("The capital of")
    job.progress("0.5")
    job.retry(1000, "Error: provider is overloaded")
    play.at(1000)
    lab.one("job-a").emit("The capital of France is Paris")
    play.snapshot()


@scenario("13-retries-exhausted")
def _(play: Play, lab: Lab) -> None:
    job = lab.running(payload=X, max_attempts=2, key="req-1")
    job.emit("try 1")
    job.retry(1000, "Error: overloaded 1")
    play.at(1000)
    job = lab.one("job-a")
    job.emit("try 2")
    job.fail("Error: overloaded 2")
    play.watch()
    play.snapshot()


@scenario("14-cancelled-waiting")
def _(play: Play, lab: Lab) -> None:
    lab.enqueue(payload=X, key="req-1")
    play.at(10)
    play.cancelled("cancel job-a")
    play.cancelled("cancel job-a again")
    play.cancelled("cancel unknown", "unknown")
    play.watch()
    play.snapshot()


@scenario("15-cancelled-scheduled")
def _(play: Play, lab: Lab) -> None:
    lab.enqueue(payload=X, delay_ms=60_000)
    play.at(10)
    play.cancelled("cancel job-a")
    play.snapshot()


@scenario("16-cancel-requested-active")
def _(play: Play, lab: Lab) -> None:
    job = lab.running(payload=X, key="req-1")
    job.emit("tok")
    play.at(10)
    play.cancelled("cancel job-a")
    play.cancelled("cancel job-a again")
    play.snapshot()


@scenario("17-cancelled-active")
def _(play: Play, lab: Lab) -> None:
    job = lab.running(payload=X, key="req-1")
    job.emit("tok")
    play.at(10)
    lab.cancel()
    job.complete('"discarded"')
    play.watch()
    play.snapshot()


@scenario("18-cancelled-on-retry")
def _(play: Play, lab: Lab) -> None:
    job = lab.running(payload=X)
    lab.cancel()
    job.retry(1000, "Error: overloaded")
    play.snapshot()


@scenario("19-idempotent-live")
def _(play: Play, lab: Lab) -> None:
    play.api["first"] = _enqueued(lab.enqueue(payload=N1, key="req-1", key_ttl_ms=600_000, payload_hash="h1"))
    play.at(50)
    second = lab.enqueue_call(
        "job-b", payload='{"n":2}', priority=5, key="req-1", key_ttl_ms=600_000, payload_hash="h2", check_payload=False
    )
    play.api["second"] = _enqueued(lab.send(second))
    play.snapshot()


@scenario("20-idempotent-completed")
def _(play: Play, lab: Lab) -> None:
    lab.running(payload=N1, key="req-1", key_ttl_ms=600_000).complete("42")
    play.api["late duplicate"] = _enqueued(lab.enqueue("job-b", payload=N1, key="req-1", key_ttl_ms=600_000))
    play.snapshot()


@scenario("21-idempotent-capped")
def _(play: Play, lab: Lab) -> None:
    lab.running(payload=N1, key="req-1", key_ttl_ms=900_000).complete("42", ttl=100_000)
    play.snapshot()


@scenario("22-idempotency-freed")
def _(play: Play, lab: Lab) -> None:
    lab.running(payload=N1, key="req-1").fail(BAD)
    play.snapshot()
    play.at(10)
    play.api["enqueue again"] = _enqueued(lab.enqueue("job-b", payload=N1, key="req-1"))
    play.snapshot()


@scenario("23-id-live-refused")
def _(play: Play, lab: Lab) -> None:
    lab.enqueue(payload=N1)
    with pytest.raises(JobInUseError) as refused:
        lab.enqueue(payload='{"n":2}', key="req-1")
    play.api["reuse"] = f"{type(refused.value).__name__}: {refused.value}"
    play.snapshot()


@scenario("24-id-reused")
def _(play: Play, lab: Lab) -> None:
    job = lab.running(payload=N1, key="req-1")
    job.emit("old output")
    job.fail(BAD)
    play.at(10)
    play.api["reuse"] = _enqueued(lab.enqueue(payload='{"n":2}', key="req-2"))
    play.snapshot()


@scenario("25-retry-dead")
def _(play: Play, lab: Lab) -> None:
    job = lab.running(payload=N1, key="req-1", priority=4)
    job.emit("old output")
    job.progress("0.5")
    job.fail(BAD)
    play.at(10)
    play.api["retryDead job-a"] = lab.retry_dead(max_attempts=5)
    play.api["retryDead job-a again"] = lab.retry_dead(max_attempts=5)
    play.stats()
    play.snapshot()


@scenario("26-lease-expired")
def _(play: Play, lab: Lab) -> None:
    lab.enqueue("job-a", payload="1")
    lab.enqueue("job-b", payload="2")
    old = [lab.one("job-a", worker="w1"), lab.one("job-b", worker="w2")]
    old[1].emit("lost")
    lapse(play, lab)
    lab.one("job-a")
    play.snapshot()
    assert [job.complete('"too late"') for job in old] == ["lost", "lost"]
    play.snapshot()


def lapse(play: Play, lab: Lab) -> None:
    """The first look at a lapsed lease, without grace, so that the second finds what benni's only look found."""
    play.at(60_000)
    lab.reserve(0, worker="w3", grace=0)
    play.at(60_001)


@scenario("27-lease-expired-dead")
def _(play: Play, lab: Lab) -> None:
    lab.running(payload="1", max_attempts=1, key="req-1")
    lapse(play, lab)
    assert lab.take() == []
    play.snapshot()


@scenario("28-lease-expired-cancelled")
def _(play: Play, lab: Lab) -> None:
    lab.running(payload="1", key="req-1")
    lab.cancel()
    lapse(play, lab)
    assert lab.take() == []
    play.snapshot()


@scenario("29-bad-payload")
def _(play: Play, lab: Lab) -> None:
    # The text of a decode error is not part of the wire format.
    [state] = golden("29-bad-payload")["states"]
    lab.running(payload="{not json").fail(state["keys"]["{q}:job:job-a"]["fields"]["error"])
    play.snapshot()


@scenario("30-missing-record")
def _(play: Play, lab: Lab) -> None:
    lab.enqueue(payload=X)
    lab.raw("DEL", lab.keys.job("job-a"))
    assert lab.take() == []
    play.get("job-a")
    play.dead()
    play.snapshot()


# -- comparing -------------------------------------------------------------------------------------------------------


def golden(name: str) -> dict[str, Any]:
    file: dict[str, Any] = json.loads(GOLDEN[name].read_text(encoding="utf-8"))
    return file


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Nested values as one level of paths; lists by index."""
    if isinstance(value, dict) and value:
        return {k: v for name, item in value.items() for k, v in flat(item, f"{path}/{name}" if path else name).items()}
    if isinstance(value, list) and value:
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{path}/{i}").items()}
    return {path: value}


def theirs_of(file: dict[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {"api": file["api"]}
    for index, state in enumerate(file["states"]):
        keys = shown[f"state{index}"] = {}
        for name, key in state["keys"].items():
            if key["type"] == "zset":
                key["members"] = {item["member"]: item["score"] for item in key["members"]}
            if key["type"] == "stream":
                for entry in key["entries"]:
                    pairs = entry.pop("fields")
                    entry.update(zip(pairs[::2], pairs[1::2], strict=True))
                    entry["numbered by"] = "server"
            keys[name.removeprefix("{q}:")] = key
    return flat(shown)


def ours_of(play: Play) -> dict[str, Any]:
    """Our answers and states, normalised as the golden files are."""
    shown: dict[str, Any] = {"api": play.api}
    names: dict[str, str] = {}
    for index, state in enumerate(play.states):
        keys = shown[f"state{index}"] = {}
        for name, key in state.items():
            key = dict(key)
            if key["ttl_ms"] is not None:
                key["ttl_ms"] = -(-key["ttl_ms"] // 10_000) * 10_000
            if "token" in key.get("fields", ()):
                key["fields"] = {**key["fields"], "token": "<token>"}
            if key["type"] == "stream":
                gen = int(state[f"job:{name.removeprefix('events:')}"]["fields"]["gen"])
                last = (0, 0)
                entries = []
                for id, fields in key["entries"]:
                    at = tuple(map(int, id.split("-")))
                    holder = fields["t"] not in TERMINAL and at[0] >= gen and (at[0] > last[0] or at[1] == last[1] + 1)
                    last = at
                    names.setdefault(id, f"<sid-{len(names) + 1}>")
                    entries.append({"id": names[id], **fields, "numbered by": "holder" if holder else "server"})
                key["entries"] = entries
            keys[name] = key
    text = json.dumps(shown, ensure_ascii=False)
    for id, sid in names.items():
        text = text.replace(f'"{id}"', f'"{sid}"')
    found = dict.fromkeys(match[0] for match in UUID.finditer(text))
    for index, match in enumerate(found):
        text = text.replace(match, f"<uuid-{index + 1}>")
    return flat(json.loads(text))


def compare(name: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    number = name[:2]
    allowed = [entry for entry in DIFFERENCES if number in entry.where]
    needed = set()
    unknown = []
    for path in sorted({*theirs, *ours}):
        left, right = theirs.get(path, ABSENT), ours.get(path, ABSENT)
        if left == right:
            continue
        matching = [
            index
            for index, entry in enumerate(allowed)
            if fnmatchcase(path, entry.path) and entry.theirs in (left, ANY) and entry.ours in (right, ANY)
        ]
        needed.update(matching)
        if not matching:
            unknown.append(f"{path}: theirs {left!r}, ours {right!r}")
    assert not unknown, "differences that are not in the table:\n" + "\n".join(unknown)
    stale = [entry for index, entry in enumerate(allowed) if index not in needed]
    assert not stale, f"differences that scenario {number} does not have any more: {stale}"


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_state_is_reproduced(name: str, lab: Lab) -> None:
    play = Play(lab)
    SCENARIOS[name](play, lab)
    file = golden(name)
    assert len(play.states) == len(file["states"])
    assert file["t0"] == T0
    assert lab.now == file["states"][-1]["at"]
    compare(name, theirs_of(file), ours_of(play))


def test_all_thirty_states_are_here() -> None:
    assert [name[:2] for name in GOLDEN] == [f"{n:02}" for n in range(1, 31)]
    assert set(SCENARIOS) == set(GOLDEN)


def test_every_difference_has_a_reason_and_a_place() -> None:
    for entry in DIFFERENCES:
        assert entry.why
        assert entry.where <= {name[:2] for name in GOLDEN}, entry


def test_a_renewing_flush_moves_lease_and_updated_at_as_every_touch_of_benni_does(lab: Lab) -> None:
    play = Play(lab)
    stream(play, lab, renew=True)
    theirs, ours = theirs_of(golden("06-streaming")), ours_of(play)
    for path in ("state0/job:job-a/fields/updatedAt", "state0/leases/members/job-a"):
        assert theirs[path] == ours[path]


def test_the_comparison_notices_what_is_not_in_the_table(lab: Lab) -> None:
    play = Play(lab)
    SCENARIOS["05-active"](play, lab)
    theirs, ours = theirs_of(golden("05-active")), ours_of(play)
    with pytest.raises(AssertionError, match="not in the table"):
        compare("05-active", theirs, {**ours, "state0/job:job-a/fields/progress": "0.0"})
    del ours["state0/job:job-a/fields/gen"]
    with pytest.raises(AssertionError, match="any more"):
        compare("05-active", theirs, ours)


def test_holder_is_a_worker(lab: Lab) -> None:
    """What the scenarios above lean on: a Holder numbers its events as the server's record of them shows."""
    job: Holder = lab.running()
    job.emit("a", "b")
    assert [id for id, _ in lab.entries()] == [f"{job.job.b}-1", f"{job.job.b}-2"]
