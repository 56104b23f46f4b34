"""One viewer's event stream: reads, keep-alives, an end before the platform's.

It holds nothing that needs to be given back: where a viewer's leaving runs no `finally` (Cloudflare), only a read
that was under way is left, and that ends by itself.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from outlast import Chunk, Data, Event, Gap, JobNotFoundError, JobStatus, OutlastError, Progress, Restarted
from outlast._areads import AsyncReads
from outlast.protocol import Tail
from outlast.records import TERMINAL

from ._frames import KEEP_ALIVE, SHORT, SSE_HEADERS, FailureText, chunk_frame, frame, project

__all__ = ["CutOff", "EventStream", "Limits", "Reader", "Stream", "reconnect"]

log = logging.getLogger("outlast.edge")

RETRY = 1000
"""ms until a viewer comes back after its connection broke."""
RESUME = 100
"""ms until it comes back after an end that was ours."""
OUTAGE = 5000
"""ms until it comes back while the database does not answer, give or take a fifth: not all viewers at once."""
BLOCK = 10.0
BLOCK_WAITING = 1.0
"""Seconds that a read waits on a server that can block: less before the start, which only the record shows."""


def reconnect(reason: str, retry: int | None = None, **more: Any) -> bytes:
    """The last block of a stream that is not the job's end: come back, with your cursor."""
    if retry is None:
        retry = round(OUTAGE * random.uniform(0.8, 1.2))
    return frame("reconnect", {"reason": reason, **more}, retry=retry)


class Reader:
    """Reads a job's events, at most `polls` times."""

    def __init__(
        self, reads: AsyncReads, tail: Tail[Any], state: tuple[JobStatus, int], *, blocking: bool, polls: int
    ) -> None:
        self.tail = tail
        self.polls = polls
        self.state = state
        """The job's status and attempt as far as they show."""
        self._seen: tuple[JobStatus, int] | None = None
        self._reads = reads
        self._blocking = blocking
        self._clock = asyncio.get_running_loop().time
        self._resume_at = 0.0

    async def read(self) -> list[Event[Any]]:
        """The events of one poll, after the pause before it. Raises JobNotFoundError once the job is gone."""
        tail = self.tail
        wait: float | None = None
        if self._blocking and tail.blocks:
            wait = BLOCK if self.state[0] == "active" else BLOCK_WAITING
        self.polls -= 1
        pause = max(0.0, self._resume_at - self._clock()) if self._resume_at else 0.0
        events = tail.feed(await self._reads.ask(tail, pause=pause, block=wait))
        self._resume_at = 0.0 if self._blocking and tail.blocks else self._clock() + tail.delay
        return events

    async def rest(self) -> list[Event[Any]]:
        """The first events of a job that has ended; none if the cursor is at its end."""
        events: list[Event[Any]] = []
        while not events and not self.tail.done and self.polls > 0:
            events = await self.read()
        return events

    @property
    def caught_up(self) -> bool:
        """Whether the last read went to the end of what is there."""
        return self.tail.done or self.tail.delay > 0

    def look(self, events: Sequence[Event[Any]]) -> tuple[JobStatus, int]:
        """The state after `events`: an attempt's first output says that it runs before the record was looked at."""
        if self.tail.seen is not None and self.tail.seen is not self._seen:
            self._seen = self.tail.seen
            if self._seen[0] not in TERMINAL:  # the end has an event of its own
                self.state = self._seen
        for event in events:
            if event.attempt > self.state[1] and isinstance(event, Chunk | Data | Progress | Restarted):
                self.state = "active", event.attempt
        return self.state


class Snapshot:
    """What a viewer that comes late needs of everything that was said: one event in place of thousands."""

    def __init__(self, attempt: int) -> None:
        self._data: dict[str, Any] = {"text": "", "values": [], "attempt": attempt}
        self._text: list[str] = []
        self._id: str | None = None

    def add(self, event: Event[Any]) -> bool:
        """Take the event in. False: it is for the viewer itself."""
        match event:
            case Chunk():
                self._text.append(event.data)
            case Data():
                self._data["values"].append(event.value)
            case Progress():
                self._data["progress"] = event.value
            case Restarted():
                self._text.clear()
                self._data["values"].clear()
            case Gap():
                self._text.clear()
                self._data["values"].clear()
                return False
            case _:
                return False
        self._id = event.id
        self._data["attempt"] = event.attempt
        return True

    def frame(self) -> bytes:
        return frame("snapshot", {**self._data, "text": "".join(self._text)}, id=self._id)


class Limits(NamedTuple):
    """Of one stream, in seconds."""

    seconds: float
    """After which it ends by itself."""
    keepalive: float
    """Of silence before a comment."""
    send_timeout: float
    """That a viewer may take to read what is in its way before it is given up."""


class Stream(Response):
    """A response that follows a job and ends before the platform would end it. What goes over it is the subclass's."""

    def __init__(
        self,
        reader: Reader,
        ready: Sequence[Event[Any]],
        limits: Limits,
        headers: Mapping[str, str] = SSE_HEADERS,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(headers)
        if "content-length" in self.headers:
            del self.headers["content-length"]
        self._reader = reader
        self._ready = ready
        self._seconds, self._keepalive, self._send_timeout = limits
        self._sending_since: float | None = None
        self._reading = False
        self._comment: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    def _open(self) -> bytes:
        """What goes out before the first read."""
        raise NotImplementedError

    def _encode(self, events: Sequence[Event[Any]]) -> bytes:
        """What goes out for the events of one read."""
        raise NotImplementedError

    def _close(self, reason: str) -> bytes:
        """The last words of a connection that ends before the job: max_duration, max_polls, gone or unavailable.

        It may raise CutOff, where an end in good order would be taken for the job's.
        """
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end or until the viewer is gone, whichever the server tells us of first."""
        # Servers of ASGI 2.4 may show a disconnect only by refusing to send, older ones only by telling of it.
        tasks = [asyncio.ensure_future(self._run(send)), asyncio.ensure_future(_disconnected(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, OSError):
                raise error

    async def _run(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._send, self._clock = send, loop.time
        self._silent_since = loop.time()
        self._ends = self._silent_since + self._seconds
        self._watch_over()
        try:
            async with asyncio.timeout(None) as self._patience:
                await self._message({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._follow()
                await self._write(b"", more=False)
        except TimeoutError:
            if not self._patience.expired():
                raise
            if self._failure is not None:
                raise self._failure from None
            log.debug("a viewer read nothing for %g s and was given up", self._send_timeout)
        finally:
            self._timer.cancel()
            if self._comment is not None:
                self._comment.cancel()
                await asyncio.wait((self._comment,))

    async def _follow(self) -> None:
        await self._write(self._open())
        try:
            await self._pass_on(self._ready)
        except _Over as over:
            await self._write(self._close(over.reason))
        except JobNotFoundError:
            # The next connection is answered for good: 204 with a cursor, 404 without.
            await self._write(self._close("gone"))
        except OutlastError as error:
            log.warning("the stream of job %r broke off: %s", self._reader.tail.id, type(error).__name__)
            await self._write(self._close("unavailable"))

    async def _pass_on(self, events: Sequence[Event[Any]]) -> None:
        """Read and write until the job ends. Only a read is broken off when the stream has had its time."""
        reader, tail = self._reader, self._reader.tail
        try:
            async with asyncio.timeout(None) as self._time:
                while True:
                    if frames := self._encode(events):
                        await self._write(frames)
                    if tail.done:
                        return
                    if reader.polls <= 0:
                        raise _Over("max_polls")
                    if self._clock() >= self._ends:
                        raise _Over("max_duration")
                    self._reading = True
                    events = await reader.read()
                    self._reading = False
        except TimeoutError:
            if not self._time.expired():
                raise
            raise _Over("max_duration") from None
        finally:
            self._reading = False

    def _watch_over(self) -> None:
        """See that the viewer reads, that he hears something now and then, and that the stream ends in time.

        One timer for all of it, set anew only when it has gone off: to set one for each message costs more than to
        send it.
        """
        now = self._clock()
        due = now + min(self._keepalive, self._send_timeout)
        if self._sending_since is not None:
            due = self._sending_since + self._send_timeout
            if due <= now:
                self._patience.reschedule(now)
                return
        elif self._reading:
            if self._ends <= now:
                self._time.reschedule(now)
            elif self._silent_since + self._keepalive <= now:
                self._comment = asyncio.ensure_future(self._send_comment())
            else:
                due = min(self._silent_since + self._keepalive, now + self._send_timeout, self._ends)
        self._timer = asyncio.get_running_loop().call_at(due, self._watch_over)

    async def _send_comment(self) -> None:
        try:
            await self._deliver({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
        except Exception as error:
            self._failure = error
            with suppress(RuntimeError):  # the stream is over already
                self._patience.reschedule(self._clock())

    async def _write(self, body: bytes, *, more: bool = True) -> None:
        await self._message({"type": "http.response.body", "body": body, "more_body": more})

    async def _message(self, message: Message) -> None:
        if self._comment is not None:
            await asyncio.wait((self._comment,))
            self._comment = None
        await self._deliver(message)

    async def _deliver(self, message: Message) -> None:
        self._silent_since = self._sending_since = self._clock()
        await self._send(message)
        self._sending_since = None


class EventStream(Stream):
    """The response: a `state` frame, the events, and exactly one reason why it ends."""

    def __init__(
        self,
        reader: Reader,
        ready: Sequence[Event[Any]],
        limits: Limits,
        *,
        progress: float,
        snapshot: bool,
        failure_text: FailureText,
    ) -> None:
        super().__init__(reader, ready, limits)
        self._progress = progress
        self._snapshot = Snapshot(reader.state[1]) if snapshot else None
        self._failure_text = failure_text

    def _open(self) -> bytes:
        return self._state(RETRY)

    def _close(self, reason: str) -> bytes:
        match reason:
            case "unavailable":
                return b": the database does not answer\n" + reconnect(reason)
            case "gone":
                return reconnect(reason, RESUME)
            case _:
                return reconnect(reason, RESUME, max_stream=round(self._seconds, 3))

    def _encode(self, events: Sequence[Event[Any]]) -> bytes:
        """The frames of one read, with a `state` behind them if it has changed."""
        reader = self._reader
        before, after = reader.state, reader.look(events)
        frames: list[bytes] = []
        for event in events:
            if isinstance(event, Progress):
                self._progress = event.value
            if self._snapshot is not None:
                if self._snapshot.add(event):
                    continue
                if not isinstance(event, Gap):
                    frames.append(self._take_snapshot())
            if isinstance(event, Chunk) and len(event.data) <= SHORT:
                frames.append(chunk_frame(event.id, event.data))
            else:
                kind, data = project(event, self._failure_text)
                frames.append(frame(kind, data, id=event.id))
        if self._snapshot is not None and reader.caught_up:
            frames.append(self._take_snapshot())
        if after != before and not reader.tail.done:
            frames.append(self._state())
        return b"".join(frames)

    def _take_snapshot(self) -> bytes:
        snapshot, self._snapshot = self._snapshot, None
        return b"" if snapshot is None else snapshot.frame()

    def _state(self, retry: int | None = None) -> bytes:
        status, attempt = self._reader.state
        return frame("state", {"status": status, "attempt": attempt, "progress": self._progress}, retry=retry)


class CutOff(Exception):
    """Raised out of the application so that the server breaks the connection: this end must not pass for the job's.

    Servers write it into their log. Where they have no limit of their own, a longer `max_stream` makes it rare.
    """


class _Over(Exception):
    """This connection has had its share."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
