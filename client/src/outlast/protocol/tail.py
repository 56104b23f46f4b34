"""Following one job: which call comes next, what its answer means, how long to wait. No I/O and no clock.

A driver is a loop of four lines::

    while not tail.done:
        for event in tail.feed(send(tail.poll())):
            yield event
        sleep(tail.delay)

The rules (PROTOCOL): the holder's events have ids ``b-n`` with n rising by one, so a jump in n is a `Gap`; an entry
whose b or attempt changed without a marker follows a restart that was trimmed; entries without `a` are a foreign
worker's, and only explicit markers count there. A terminal entry ends the tail; a record that has ended while the
stream shows no end gets the event made up. A cursor that lies above the whole stream is not of this stream: `Gap`,
then everything.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from ..errors import InvalidArgumentError, JobNotFoundError, ReplyShapeError
from ..events import Cancelled, Chunk, Completed, Data, Event, Failed, Gap, Progress, Restarted
from ..records import TERMINAL, JobStatus
from .calls import Call, status_of
from .wire import items, maybe_text, number, text

if TYPE_CHECKING:
    from ..queue import Queue
    from .keys import Keys

__all__ = ["PAGE", "START", "Entry", "Tail", "check_cursor", "read", "split", "streams"]

R = TypeVar("R")
T = TypeVar("T")

Entry = tuple[str, dict[str, str]]
"""One of a stream: its id and its fields."""

START = "0-0"
PAGE = 500
"""Entries read at once: some hundred kB at most, far under a gateway's limit for one reply."""

FAST, STEADY, SLOW = 0.15, 0.6, 2.0
"""Seconds between polls: after data, while quiet, and once nothing came for 10 s."""
QUIET_AFTER = 10.0
RESULT_POLLS = 4
"""The least number of polls within the life of a result, so that a reader never comes after it has expired."""
CHECK_EVERY = 5
"""One quiet poll in so many reads the record instead of the stream: it tells a quiet job from one that has vanished,
or whose end never reached the stream."""
REGION_LAG = 3.0
"""Seconds for which a lagging replica may not know a job yet."""

_CURSOR = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?")
_LIMIT = 2**64


def check_cursor(after: object) -> str:
    """A cursor as XREAD takes it: None, "" and "0" mean from the start, "latest" from now on."""
    if after is None or after == "" or after == "0":
        return START
    if after == "latest":
        return "latest"
    if isinstance(after, str) and _CURSOR.fullmatch(after):
        ms, _, seq = after.partition("-")
        if int(ms) < _LIMIT and int(seq or 0) < _LIMIT:
            return f"{int(ms)}-{int(seq or 0)}"
    raise InvalidArgumentError(
        f"after={str(after)[:60]!r} is not a cursor; give the id of an event, None for the start, or 'latest'"
    )


def split(cursor: str) -> tuple[int, int]:
    """A stream id in its two numbers."""
    ms, _, seq = cursor.partition("-")
    return int(ms), int(seq)


_RECORD = ("id", "status", "result", "error", "attempt", "finishedAt", "gen", "resultTtlMs")


class Tail(Generic[R]):
    """The state of one reader. `cursor` resumes it; `done` says that nothing will follow."""

    def __init__(
        self,
        keys: Keys,
        id: str,
        queue: Queue[Any, R],
        *,
        after: str | None = None,
        poll: float | None = None,
        limit: int = PAGE,
        read_regions: bool = False,
        record_first: bool = False,
        blocking: bool = False,
    ) -> None:
        """`record_first` is for who only wants the end: polls read the record alone, whatever the output does; with
        `blocking` they wait on the stream instead, past everything that the present attempt will write.
        """
        self.id = id
        self.key = keys.events(id)
        """Of the stream."""
        self.done = False
        self.delay = 0.0
        """Seconds to wait before the next poll."""
        self.seen: tuple[JobStatus, int] | None = None
        """Status and attempt that the record had when a quiet tail last looked at it."""
        self.far = True
        """Whether there may be a page or more between the cursor and the stream's end."""
        self._keys = keys
        self._queue = queue
        self._fixed = poll
        self._limit = self.count = limit
        self._read_regions = read_regions
        self._wait_only = record_first
        self._waits_on_stream = blocking
        cursor = check_cursor(after)
        self.cursor = START if cursor == "latest" else cursor
        self._resumed = cursor not in (START, "latest")
        self._seeking = cursor == "latest"
        self._last: tuple[int, int] | None = split(cursor) if self._resumed else None
        self._attempt = 0
        self._loose = False  # what comes next need not join on to anything
        self._blocked = False
        self._step: Literal["seek", "read", "check", "top"] = (
            "check" if record_first else "seek" if self._seeking else "read"
        )
        self._record: list[Any] | None = None
        self._known = False
        self._quiet = 0.0
        self._empty = 0
        self._pace = FAST
        self._slowest = queue.result_ttl_ms / RESULT_POLLS / 1000

    def poll(self, block: float | None = None) -> Call[Any]:
        """The next call. `block`: seconds that a read may wait on the server, where the transport can block."""
        if self._step in ("seek", "top"):
            return Call(("XREVRANGE", self.key, "+", "-", "COUNT", "1"), _entries)
        if self._step == "check":
            return Call(("HMGET", self._keys.job(self.id), *_RECORD), _row)
        self._blocked = block is not None and self.blocks
        return read({self.key: self.cursor}, self.count, block if self._blocked else None, _first_stream)

    @property
    def blocks(self) -> bool:
        """Whether the next poll may wait, on the server or for others: a read, of a job that is known to be there."""
        return self._step == "read" and self._known

    def ride(self, block: float | None) -> None:
        """Instead of `poll`, where `blocks`: the answer comes from a read of many streams, which may take `block`."""
        self._blocked = block is not None

    def shrink(self) -> bool:
        """Read fewer entries at once: a page was too much for the server or the link. False: it was one already."""
        self.count, before = max(1, self.count // 4), self.count
        return self.count < before

    def feed(self, reply: Any) -> list[Event[R]]:
        """What the answer of the last `poll` means."""
        self.delay = 0.0
        match self._step:
            case "seek":
                return self._seek(reply)
            case "check":
                return self._check(reply)
            case "top":
                return self._top(reply)
            case "read":
                return self._read(reply)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _seek(self, entries: list[Entry]) -> list[Event[R]]:
        self._step = "read"
        self.far = False
        if entries:
            id, fields = entries[0]
            if fields.get("t") in TERMINAL:
                self._loose = True
                return self._event(id, fields)
            self.cursor = id
            self._last = split(id)
            self._attempt = number(fields.get("a"))
            if self._wait_only:
                self._skip()
        return []

    def _read(self, entries: list[Entry]) -> list[Event[R]]:
        self._step = "read"
        self.far = len(entries) >= self.count
        if not entries:
            self._wait()
            return []
        self._resumed = False
        self._known, self._empty, self._quiet, self._pace = True, 0, 0.0, FAST
        out: list[Event[R]] = []
        for id, fields in entries:
            try:
                out += self._event(id, fields)
            except ReplyShapeError:
                # A result that cannot be read must not take along the output before it: the next poll meets it again.
                if out:
                    return out
                raise
            if self.done:
                return out
        if not self.far:
            self.delay = self._pause()
        self.count = min(self._limit, self.count * 2)
        return out

    def _skip(self) -> None:
        """Past every id with this time: the holder's own events share one, the terminal event has its own."""
        self.cursor = f"{split(self.cursor)[0]}-{_LIMIT - 1}"

    def _check(self, row: list[Any]) -> list[Event[R]]:
        if row[0] is None:
            if self._read_regions and self._quiet < REGION_LAG:
                self.delay = self._pause()
                return []
            raise JobNotFoundError(f"no job {self.id!r} in queue {self._keys.name!r}: unknown, or expired", self.id)
        status = status_of(row[1])
        self.seen = status, number(row[4])
        self._record = row if status in TERMINAL else None
        if self._record:
            if self._wait_only:
                return self._conclude()
            # The job may have ended between the empty read and this answer: look again before making the end up.
            self._step = "top"
            return []
        self._known = True
        if row[7] is not None:
            self._slowest = max(1, number(row[7])) / RESULT_POLLS / 1000
        if self._wait_only:
            if self._waits_on_stream:
                self._step, self._seeking = "read" if self._seeking else "seek", True
            else:
                self.delay = self._pause()
            return []
        self._step = "top" if self._resumed and not self._read_regions else "read"
        if self._step == "read":
            self.delay = self._pause()
        return []

    def _top(self, entries: list[Entry]) -> list[Event[R]]:
        """What a reader that found nothing new makes of the last entry: all is read, or its cursor is not of here."""
        self._step = "read"
        resumed, self._resumed = self._resumed and not self._read_regions, False
        last, fields = entries[0] if entries else (START, {})
        at = split(self.cursor)
        if split(last) > at:
            self.far = True
            return []  # written in the meantime: read on at once
        if not resumed or (split(last) == at and fields.get("t") not in TERMINAL):
            if self._record:
                return self._conclude()
            self.delay = self._pause()
            return []
        ended, gen = map(number, self._record[5:7]) if self._record else (0, 0)
        # The end has a time of its own, unless the job was over within the millisecond that it was made in.
        if split(last) == at or at[0] == ended != gen or (self._record and at == self._made_up(split(last))):
            self.done = True  # the caller has had the end, or the one that was made up
            return []
        if self._record and not entries:
            return self._conclude()  # the output has expired; there is nothing to start over with
        gap = Gap(START, max(self._attempt, 1), last)
        self.cursor, self._last, self._loose, self.far = START, None, True, True
        return [gap]

    def _conclude(self) -> list[Event[R]]:
        assert self._record is not None
        _, status, result, error, attempt, finished, *_ = self._record
        fields = {"t": status_of(status), "a": str(number(attempt))}
        fields["d"] = (maybe_text(result) or "null") if fields["t"] == "completed" else (maybe_text(error) or "")
        ended = (number(finished), 0) if self._wait_only else self._made_up(split(self.cursor))
        return self._event(f"{ended[0]}-{ended[1]}", fields)

    def _made_up(self, last: tuple[int, int]) -> tuple[int, int]:
        """The id of an end that is not in the stream, for who has read as far as `last`."""
        assert self._record is not None
        ended = number(self._record[5]), 0
        return ended if ended > last else (last[0], last[1] + 1)

    # -- entries ---------------------------------------------------------------------------------------------------

    def _event(self, id: str, fields: dict[str, str]) -> list[Event[R]]:
        kind, body = fields.get("t", ""), fields.get("d", "")
        ours = "a" in fields
        attempt = number(fields.get("a")) if ours else max(self._attempt, 1)
        out: list[Event[R]] = []
        at = split(id)
        if kind == "restarted":
            attempt = number(body) or attempt
        event = self._typed(id, kind, body, attempt)
        if kind in TERMINAL:
            self.done = True
            count = number(fields.get("n"))
            if not self._loose and count > (self._last[1] if self._last else 0):
                out.append(Gap(self.cursor, attempt, id))
        elif ours and kind != "restarted" and not self._loose:
            known, next_n = self._last, 1
            if known and known[0] == at[0]:
                next_n = known[1] + 1
            elif known:
                next_n = 2  # the first of a new b would have been the marker
            if known and (known[0] != at[0] or (at[1] == next_n and self._attempt not in (0, attempt))):
                out.append(Restarted(self.cursor, attempt))
            if at[1] > next_n:
                out.append(Gap(self.cursor, attempt, id))
        if kind not in TERMINAL:
            self._last = at
            self._attempt = attempt
            self._loose = False
        self.cursor = id
        if event is not None:
            out.append(event)
        return out

    def _typed(self, id: str, kind: str, body: str, attempt: int) -> Event[R] | None:
        match kind:
            case "chunk":
                return Chunk(id, attempt, body)
            case "data":
                try:
                    return Data(id, attempt, json.loads(body))
                except (ValueError, RecursionError):
                    return None
            case "progress":
                try:
                    return Progress(id, attempt, float(body))
                except ValueError:
                    return None
            case "restarted":
                return Restarted(id, attempt)
            case "completed":
                return Completed(id, attempt, self._queue.decode_result(body))
            case "failed":
                return Failed(id, attempt, body)
            case "cancelled":
                return Cancelled(id, attempt)
            case _:
                return None  # a later version's or a foreign writer's kind

    # -- pace ------------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        self._empty += 1
        first = self._empty == 1 and not self._known  # an unknown id is told at once
        if first or self._blocked or self._empty % CHECK_EVERY == 0:
            self._step = "check"
        if not first and not self._blocked:
            self.delay = self._pause()

    def _pause(self) -> float:
        if self._fixed is not None:
            pause = self._fixed
        else:
            pause = min(self._pace, self._slowest)
            top = SLOW if self._quiet >= QUIET_AFTER else STEADY
            self._pace = min(top, self._slowest, self._pace * 1.5)
            # Readers that started together must not poll together for ever.
            pause *= random.uniform(1.0, 1.2)
        self._quiet += pause
        return pause


def _entries(reply: Any) -> list[Entry]:
    out: list[Entry] = []
    for entry in items(reply):
        match items(entry):
            case [id, fields]:
                flat = [text(item) for item in items(fields)]
                out.append((text(id), dict(zip(flat[::2], flat[1::2], strict=True))))
            case _:
                raise ReplyShapeError("expected [id, fields] in a stream's reply")
    return out


def _row(reply: Any) -> list[Any]:
    row = items(reply)
    if len(row) != len(_RECORD):
        raise ReplyShapeError("the record's reply has another length than asked for")
    return row


def _first_stream(reply: Any) -> list[Entry]:
    found = streams(reply)
    if len(found) > 1:
        raise ReplyShapeError("expected one stream in the reply")
    nothing: list[Entry] = []
    return next(iter(found.values()), nothing)


def streams(reply: Any) -> dict[str, list[Entry]]:
    """What an XREAD found: the entries of each stream that has any behind its cursor."""
    found: dict[str, list[Entry]] = {}
    for stream in [] if reply is None else items(reply):
        match items(stream):
            case [key, entries]:
                found[text(key)] = _entries(entries)
            case _:
                raise ReplyShapeError("expected [key, entries] in a stream's reply")
    return found


def read(cursors: Mapping[str, str], count: int, block: float | None, decode: Callable[[Any], T]) -> Call[T]:
    """Of each of the streams at most `count` entries behind its cursor; with `block` seconds to wait for the first."""
    wait = () if block is None else ("BLOCK", str(max(1, int(block * 1000))))
    return Call(("XREAD", "COUNT", str(count), *wait, "STREAMS", *cursors, *cursors.values()), decode)
