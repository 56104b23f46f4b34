"""The routes of the dashboard: one page, what it loads, and JSON for it.

Reading needs the right to "inspect", changing the right to "operate": `authorize` of the edge is asked for both, with
no job, and only `ANY` opens. Changes are POSTs with a header that no form and no image can send.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any, cast

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from outlast import Chunk, Completed, ConfigurationError, Data, Event, InvalidArgumentError
from outlast._checks import check_id
from outlast.listing import check_state
from outlast.protocol.calls import CLOCK
from outlast.records import TERMINAL
from outlast.transport import adrive

from .._edge import ANY, Edge, problem_of
from .._http import Problem, json_reply, object_body
from .._stream import EventStream
from . import _reads as reads

__all__ = ["Dashboard"]

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_FILES = {
    "/": ("dashboard/page.html", "text/html"),
    "/page.css": ("dashboard/page.css", "text/css"),
    "/page.js": ("dashboard/page.js", "text/javascript"),
    "/watch.js": ("watch.js", "text/javascript"),
    "/icon.svg": ("demo/icon.svg", "image/svg+xml"),
}
HEADER = "x-outlast-dashboard"
"""Every change carries it. A page of another origin cannot send it without being allowed to by a CORS answer."""
SEARCHED = 55
"""Queues that a search by id looks into."""
BATCH = 25
"""Dead jobs that one request puts back to work; the page asks again until there are no more."""


class Dashboard:
    """The dashboard of an edge's queues.

    - `edge`: its queues are shown, with its client. Its `authorize` is asked with the action "inspect" before anything
      is read and "operate" before anything is changed, and must return `ANY`; an owner's name opens nothing. An edge
      that is public has nobody to ask, so it raises ConfigurationError.
    - `payloads` (False): show payloads, results, the values of steps and the text of the output. Without it they are
      not read, or left out here: the browser never gets them. Ids, owners and error texts are shown in any case.
    - `prefix` (""): in front of all paths, such as "/dashboard".

    A page costs at most 60 commands, however many jobs there are. While a job's output is watched there is a read for
    each piece, as for any watcher.
    """

    def __init__(self, edge: Edge, *, payloads: bool = False, prefix: str = "") -> None:
        if edge._authorize is None:
            raise ConfigurationError(
                "Dashboard needs an edge with authorize=: a public one would let everybody cancel and pause"
            )
        if prefix and (not prefix.startswith("/") or prefix.endswith("/")):
            raise InvalidArgumentError(f"prefix={prefix!r} is not a path; write it like '/dashboard', or ''")
        self._edge = edge
        self._payloads = payloads
        self._prefix = prefix
        self._history = reads.History()

    def app(self) -> Starlette:
        """An ASGI application with the dashboard and nothing else, to be mounted or served."""
        return Starlette(routes=self.routes)

    @property
    def routes(self) -> list[BaseRoute]:
        """For the routes of your own application."""
        at = self._prefix
        found: list[BaseRoute] = [Route(at + path, self._file(*source)) for path, source in _FILES.items()]
        if at:
            found.append(Route(at, self._slash))
        get: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "queues": self._overview,
            "queue": self._queue,
            "job": self._job,
            "find": self._find,
            "events": self._events,
        }
        found += [Route(f"{at}/api/{name}", self._guarded(answer, "inspect")) for name, answer in get.items()]
        found.append(Route(f"{at}/api/{{change}}", self._guarded(self._change, "operate"), methods=["POST"]))
        return found

    # -- who may, and the page -----------------------------------------------------------------------------------------

    def _guarded(
        self, answer: Callable[[Request], Awaitable[Response]], action: Any
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guard(request: Request) -> Response:
            try:
                if action == "operate":
                    self._same_origin(request)
                if await self._edge._owner(request, action, None) is not ANY:
                    raise Problem(403, "forbidden", "You may not use this dashboard.")
                response = await answer(request)
            except Exception as error:
                if isinstance(error, InvalidArgumentError):
                    error = Problem(400, "bad_parameter", f"{error}.")
                response = problem_of(error, f"dashboard {action}").response()
            for name, value in _HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return guard

    @staticmethod
    def _same_origin(request: Request) -> None:
        if HEADER not in request.headers or request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
            raise Problem(403, "cross_site", f"Changes need the header {HEADER}, sent by the dashboard's own page.")

    def _file(self, name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
        async def give(_: Request) -> Response:
            source = files("outlast_edge").joinpath(name).read_bytes()
            return Response(source, media_type=kind, headers={**_HEADERS, "Cache-Control": "no-cache"})

        return self._guarded(give, "inspect")

    async def _slash(self, request: Request) -> Response:
        """The page's addresses are relative to a folder."""
        return RedirectResponse(request.url.path.rpartition("/")[2] + "/", 308)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _jobs(self, request: Request, name: str | None) -> Any:
        queue = self._edge.queues.get(name or "")
        if queue is None:
            raise Problem(404, "queue_not_found", "This dashboard has no such queue.")
        return self._edge._jobs(request, queue)

    async def _overview(self, request: Request) -> Response:
        names = sorted(self._edge.queues)
        after = request.query_params.get("after", "")
        shown = [name for name in names if name > after][: reads.OVERVIEW]
        jobs = {name: self._jobs(request, name) for name in shown}
        found: list[dict[str, Any]] = []
        if jobs:
            every = {name: one._keys for name, one in jobs.items()}
            found = await adrive(next(iter(jobs.values()))._transport, reads.overview(every, self._history))
        more = shown[-1] if shown and shown[-1] != names[-1] else None
        return json_reply(request, {"queues": found, "total": len(names), "next": more, **self._settings(jobs)})

    def _settings(self, jobs: dict[str, Any]) -> dict[str, Any]:
        """`billed`: over HTTP, where each look is paid for, the page looks less often."""
        return {"payloads": self._payloads, "billed": any(not one._transport.blocking for one in jobs.values())}

    async def _queue(self, request: Request) -> Response:
        query = request.query_params
        name = query.get("queue", "")
        jobs = self._jobs(request, name)
        state = None if query.get("state") == "usage" else check_state(query.get("state", "waiting"))
        reverse, cursor = "reverse" in query, query.get("cursor")
        if cursor and state is not None:
            plan = reads.jobs(jobs._keys, state, reverse, cursor)
        else:
            plan = reads.queue(name, jobs._keys, state, reverse, self._history)
        return json_reply(request, {**await adrive(jobs._transport, plan), **self._settings({name: jobs})})

    async def _job(self, request: Request) -> Response:
        name, id = request.query_params.get("queue", ""), _id(request.query_params.get("id"))
        jobs = self._jobs(request, name)
        found = await adrive(jobs._transport, reads.job(name, jobs._keys, id, self._payloads))
        if found is None:
            raise Problem(404, "job_not_found", "There is no such job: it is unknown, or its record has expired.")
        return json_reply(request, {**found, **self._settings({name: jobs})})

    async def _find(self, request: Request) -> Response:
        id = _id(request.query_params.get("id"))
        names = sorted(self._edge.queues)[:SEARCHED]
        jobs = {name: self._jobs(request, name) for name in names}
        every = {name: one._keys for name, one in jobs.items()}
        found = await adrive(jobs[names[0]]._transport, reads.find(every, id))
        return json_reply(request, {"id": id, "found": found, "searched": len(names)})

    async def _events(self, request: Request) -> Response:
        name, id = request.query_params.get("queue", ""), _id(request.query_params.get("id"))
        jobs = self._jobs(request, name)
        job = await jobs.get(id)
        after = request.query_params.get("after") or request.headers.get("last-event-id")
        if job is None:
            raise Problem(404, "job_not_found", "There is no such job.")
        reader = self._edge._reader(request, jobs.queue, job, after)
        ready = await reader.rest() if job.status in TERMINAL else []
        if reader.tail.done and not ready:
            return Response(status_code=204)
        return (EventStream if self._payloads else _Masked)(
            reader,
            ready,
            self._edge._limits(request.scope),
            progress=job.progress,
            snapshot=self._payloads and after is None,
            failure_text=str,
        )

    # -- changing ------------------------------------------------------------------------------------------------------

    async def _change(self, request: Request) -> Response:
        body = await object_body(request, 16_384)
        name: Any = body.get("queue")
        jobs = self._jobs(request, name if isinstance(name, str) else None)
        match request.path_params["change"]:
            case "cancel":
                return json_reply(request, {"done": await jobs.cancel(_id(body.get("id")))})
            case "retry":
                return json_reply(request, {"done": await jobs.retry_dead(_id(body.get("id")))})
            case "retry-all":
                return json_reply(request, await self._retry_all(jobs, body.get("cursor"), body.get("before")))
            case "pause":
                await jobs.pause()
            case "resume":
                await jobs.resume()
            case _:
                raise Problem(404, "unknown_change", "There are cancel, retry, retry-all, pause and resume.")
        return json_reply(request, {"done": True})

    async def _retry_all(self, jobs: Any, cursor: Any, before: Any) -> dict[str, Any]:
        """One batch, the oldest first. What dies again after the first one began is not tried again for ever."""
        if before is None:
            before = await jobs._transport.send(CLOCK)
        if not isinstance(before, int) or not isinstance(cursor, str | None):
            raise Problem(400, "bad_parameter", "Give the cursor and the time that the batch before returned.")
        page = await jobs.by_state("dead", limit=BATCH, cursor=cursor)
        due = [job for job in page.jobs if job.finished_at is None or job.finished_at.timestamp() * 1000 < before]
        done = await asyncio.gather(*(jobs.retry_dead(job.id) for job in due))
        over = page.next is None or len(due) < len(page.jobs)
        return {"retried": sum(done), "cursor": None if over else page.next, "before": before}


class _Masked(EventStream):
    """That something was said, not what."""

    def _encode(self, events: Sequence[Event[Any]]) -> bytes:
        return super()._encode([_mask(event) for event in events])


def _mask(event: Event[Any]) -> Event[Any]:
    match event:
        case Chunk():
            return replace(event, data="")
        case Data():
            return replace(event, value=None)
        case Completed():
            return cast("Event[Any]", replace(event, result=None))
        case _:
            return event


def _id(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise Problem(400, "bad_parameter", "Give the id of a job.")
    return check_id(value)
