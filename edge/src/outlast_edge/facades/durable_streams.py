"""The read side of the Durable Streams protocol: a job's events as a JSON stream that closes when the job ends.

::

    GET   {path}/{id}?offset=                  what is there after the offset
    GET   {path}/{id}?offset=&live=long-poll   the same, or wait for it
    GET   {path}/{id}?offset=&live=sse         all that follows
    HEAD  {path}/{id}                          the offset of the end

Only workers write, so there is no PUT, POST or DELETE.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from time import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from outlast import Event, JobError
from outlast.protocol.tail import START

from .._edge import AnyJob, AnyQueue, Edge
from .._frames import SSE_HEADERS, FailureText, dump, frame, project
from .._http import Problem
from .._stream import Limits, Reader, Stream
from ._facade import Facade

__all__ = ["DurableStreams"]

PAGE = 500
SSE_SECONDS = 60.0
"""How long a live stream lasts: caches in between fold the readers of one interval into one request."""
INTERVAL = 20.0
EPOCH = 1728432000.0
"""Cursors number the intervals since 9 October 2024."""
HEADERS = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "cross-origin"}
_OFFSET = re.compile(r"-1|now|[0-9]{13,20}_[0-9]{10,20}")


class DurableStreams(Facade):
    """Streams of one queue's jobs for the clients of Durable Streams, and for caches in front of many readers.

    - `queue`: one of the edge's; the only one by default.
    - `path`: in front of the job's id.

    A message is ``{"id", "type", "data"}``, as in the edge's own JSON pages. An offset holds an event's id, so it keeps
    its meaning over retries; a reader whose place was trimmed away gets a message of type ``gap``.
    """

    content_type = "application/json"

    def __init__(self, edge: Edge, queue: AnyQueue | None = None, *, path: str = "/ds") -> None:
        super().__init__(edge)
        self._queue = self._only(queue)
        self._path = path

    @property
    def routes(self) -> list[BaseRoute]:
        return [self._route(self._path + "/{id:path}", self._read, "GET", "HEAD")]

    def _fail(self, problem: Problem) -> Response:
        problem.headers.update(HEADERS)
        return problem.response()

    async def _read(self, request: Request) -> Response:
        edge = self._edge
        job = await self._load(request, "watch", self._queue, str(request.path_params["id"]))
        if job is None:
            raise Problem(404, "not_found", "There is no such stream.")
        if request.method == "HEAD":
            offset, closed = await self._end(request, job)
            headers = self._headers(offset, closed=closed, caught_up=True)
            return Response(headers={**headers, "Cache-Control": "no-store", "Content-Type": self.content_type})
        given, live = request.query_params.getlist("offset"), request.query_params.get("live")
        if len(given) > 1 or (given and not _OFFSET.fullmatch(given[0])):
            raise Problem(400, "bad_offset", "?offset= takes one offset that a reply gave, -1 for the start, or now.")
        if live not in (None, "long-poll", "sse") or (live and not given):
            raise Problem(400, "bad_live", "?live= takes long-poll or sse, and needs ?offset=.")
        after = _cursor(given[0]) if given else START
        cursor = _interval(request.query_params.get("cursor"))
        if live == "sse":
            limits = edge._limits(request.scope)
            limits = limits._replace(seconds=min(limits.seconds, SSE_SECONDS))
            return _LiveStream(self, edge._reader(request, self._queue, job, after), limits, cursor)
        if live is None and after == "latest":
            offset, closed = await self._end(request, job)
            headers = {**self._headers(offset, closed=closed, caught_up=True), "Cache-Control": "no-store"}
            return Response(self._pack([]), headers={**headers, "Content-Type": self.content_type})
        wait = edge._limit(request.scope, edge._max_wait) if live else 0.0
        page = await self._page(request, job, after, wait)
        caught_up = page.done or len(page.events) < PAGE
        headers = self._headers(_offset(page.next), closed=page.done, caught_up=caught_up)
        if live:
            headers["Stream-Cursor"] = cursor
            if not page.events:
                return Response(status_code=204, headers={**headers, "Cache-Control": "no-store"})
        start, closed_ = given[0] if given else "-1", ":c" if page.done else ""
        name = sha256(job.id.encode()).hexdigest()[:16]
        headers["ETag"] = f'"{name}:{start}:{headers["Stream-Next-Offset"]}{closed_}"'
        headers["Cache-Control"] = "private, max-age=60, stale-while-revalidate=300"
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        body = self._pack([self.message(event, edge._failure_text) for event in page.events])
        return Response(body, headers={**headers, "Content-Type": self.content_type})

    def message(self, event: Event[Any], failure_text: FailureText) -> bytes:
        """One message of the stream."""
        kind, data = project(event, failure_text)
        return dump({"id": event.id, "type": kind, "data": data})

    def _pack(self, messages: Sequence[bytes]) -> bytes:
        return b"[" + b",".join(messages) + b"]"

    async def _end(self, request: Request, job: AnyJob) -> tuple[str, bool]:
        page = await self._page(request, job, "latest", 0.0)
        return _offset(page.next), page.done

    async def _page(self, request: Request, job: AnyJob, after: str, wait: float) -> Any:
        shown = self._edge._jobs(request, self._edge._shown[self._queue.name])
        try:
            return await shown.events(job.id, after=after, limit=PAGE, wait=wait)
        except JobError:
            raise Problem(404, "not_found", "There is no such stream.") from None

    def _headers(self, offset: str, *, closed: bool, caught_up: bool) -> dict[str, str]:
        headers = {**HEADERS, "Stream-Next-Offset": offset}
        if caught_up:
            headers["Stream-Up-To-Date"] = "true"
        if closed:
            headers["Stream-Closed"] = "true"
        return headers


class _LiveStream(Stream):
    def __init__(self, facade: DurableStreams, reader: Reader, limits: Limits, cursor: str) -> None:
        super().__init__(reader, (), limits, {**SSE_HEADERS, **HEADERS})
        self._facade = facade
        self._cursor = cursor
        self._begun = False
        self._told = False

    def _open(self) -> bytes:
        return b""

    def _encode(self, events: Sequence[Event[Any]]) -> bytes:
        reader = self._reader
        if not self._begun:
            self._begun = True  # nothing has been read yet
            return b""
        frames: list[bytes] = []
        if events:
            failure_text = self._facade._edge._failure_text
            body = self._facade._pack([self._facade.message(event, failure_text) for event in events])
            frames.append(b"event: data\n" + b"".join(b"data:%b\n" % line for line in body.split(b"\n")) + b"\n")
        if events or reader.tail.done or (reader.caught_up and not self._told):
            control: dict[str, Any] = {"streamNextOffset": _offset(reader.tail.cursor)}
            if reader.tail.done:
                control["streamClosed"] = True
            else:
                control["streamCursor"] = self._cursor
            if reader.caught_up:
                control["upToDate"] = True
            self._told = reader.caught_up
            frames.append(frame("control", control))
        return b"".join(frames)

    def _close(self, reason: str) -> bytes:
        return b""  # the reader comes back with its offset


def _offset(cursor: str | None) -> str:
    """A cursor as an offset: of fixed width, so that offsets sort as text."""
    ms, _, n = (cursor or START).partition("-")
    return f"{int(ms):013d}_{int(n):010d}"


def _cursor(offset: str) -> str:
    if offset in ("-1", "now"):
        return START if offset == "-1" else "latest"
    ms, _, n = offset.partition("_")
    if int(ms) >= 2**64 or int(n) >= 2**64:
        raise Problem(400, "bad_offset", "The offset is none of this stream.")
    return f"{int(ms)}-{int(n)}"


def _interval(given: str | None) -> str:
    """The number of the present interval; above the reader's own, so that a cache cannot answer it for ever."""
    now = int((time() - EPOCH) / INTERVAL)
    if given is not None and given.isdecimal() and len(given) < 16 and int(given) >= now:
        now = int(given) + 1
    return str(now)
