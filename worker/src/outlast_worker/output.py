"""What a handler emits, on its way to the stream: buffered, joined, numbered, written once."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from outlast.codec import dump_json
from outlast.errors import InvalidArgumentError, OutlastError, ServerError, StoreFullError
from outlast.protocol import holding
from outlast.transport import is_transient

from .policy import mend, mend_deep

if TYPE_CHECKING:
    from outlast.transport import AsyncTransport

    from .leases import Lease

__all__ = ["Output", "event_of", "progress_text"]

logger = logging.getLogger("outlast.worker")

JOIN = 4096
"""Characters up to which neighbouring texts become one entry: a reader's page of 500 entries stays under 10 MB."""
PIECE = 64 * 1024
"""Characters of an entry. A longer text becomes several: what no gateway passes on in one answer, nobody could read."""
MAX_EVENT = 1024 * 1024
"""Bytes of an emitted JSON value, which cannot be taken apart."""
BATCH_EVENTS, BATCH_CHARS = 200, 256 * 1024
FULL_EVENTS, FULL_CHARS = 1000, 1024 * 1024
"""A handler that emits faster than the database takes waits once this much is buffered."""
PATIENCE = 60.0
"""Seconds for which a full database is asked again before the text is given up and the handler is told."""
LAST_PATIENCE = 10.0
"""The same for the last text of a handler that has ended: its result is there, and can be stored."""

_High = range(0xD800, 0xDC00)


def event_of(value: object) -> tuple[str, str]:
    """Kind and text of an emitted value: str is a chunk, anything else one JSON value."""
    if isinstance(value, str):
        return "chunk", value
    if isinstance(value, (bytes, bytearray)):
        raise InvalidArgumentError(f"emit takes text or a JSON value, not {type(value).__name__}; decode it first")
    try:
        text = _json(value)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"emit: {type(value).__name__}: {error}") from None
    size = len(text) if text.isascii() else len(text.encode())
    if size > MAX_EVENT:
        raise InvalidArgumentError(
            f"emit: {type(value).__name__} has {size} bytes of JSON, and one event at most {MAX_EVENT}: emit it in "
            "parts, or as text, which is split"
        )
    return "data", text


def _json(value: object) -> str:
    try:
        return dump_json(value)
    except InvalidArgumentError as error:
        mended = mend_deep(value)
        if mended != value:
            return dump_json(mended)
        if not str(error).startswith("not JSON"):
            raise
    from pydantic_core import PydanticSerializationError, to_jsonable_python

    try:
        return dump_json(mend_deep(to_jsonable_python(value, by_alias=True)))
    except PydanticSerializationError:
        raise InvalidArgumentError("cannot be written as JSON") from None


def progress_text(value: object) -> str:
    """A progress as the wire writes it. Only real numbers from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise InvalidArgumentError(f"progress={value!r} is not a number from 0 to 1")
    return str(int(value)) if value == int(value) else repr(float(value))


class Output:
    """The buffer of one attempt and its writer. Everything here runs on the worker's event loop.

    At most one flush is in flight. One whose reply was lost is repeated, and answered the same, before the next
    leaves: the events' numbers tell the server whether it has them.
    """

    def __init__(
        self,
        transport: AsyncTransport,
        lease: Lease,
        *,
        max_len: int,
        interval: float,
        report: Callable[[holding.Held], None],
        trouble: Callable[[OutlastError], None],
        hopeless: Callable[[], bool],
    ) -> None:
        self._transport = transport
        self._lease = lease
        self._max_len = max_len
        self._interval = interval
        self._report = report
        self._trouble = trouble
        self._hopeless = hopeless
        self._loop = asyncio.get_running_loop()
        self._buffer: deque[tuple[str, str]] = deque()
        self._chars = 0
        self._half = ""
        self._renew = False
        self._progress = self._usage = ""
        self._started = -1e9
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._error: OutlastError | None = None
        self._patience = inf
        self.closed = False
        self.count = self.written = lease.job.n
        """How many events have a number, and how many of them the database is known to have."""
        self.refused = False
        """Whether the database was full for so long that text was given up."""
        self.emitted = False
        """Whether this attempt has written, or may have."""

    # -- what the contexts call --------------------------------------------------------------------------------------

    def add(self, kind: str, text: str) -> None:
        if self.closed:
            return
        if kind == "chunk":
            text = self._whole(text)
            if not text:
                self._renew = True  # nothing to show, but a sign of life: it renews the lease
                self._schedule()
                return
            if self._buffer and self._buffer[-1][0] == "chunk" and len(self._buffer[-1][1]) + len(text) <= JOIN:
                before = self._buffer.pop()[1]
                self._chars -= len(before)
                text = before + text
            for at in range(0, len(text), PIECE):
                self._append(kind, text[at : at + PIECE])
        else:
            self._end_half()
            if kind == "progress":
                self._progress = text
            self._append(kind, text)
        self._schedule()

    def touch(self) -> None:
        """Renew the lease with the next flush, even if there is nothing to write."""
        self._renew = True

    def write_usage(self, text: str) -> None:
        """Have the next flush put the job's usage on its record."""
        self._usage = text
        self._schedule()

    async def flush_usage(self) -> None:
        if self._usage:
            await self.flush()

    def drop_usage(self) -> None:
        """What ends the attempt writes it, so a flush need not."""
        self._usage = ""

    @property
    def full(self) -> bool:
        return len(self._buffer) >= FULL_EVENTS or self._chars >= FULL_CHARS

    @property
    def stale(self) -> bool:
        """Whether the lease may have passed to somebody else while this process stood still."""
        return self._lease.lapsed

    def pop_error(self) -> OutlastError | None:
        """The error of a flush that was given up, for the handler to see once."""
        error, self._error = self._error, None
        return error

    async def room(self) -> None:
        """Wait while the buffer is full."""
        while self.full and not self.closed:
            await self._soon()

    async def flush(self) -> None:
        """Wait until everything emitted so far is written, or given up."""
        self._end_half()
        while (self._buffer or self._renew or self._usage or self._task) and not self.closed:
            await self._soon()

    async def flush_last(self) -> None:
        """As `flush`, but the text must not keep the result waiting for long."""
        self._patience = self._loop.time() + LAST_PATIENCE
        await self.flush()

    async def close(self, limit: float) -> None:
        """Take nothing more; a flush in flight gets `limit` seconds."""
        self.closed = True
        self._buffer.clear()
        if self._timer is not None:
            self._timer.cancel()
        task = self._task
        if task is not None:
            await asyncio.wait([task], timeout=limit)
            task.cancel()

    # -- text --------------------------------------------------------------------------------------------------------

    def _whole(self, text: str) -> str:
        """Whole code points only: half a surrogate pair waits for its other half."""
        text, self._half = self._half + text, ""
        if text and ord(text[-1]) in _High:
            text, self._half = text[:-1], text[-1]
        return mend(text)

    def _end_half(self) -> None:
        if self._half:
            self._append("chunk", mend(self._half))
            self._half = ""

    def _append(self, kind: str, text: str) -> None:
        self._buffer.append((kind, text))
        self._chars += len(text)

    # -- writing -----------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if self._task is not None or self._timer is not None or self.closed:
            return
        wait = self._started + self._interval - self._loop.time()
        if wait <= 0:
            self._start()
        else:
            self._timer = self._loop.call_later(wait, self._start)

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is None and not self.closed:
            self._started = self._loop.time()
            self._task = self._loop.create_task(self._write(), name=f"outlast flush {self._lease.job.id}")
            self._task.add_done_callback(self._written)

    async def _soon(self) -> None:
        self._start()
        if self._task is not None:
            # The task may be shared with other waiters, and the flush must not be cut off with this caller.
            await asyncio.wait([self._task])

    def _written(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = error if isinstance(error, OutlastError) else ServerError(f"flush failed: {error!r}")
        if self._buffer or self._renew or self._usage:
            self._schedule()

    async def _write(self) -> None:
        events: list[tuple[str, str]] = []
        size = 0
        while self._buffer and len(events) < BATCH_EVENTS and size < BATCH_CHARS:
            kind, text = self._buffer.popleft()
            events.append((kind, text))
            size += len(text)
            self._chars -= len(text)
        progress, self._progress = (self._progress, "") if any(kind == "progress" for kind, _ in events) else ("", "")
        usage, self._usage = self._usage, ""
        first = self.count + 1
        # Counted whether or not they arrive: a number that is skipped shows as a gap, one that is used twice would lie.
        self.count += len(events)
        self.emitted = self.emitted or bool(events)
        again = False
        pause, patience = 0.05, self._loop.time() + PATIENCE
        while True:
            now = time.monotonic()
            # A little before the thread of the leases would: it costs less here.
            renew = self._renew or now - self._lease.renewed >= self._lease.beat * 0.9
            self._renew = False
            if not events and not renew and not usage:
                return
            call = holding.flush(
                self._lease.keys,
                self._lease.job,
                first=first,
                events=events,
                max_len=self._max_len,
                lease_ms=self._lease.ms if renew else None,
                progress=progress,
                usage=usage,
                again=again,
            )
            try:
                held = await self._transport.send(call)
            except OutlastError as error:
                if isinstance(error, StoreFullError):
                    if self._loop.time() > min(patience, self._patience):
                        self.refused = True
                        raise
                elif not is_transient(error):
                    raise
                # A server that was not ready in the end may have been so at a try before, whose reply was lost.
                again = again or getattr(error, "maybe_applied", True)
                self._trouble(error)
            else:
                if renew and held != "lost":
                    self._lease.renewed = max(self._lease.renewed, now)
                if held != "ok":
                    self._report(held)
                if held != "lost":
                    self.written = first + len(events) - 1
                return
            if self.closed:
                return
            if self._hopeless():
                self._report("lost")  # never a result whose text is not whole
                return
            self._renew = renew
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, 1.0)
