"""What the pages read: plans of few commands, whatever the queues hold.

====================  =====================================================================================
overview              1 and 9 for each of at most 6 queues: 55
a queue               25 for the counts and the oldest, 4 for rules, workers, clock and counter; 16 for its jobs
                      and 11 for those that run (or 21 for those that run alone): 56
another page of jobs  16, and 23 where a million jobs share a moment
a job                 10
usage                 15 in place of a queue's jobs: 55
====================  =====================================================================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from outlast import Rules, Stats, rules
from outlast.job import JobInfo
from outlast.listing import JobState, index, page
from outlast.protocol import Call, Keys, calls
from outlast.protocol.calls import CLOCK, LIVE, Plan
from outlast.protocol.wire import items, maybe_text, number, text

__all__ = ["OVERVIEW", "History", "find", "job", "job_json", "jobs", "overview", "queue"]

OVERVIEW = 6
"""Queues on a page."""
LISTED = 15
RUNNING = 10
"""Running jobs that are shown beside another list."""
RUNNING_ALONE = 20
STATES: tuple[JobState, ...] = ("waiting", "active", "scheduled", "dead")
SAMPLES = 240
DAYS = 14


class Sample(NamedTuple):
    """A queue at one moment, by the server's clock. `seq` counts the jobs that have become ready so far."""

    at: int
    waiting: int
    active: int
    scheduled: int
    dead: int
    seq: int


class History:
    """What this process has seen of each queue when somebody looked: for the plots, and for rates between two looks."""

    def __init__(self) -> None:
        self._of: dict[str, deque[Sample]] = {}

    def add(self, queue: str, sample: Sample) -> None:
        seen = self._of.setdefault(queue, deque(maxlen=SAMPLES))
        if seen and sample.seq < seen[-1].seq:
            seen.clear()  # another database, or an emptied one
        if not seen or sample.at >= seen[-1].at + 1000:
            seen.append(sample)

    def json(self, queue: str, last: int) -> dict[str, Any]:
        seen = list(self._of.get(queue, ()))[-last:]
        return {"samples": seen, "rates": _rates(seen)}


def _rates(seen: Sequence[Sample]) -> dict[str, float] | None:
    """Per minute, over the last minute or the two latest looks."""
    if len(seen) < 2:
        return None
    new = seen[-1]
    old = next((sample for sample in seen if sample.at >= new.at - 60_000 and sample is not new), seen[-2])
    minutes = (new.at - old.at) / 60_000
    arrived = new.seq - old.seq
    started = arrived - (new.waiting - old.waiting)
    ended = started - (new.active - old.active)
    rates = {"arrived": arrived, "started": started, "ended": ended, "died": new.dead - old.dead}
    return {name: round(max(0, count) / minutes, 1) for name, count in rates.items()}


def _seq(keys: Keys) -> Call[int]:
    return Call(("GET", keys.seq), number)


def overview(every: dict[str, Keys], history: History) -> Plan[list[dict[str, Any]]]:
    """Each queue in numbers. `next_waits`: ms for which the job that runs next has been ready."""
    sent: list[Call[Any]] = [CLOCK]
    for keys in every.values():
        sent += [Call(("ZCARD", index(keys, state)), number) for state in STATES]
        sent += [_seq(keys), rules.read(keys), calls.workers(keys), Call(("ZRANGE", keys.ready, "0", "0"), items)]
    now, *answers = yield sent
    rows = [answers[at : at + 8] for at in range(0, len(answers), 8)]
    heads = [(keys, text(row[7][0])) for keys, row in zip(every.values(), rows, strict=True) if row[7]]
    since: list[int] = []
    if heads:
        since = yield [
            Call(("HMGET", keys.job(id), "updatedAt"), lambda reply: number(items(reply)[0])) for keys, id in heads
        ]
    waits = {keys.name: max(0, now - ms) for (keys, _), ms in zip(heads, since, strict=True) if ms > 0}
    found: list[dict[str, Any]] = []
    for (name, keys), (waiting, active, scheduled, dead, seq, rule, said, _) in zip(every.items(), rows, strict=True):
        history.add(name, Sample(now, waiting, active, scheduled, dead, seq))
        found.append(
            {
                "queue": name,
                "waiting": waiting,
                "active": active,
                "scheduled": scheduled,
                "dead": dead,
                "next_waits": waits.get(keys.name),
                **_rules(rule, now),
                "workers": len(workers := _workers(said, now)),
                "slots": sum(worker["concurrency"] for worker in workers),
                **history.json(name, 60),
            }
        )
    return found


def queue(name: str, keys: Keys, state: JobState | None, reverse: bool, history: History) -> Plan[dict[str, Any]]:
    """All of one queue: counts, rules, workers, what runs, and the first jobs of a state, or for None usage."""
    counts: Stats = yield from calls.stats(keys)
    now, seq, rule, said = yield [CLOCK, _seq(keys), rules.read(keys), calls.workers(keys)]
    history.add(name, Sample(now, counts.waiting, counts.active, counts.scheduled, counts.dead, seq))
    if state is None:
        listed: dict[str, Any] = {"days": (yield from calls.usage(keys, DAYS))}
    else:
        listed = yield from jobs(keys, state, reverse, None, RUNNING_ALONE if state == "active" else LISTED)
    running = listed if state == "active" else (yield from jobs(keys, "active", False, None, RUNNING))
    return {
        "queue": name,
        "now": now,
        "waiting": counts.waiting,
        "active": counts.active,
        "scheduled": counts.scheduled,
        "dead": counts.dead,
        "oldest_waits": None if counts.oldest_waiting is None else round(counts.oldest_waiting * 1000),
        **_rules(rule, now),
        "workers": _workers(said, now),
        "running": running["jobs"],
        **history.json(name, SAMPLES),
        **listed,
    }


def jobs(keys: Keys, state: JobState, reverse: bool, cursor: str | None, limit: int = LISTED) -> Plan[dict[str, Any]]:
    found = yield from page(keys, state, limit, cursor=cursor, reverse=reverse)
    listed = [{**job_json(one), "due_at": _at(one.due_at), "worker": one.worker} for one in found.jobs]
    return {"state": state, "reverse": reverse, "jobs": listed, "next": found.next}


def job(name: str, keys: Keys, id: str, payloads: bool) -> Plan[dict[str, Any] | None]:
    """All of one job, None if there is none. Without `payloads` neither they nor steps' values are asked for."""
    fields = ("token", "gen", "timeoutMs", "deadlineAt", "owner", *(("payload", "result") if payloads else ()))
    info = Call(("HMGET", keys.job(id), *calls.INFO), items)
    kept = Call(("HGETALL", keys.steps(id)), items) if payloads else Call(("HKEYS", keys.steps(id)), items)
    row, more, step, gen, due, lease, rank, length, said, now = yield [
        info,
        Call(("HMGET", keys.job(id), *fields), items),
        kept,
        Call(("HMGET", keys.steps(id), "gen"), items),
        Call(("ZSCORE", keys.scheduled, id), _score),
        Call(("ZSCORE", keys.leases, id), _score),
        Call(("ZRANK", keys.ready, id), lambda reply: None if reply is None else number(reply)),
        Call(("XLEN", keys.events(id)), number),
        calls.workers(keys),
        CLOCK,
    ]
    r: dict[str, Any] = dict(zip(calls.INFO, row, strict=True))
    if r["id"] is None:
        return None
    stored: dict[str, Any] = dict(zip(fields, more, strict=True))
    told = JobInfo(**calls.told(id, r))
    names = [text(part) for part in step]
    steps = dict(zip(names[::2], names[1::2], strict=True)) if payloads else dict.fromkeys(names)
    # Those of an earlier life of the id are dropped when its next one keeps some.
    current = maybe_text(gen[0]) in (None, maybe_text(stored["gen"]))
    holder, _, request = (maybe_text(stored["token"]) or "").rpartition(":")
    active = told.status == "active"
    found = {
        **job_json(told),
        "queue": name,
        "now": now,
        "ahead": rank,
        "due_at": due,
        "lease_until": lease if active else None,
        "timeout": number(stored["timeoutMs"]) or None,
        "deadline_at": number(stored["deadlineAt"]) or None,
        "worker": holder if active and request.isdecimal() else None,
        "workers": _workers(said, now) if active else [],
        "events": length,
        "steps": [
            {"name": key.removeprefix("s:"), **({} if value is None else {"value": value[:20_000]})}
            for key, value in steps.items()
            if key != "gen" and current
        ],
    }
    if payloads:
        found["payload"] = maybe_text(stored["payload"])
        found["result"] = maybe_text(stored["result"]) if told.status == "completed" else None
    return found


def find(every: dict[str, Keys], id: str) -> Plan[list[dict[str, Any]]]:
    """The queues that have a job of this id."""
    rows = yield [Call(("HMGET", keys.job(id), "id", "status"), items) for keys in every.values()]
    return [
        {"queue": name, "status": calls.status_of(row[1])}
        for name, row in zip(every, rows, strict=True)
        if row[0] is not None
    ]


def job_json(job: JobInfo) -> dict[str, Any]:
    return {
        "id": job.id,
        "status": job.status,
        "error": job.error,
        "attempt": job.attempt,
        "starts": job.starts,
        "max_attempts": job.max_attempts,
        "progress": job.progress,
        "priority": job.priority,
        "created_at": _at(job.created_at),
        "started_at": _at(job.started_at),
        "updated_at": _at(job.updated_at),
        "finished_at": _at(job.finished_at),
        "cancel_requested": job.cancel_requested,
        "owner": job.owner,
        "usage": job.usage,
    }


def _at(moment: Any) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)


def _score(reply: Any) -> int | None:
    return None if reply is None else number(reply)


def _rules(rule: Rules, now: int) -> dict[str, Any]:
    until = _at(rule.paused_until)
    return {
        "paused": rule.paused or (until is not None and until > now),
        "paused_until": None if rule.paused else until,
        "rules": str(rule).removesuffix("paused").rstrip(", ").replace("no rules", ""),
        "rate": rule.rate,
        "limit": rule.concurrency,
    }


def _workers(said: dict[str, str], now: int) -> list[dict[str, Any]]:
    """The workers that gave a sign of life lately. Those of other implementations say nothing that is known here."""
    found: list[dict[str, Any]] = []
    for id, told in calls.heard(said, now).items():
        if told["seen"] <= LIVE:
            with suppress(ValueError, TypeError, KeyError):
                numbers = {"concurrency": int(told["concurrency"]), "active": int(told["active"])}
                words = {key: str(told.get(key) or "") for key in ("name", "host", "pid", "state", "version")}
                found.append({"id": id, "seen": told["seen"], **numbers, **words})
    return sorted(found, key=lambda worker: (worker["host"], worker["pid"]))
