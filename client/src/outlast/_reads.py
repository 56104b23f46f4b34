"""Many watches, one read: whoever waits for a stream waits on one command that names them all.

A `Tail` that has read all there is leaves its cursor on a board. One read at a time goes out for everybody on it: over
TCP it waits on the server (XREAD BLOCK, one connection), over HTTP it goes out as soon as the first of them is due,
and takes the others along. What it brings is given to all whose cursors lie before it.

Cursors are absolute, so joining needs no hand-over: a tail reads from its own cursor by itself until nothing is left
there, and then stands on the board with that cursor. What the board has read of a stream lately is kept for those who
are between two reads; whoever is further back reads by itself again. So a slow reader holds nothing up and costs no
memory, however far behind it is.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections.abc import Collection, Iterable
from copy import copy
from typing import TYPE_CHECKING, Any

from .errors import OutlastError, ServerError
from .protocol.tail import PAGE, Entry, Tail, read, split, streams

if TYPE_CHECKING:
    from .protocol import Call
    from .transport import Transport

__all__ = ["BLOCK", "LINGER", "SLACK", "Board", "Reads", "ReadsBase", "Waiter"]

Found = dict[str, list[Entry]]
"""What a read brings: of each stream that has any, the entries behind the cursor asked for."""

BLOCK = 10.0
"""Seconds that the read waits on the server."""
LINGER = 1.0
"""Seconds for which a stream is still read after the last reader took something: most come back for more."""
KEPT, KEPT_BYTES = 64, 65_536
"""Of each stream so many entries are kept for those between two reads, and no more than so many bytes of them."""
TURN = 5_000
"""Entries that one read may bring at most; many streams share them."""
JOIN = 0.5
"""Seconds that the read of a new stream lasts beside the one under way. Then one is enough for both."""
SLACK = 0.25
"""Of a reader's pause: so much earlier than it wanted to it is taken along by another's request, and has then asked."""


class Waiter:
    """A tail on the board. Over HTTP `due` is when it wants to be asked for, and `slack` how much sooner will do."""

    __slots__ = ("answer", "count", "cursor", "due", "slack", "stream")

    def __init__(self, tail: Tail[Any], due: float = 0.0, slack: float = 0.0) -> None:
        self.cursor, self.count = tail.cursor, tail.count
        self.due, self.slack = due, slack
        self.answer: list[Entry] | OutlastError | None = None
        self.stream: _Stream

    def give(self, answer: list[Entry] | OutlastError) -> None:
        self.answer = answer


class _Stream:
    """What is known of one stream: all entries behind `floor` as far as `last`, the end of what was read."""

    __slots__ = ("entries", "floor", "idle_since", "ids", "last", "new", "size", "text", "waiting")

    def __init__(self, cursor: str) -> None:
        self.waiting: set[Waiter] = set()
        self.new = True
        self.idle_since = 0.0
        self.start(cursor)

    def start(self, cursor: str) -> None:
        self.text = cursor
        self.floor = self.last = split(cursor)
        self.entries: list[Entry] = []
        self.ids: list[tuple[int, int]] = []
        self.size = 0

    def after(self, cursor: str, count: int) -> list[Entry] | None:
        """What is kept behind the cursor. None: it lies before that."""
        if cursor == self.text:
            return []
        at = split(cursor)
        if at < self.floor:
            return None
        return self.entries[bisect_right(self.ids, at) :][:count] if at < self.last else []

    def add(self, entries: list[Entry], now: float) -> None:
        """Keep and hand out what was read behind `last`."""
        before = self.text
        self.entries += entries
        self.ids += [split(id) for id, _ in entries]
        self.size += sum(map(_size, entries))
        self.text, self.last = entries[-1][0], self.ids[-1]
        waiting, self.waiting = self.waiting, set[Waiter]()
        for waiter in waiting:
            if waiter.cursor == before and len(entries) <= waiter.count:
                waiter.give(entries)
            elif found := self.after(waiter.cursor, waiter.count):
                waiter.give(found)
            else:
                self.waiting.add(waiter)
        if not self.waiting:
            self.idle_since = now
        surplus = max(0, len(self.entries) - KEPT)
        while self.size > KEPT_BYTES and surplus < len(self.entries):
            self.size -= _size(self.entries[surplus])
            surplus += 1
        if surplus:
            self.floor = self.ids[surplus - 1]
            del self.entries[:surplus], self.ids[:surplus]
            self.size = sum(map(_size, self.entries))


def _size(entry: Entry) -> int:
    return 100 + len(entry[1].get("d", ""))


class Board:
    """Streams that one command may name: all that are watched, or in a cluster those of one queue."""

    def __init__(self) -> None:
        self.streams: dict[str, _Stream] = {}
        self.most = PAGE

    def kept(self, tail: Tail[Any]) -> list[Entry] | None:
        """What a tail need not ask for. None: it must ask."""
        stream = self.streams.get(tail.key)
        return None if stream is None else stream.after(tail.cursor, tail.count)

    def alone(self, tail: Tail[Any]) -> bool:
        """Whether a tail of which nothing is kept reads by itself before it waits."""
        stream = self.streams.get(tail.key)
        return tail.far if stream is None else stream.after(tail.cursor, 1) is None

    def join(self, tail: Tail[Any], waiter: Waiter) -> bool:
        """Wait from now on. True: the read under way does not cover it."""
        stream = self.streams.get(tail.key)
        new = stream is None
        if stream is None:
            stream = self.streams[tail.key] = _Stream(tail.cursor)
        elif tail.cursor != stream.text and split(tail.cursor) < stream.floor:
            stream.start(tail.cursor)
            new = True
        waiter.stream = stream
        stream.waiting.add(waiter)
        return new

    def leave(self, waiter: Waiter, now: float) -> None:
        stream = waiter.stream
        if waiter in stream.waiting:
            stream.waiting.discard(waiter)
            if not stream.waiting:
                stream.idle_since = now

    @property
    def waiters(self) -> Iterable[Waiter]:
        return (waiter for stream in self.streams.values() for waiter in stream.waiting)

    @property
    def waited_for(self) -> bool:
        return any(stream.waiting for stream in self.streams.values())

    def prune(self, now: float) -> bool:
        """Forget the streams that nobody has waited for lately. False: there are no others."""
        for key in [key for key, s in self.streams.items() if not s.waiting and now - s.idle_since > LINGER]:
            del self.streams[key]
        return bool(self.streams)

    def question(self, block: float | None, keys: Collection[str]) -> tuple[Call[Found], dict[str, str]]:
        """The read for these streams, and the cursors that it asks behind."""
        asked = {key: self.streams[key].text for key in keys}
        return read(asked, max(1, min(self.most, TURN // len(asked))), block, streams), asked

    def heard(self, asked: dict[str, str], found: Found, now: float) -> None:
        self.most = min(PAGE, self.most * 2)
        for key, entries in found.items():
            stream = self.streams.get(key)
            # Somebody further back may have joined meanwhile; his part is in the next answer.
            if entries and stream is not None and stream.text == asked[key]:
                stream.add(entries, now)

    def empty(self, asked: dict[str, str], now: float) -> None:
        """Nothing was found: the answer for all whose time has come."""
        for key in asked:
            stream = self.streams.get(key)
            for waiter in list(stream.waiting) if stream is not None else ():
                if waiter.due - waiter.slack <= now:
                    waiter.give([])
                    self.leave(waiter, now)

    def refused(self, asked: dict[str, str], error: OutlastError) -> bool:
        """What an error means. True: the streams are to be asked for one by one, to see whose it is."""
        too_much = "max request size exceeded" in str(error)
        if len(asked) > 1 and (too_much or (isinstance(error, ServerError) and error.code in _OF_ONE)):
            return True
        shrinks, self.most = self.most > 1, max(1, self.most // 4)
        if too_much and shrinks:
            return False
        # (A slower link is served with less, too: a page may be what takes too long.)
        # After a fault another server may answer, so nothing that is kept is sure any more.
        for key in asked:
            stream = self.streams.pop(key, None)
            for waiter in stream.waiting if stream is not None else ():
                waiter.give(error)
                error = _another(error)
        return False


_OF_ONE = frozenset({"WRONGTYPE", "NOPERM"})
"""First words of refusals that one of the streams may be the cause of."""


def _another(error: OutlastError) -> OutlastError:
    """The same once more, for the next caller: they run on with different tracebacks."""
    twin = copy(error)
    twin.__cause__ = error.__cause__
    return twin


class ReadsBase:
    """What both kinds share: the choice of the board."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._by_tag = False

    def _shares(self, tail: Tail[Any], block: float | None) -> bool:
        """Whether the next poll only waits for more. Over TCP, who wants to ask now and then asks by himself."""
        return tail.blocks and self._transport.blocking == (block is not None)

    def _name(self, key: str) -> str:
        by_tag = self._by_tag or getattr(self._transport, "cluster", False)
        return key[: key.index("}")] if by_tag else ""

    def _tell_apart(self, error: OutlastError) -> bool:
        """Whether the streams may not be named together: on a cluster that does not show itself as one."""
        if isinstance(error, ServerError) and error.code == "CROSSSLOT":
            self._by_tag = True
            return True
        return False


# -- threads ---------------------------------------------------------------------------------------------------------


class _ThreadBoard(Board):
    """Of one process. No thread of its own reads: one of those who wait does it for all."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()
        self.under_way: list[dict[str, str]] = []

    def covered(self, key: str) -> bool:
        return any(asked.get(key) == self.streams[key].text for asked in self.under_way)


class Reads(ReadsBase):
    """The reads of a client's threads."""

    _transport: Transport

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._boards: dict[str, _ThreadBoard] = {}
        self._pid = os.getpid()

    def ask(self, tail: Tail[Any], *, pause: float = 0.0, block: float | None = None) -> Any:
        """The answer to the tail's next poll, after `pause` seconds or sooner. `block`: seconds to wait for one."""
        if pause > 0 and not (self._shares(tail, block) and block is None):
            time.sleep(pause)
            pause = 0.0
        if not self._shares(tail, block):
            return self._transport.send(tail.poll())
        looked = False
        while True:
            board = self._board(tail.key)
            with board.changed:
                found = board.kept(tail)
                alone = found is None and not looked and board.alone(tail)
                if not found and not alone:
                    tail.ride(block)
                    found = self._wait(board, tail, pause, block)
                    if found is not None:
                        return found
                    continue
            if found:
                return found
            looked = True
            if pause > 0 and tail.far:
                time.sleep(pause)
            if found := self._transport.send(tail.poll()):
                return found

    def _board(self, key: str) -> _ThreadBoard:
        if self._pid != os.getpid():
            # The threads that read here are the parent's.
            self._pid, self._boards = os.getpid(), {}
        return self._boards.setdefault(self._name(key), _ThreadBoard())

    def _wait(self, board: _ThreadBoard, tail: Tail[Any], pause: float, block: float | None) -> list[Entry] | None:
        now = time.monotonic()
        waiter = Waiter(tail, now + (pause if block is None else block), pause * SLACK)
        board.join(tail, waiter)
        try:
            while waiter.answer is None:
                now = time.monotonic()
                left = waiter.due - now
                if block is not None and left <= 0:
                    return []
                if board.streams.get(tail.key) is not waiter.stream:
                    return None
                if board.covered(tail.key):
                    board.changed.wait(None if block is None else left)
                elif block is None and left > 0:
                    board.changed.wait(left)
                else:
                    self._read(board, block and min(left, BLOCK))
        finally:
            board.leave(waiter, time.monotonic())
            if not board.waited_for:
                board.streams.clear()
        if isinstance(waiter.answer, OutlastError):
            raise waiter.answer
        return waiter.answer

    def _read(self, board: _ThreadBoard, block: float | None) -> None:
        """One read for all, by this thread; for new streams alone while another cannot be broken off for them."""
        board.prune(time.monotonic())
        keys = [key for key in board.streams if not board.covered(key)]
        if board.under_way and all(board.streams[key].new for key in keys):
            block = block and min(block, JOIN)
        else:
            keys = list(board.streams)
        for key in keys:
            board.streams[key].new = False
        call, asked = board.question(block, keys)
        board.under_way.append(asked)
        found: Found | None = None
        failure: OutlastError | None = None
        board.changed.release()
        try:
            found = self._transport.send(call, block=block)
        except OutlastError as error:
            failure = error
        finally:
            board.changed.acquire()
            board.under_way.remove(asked)
            board.changed.notify_all()
        now = time.monotonic()
        if found is not None:
            board.heard(asked, found, now)
            if block is None:
                board.empty(asked, now)
        elif failure is not None and self._tell_apart(failure):
            board.streams.clear()
        elif failure is not None and board.refused(asked, failure):
            for key, cursor in asked.items():
                self._one(board, key, cursor)

    def _one(self, board: _ThreadBoard, key: str, cursor: str) -> None:
        one = {key: cursor}
        try:
            found = self._transport.send(read(one, board.most, None, streams))
        except OutlastError as error:
            board.refused(one, error)
        else:
            board.heard(one, found, time.monotonic())
