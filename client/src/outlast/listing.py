"""Jobs by state, a page at a time.

The wire format has an index of four states: waiting (`ready`), scheduled, active (`leases`) and dead. Completed and
cancelled jobs are in none: they only have their records, which expire.

A page goes on behind a score and an id, not behind a rank: jobs that are taken or added meanwhile move no other out of
sight. Members of one score stand in the order of their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from typing import Any, Literal, cast, get_args

from .errors import InvalidArgumentError
from .job import JobInfo
from .protocol import Call, Keys, calls
from .protocol.calls import INFO, Plan, status_of, told
from .protocol.keys import BATCH
from .protocol.wire import items, maybe_text, number, text, when

__all__ = ["MAX_PAGE", "JobPage", "JobState", "ListedJob", "check_state", "page", "purge"]

JobState = Literal["waiting", "scheduled", "active", "dead"]
"""Where jobs are listed. "dead" are those that failed for good."""

MAX_PAGE = 100

_STATUSES: dict[JobState, frozenset[str]] = {
    # A job whose owner has a cap waits among the scheduled ones until its turn comes.
    "waiting": frozenset({"waiting", "scheduled"}),
    "scheduled": frozenset({"waiting", "scheduled"}),
    "active": frozenset({"active"}),
    "dead": frozenset({"failed"}),
}

Entry = tuple[float, str]
"""A score and an id."""


@dataclass(frozen=True, repr=False)
class ListedJob(JobInfo):
    """A job in a listing. Its payload and result are not read: `get` has them."""

    due_at: datetime | None
    """When a scheduled job becomes ready, else None."""
    worker: str | None
    """The id of the worker that runs an active job; None if it is of another implementation."""


@dataclass(frozen=True, slots=True)
class JobPage:
    """Jobs of one state. `next`: the cursor of the page behind; None: there is none."""

    jobs: list[ListedJob]
    next: str | None


def check_state(value: object) -> JobState:
    if value in ("completed", "cancelled"):
        raise InvalidArgumentError(
            f"state={value!r}: the database keeps no list of jobs that completed or were cancelled; get one by its id"
        )
    if value not in get_args(JobState):
        raise InvalidArgumentError(f"state={value!r} is none of {', '.join(get_args(JobState))}")
    return cast("JobState", value)


def index(keys: Keys, state: JobState) -> str:
    return {"waiting": keys.ready, "scheduled": keys.scheduled, "active": keys.leases, "dead": keys.dead}[state]


def page(keys: Keys, state: JobState, limit: int, *, cursor: str | None, reverse: bool) -> Plan[JobPage]:
    entries, following = yield from ids(index(keys, state), limit, cursor=cursor, reverse=reverse)
    fields: tuple[str, ...] = (*INFO, "token")
    rows: list[list[Any]] = []
    if entries:
        rows = yield [Call(("HMGET", keys.job(id), *fields), items) for _, id in entries]
    found: list[ListedJob] = []
    for (score, id), row in zip(entries, rows, strict=True):
        r: dict[str, Any] = dict(zip(fields, row, strict=True))
        # An entry without a record was evicted, or its record has expired; another status: it has just moved on.
        if r["id"] is not None and status_of(r["status"]) in _STATUSES[state]:
            worker, _, request = (maybe_text(r["token"]) or "").rpartition(":")
            found.append(
                ListedJob(
                    **told(id, r),
                    due_at=when(score) if state == "scheduled" else None,
                    worker=worker if state == "active" and request.isdecimal() else None,
                )
            )
    return JobPage(found, following)


def purge(keys: Keys, state: JobState, *, older_ms: int, result_ttl_ms: int) -> Plan[int]:
    """Forget the dead, or cancel those that have not started: as of now, a hundred a round trip."""
    [now] = yield [calls.CLOCK]
    before: int = now - older_ms
    total = 0
    if state == "dead":
        while True:
            [gone] = yield [calls.purge_dead(keys, before)]
            total += cast("int", gone)
            if gone < BATCH:
                return total
    cursor: str | None = None
    while True:
        entries, cursor = yield from ids(index(keys, state), BATCH, cursor=cursor)
        if entries:
            answers = yield [calls.cancel(keys, id, result_ttl_ms=result_ttl_ms, before_ms=before) for _, id in entries]
            total += sum(answer == "cancelled" for answer in answers)
        if cursor is None:
            return total


def ids(key: str, limit: int, *, cursor: str | None, reverse: bool = False) -> Plan[tuple[list[Entry], str | None]]:
    """At most `limit` entries of an index behind the cursor, and the cursor behind those."""
    at = None if cursor is None else _parse(cursor)
    by_score, by_rank, low, high = (
        ("ZREVRANGEBYSCORE", "ZREVRANGE", "+inf", "-inf") if reverse else ("ZRANGEBYSCORE", "ZRANGE", "-inf", "+inf")
    )

    def behind(entry: Entry) -> bool:
        if at is None:
            return True
        one, other = (entry[0], entry[1].encode()), (at[0], at[1].encode())
        return one < other if reverse else one > other

    start = low if at is None else _score(at[0])
    # Two more than wanted: the entry of the cursor itself, and one that tells whether there is a next page.
    ask = str(limit + 2)
    found: list[Entry]
    [found] = yield [Call((by_score, key, start, high, "WITHSCORES", "LIMIT", "0", ask), _entries)]
    fresh = [entry for entry in found if behind(entry)]
    if at is not None and len(found) == limit + 2 and len(fresh) <= limit:
        # Very many have the cursor's score. The first one behind it is found by halving.
        before, same = yield [
            Call(("ZCOUNT", key, *((f"({start}", low) if reverse else (low, f"({start}"))), number),
            Call(("ZCOUNT", key, start, start), number),
        ]
        end = before + same
        while before < end:
            middle = (before + end) // 2
            [one] = yield [Call((by_rank, key, str(middle), str(middle)), items)]
            if one and not behind((at[0], text(one[0]))):
                before = middle + 1
            else:
                end = middle
        [found] = yield [Call((by_rank, key, str(before), str(before + limit), "WITHSCORES"), _entries)]
        fresh = [entry for entry in found if behind(entry)]
    entries = fresh[:limit]
    return entries, f"{_score(entries[-1][0])}:{entries[-1][1]}" if len(fresh) > limit else None


def _entries(reply: Any) -> list[Entry]:
    rows = items(reply)
    if rows and isinstance(rows[0], (list, tuple)):  # as upstash_redis gives them
        pairs = [items(row) for row in rows]
    else:
        pairs = [rows[at : at + 2] for at in range(0, len(rows), 2)]
    return [(float(score), text(id)) for id, score in pairs]


def _score(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)


def _parse(cursor: object) -> Entry:
    if isinstance(cursor, str):
        score, colon, id = cursor.partition(":")
        try:
            if colon and id and isfinite(float(score)):
                return float(score), id
        except ValueError:
            pass
    raise InvalidArgumentError("cursor is not one that a page gave as its `next`; leave it out to start over")
