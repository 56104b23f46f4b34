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

from outlast import Event, EventPage, JobError
from outlast.protocol.tail import START

from .._edge import AnyJob, AnyQueue, Edge
from .._frames import SSE_HEADERS, FailureText, dump, project
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


class Json:
    """What a stream is made of: a JSON array of messages."""

    content_type = "application/json"

    def messages(self, events: Sequence[Event[Any]], failure_text: FailureText) -> list[bytes]:
        shown = [(event.id, project(event, failure_text)) for event in events]
        return [dump({"id": id, "type": kind, "data": data}) for id, (kind, data) in shown]

    def pack(self, messages: Sequence[bytes]) -> bytes:
        return b"[" + b",".join(messages) + b"]"


class DurableStreams(Facade):
    """Streams of one queue's jobs for the clients of Durable Streams, and for caches in front of many readers.

    - `queue`: one of the edge's; the only one by default.
    - `path`: in front of the job's id.

    A message is ``{"id", "type", "data"}``, as in the edge's own JSON pages. An offset holds an event's id, so it keeps
    its meaning over retries; a reader whose place was trimmed away gets a message of type ``gap``.
    """

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
        form = self._form(job)
        typed = {"Content-Type": form.content_type}
        if request.method == "HEAD":
            return Response(headers={**await self._end(request, job), **typed})
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
            reader = edge._reader(request, self._queue, job, after)
            return _LiveStream(reader, limits, form, edge._failure_text, cursor)
        if live is None and after == "latest":
            return Response(form.pack([]), headers={**await self._end(request, job), **typed})
        page = await self._page(request, job, after, edge._limit(request.scope, edge._max_wait) if live else 0.0)
        headers = _headers(page, caught_up=page.done or len(page.events) < PAGE)
        messages = form.messages(page.events, edge._failure_text)
        if live:
            headers["Stream-Cursor"] = cursor
            if not messages:
                return Response(status_code=204, headers={**headers, "Cache-Control": "no-store"})
        name, closed = sha256(job.id.encode()).hexdigest()[:16], ":c" if page.done else ""
        headers["ETag"] = f'"{name}:{given[0] if given else -1}:{_offset(page.next)}{closed}"'
        headers["Cache-Control"] = "private, max-age=60, stale-while-revalidate=300"
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(form.pack(messages), headers={**headers, **typed})

    def _form(self, job: AnyJob) -> Json:
        return Json()

    async def _end(self, request: Request, job: AnyJob) -> dict[str, str]:
        page = await self._page(request, job, "latest", 0.0)
        return {**_headers(page, caught_up=True), "Cache-Control": "no-store"}

    async def _page(self, request: Request, job: AnyJob, after: str, wait: float) -> EventPage[Any]:
        shown = self._edge._jobs(request, self._edge._shown[self._queue.name])
        try:
            return await shown.events(job.id, after=after, limit=PAGE, wait=wait)
        except JobError:
            raise Problem(404, "not_found", "There is no such stream.") from None


class _LiveStream(Stream):
    def __init__(self, reader: Reader, limits: Limits, form: Json, failure_text: FailureText, cursor: str) -> None:
        super().__init__(reader, (), limits, {**SSE_HEADERS, **HEADERS, "Content-Type": "text/event-stream"})
        self._form = form
        self._failure_text = failure_text
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
        if messages := self._form.messages(events, self._failure_text):
            lines = re.split(rb"\r\n|\r|\n", self._form.pack(messages))
            frames.append(b"event: data\n" + b"".join(b"data:%b\n" % line for line in lines) + b"\n")
        if events or reader.tail.done or (reader.caught_up and not self._told):
            control: dict[str, Any] = {"streamNextOffset": _offset(reader.tail.cursor)}
            control |= {"streamClosed": True} if reader.tail.done else {"streamCursor": self._cursor}
            if reader.caught_up:
                control["upToDate"] = True
            self._told = reader.caught_up
            frames.append(b"event: control\ndata:%b\n\n" % dump(control))
        return b"".join(frames)

    def _close(self, reason: str) -> bytes:
        return b""  # the reader comes back with its offset


def _headers(page: EventPage[Any], *, caught_up: bool) -> dict[str, str]:
    headers = {**HEADERS, "Stream-Next-Offset": _offset(page.next)}
    if caught_up:
        headers["Stream-Up-To-Date"] = "true"
    if page.done:
        headers["Stream-Closed"] = "true"
    return headers


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
