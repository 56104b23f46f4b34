"""The routes: enqueue, get, cancel, watch.

::

    POST    …/jobs                 make a job
    GET     …/jobs/{id}            the record
    POST    …/jobs/{id}/cancel     stop it
    GET     …/jobs/{id}/events     what it says

where … is ``/v1/queues/{queue}``, and ``/v1`` as well when the edge serves exactly one queue.

**Enqueue** takes ``{"payload": …}`` as application/json, with the options that the caller may choose beside the
payload, and an Idempotency-Key header. 202 with a Location for a new job, 200 for the one that the key belongs to:
``{"id", "status", "deduplicated", "url", "events_url", "cancel_url"}``. A key that was used with another payload: 422.

**The record** has an ETag; ``?wait=20`` holds the answer back until the job has ended, for at most so many seconds.

**Events** come as Server-Sent Events, or as pages where Accept prefers application/json. The first is `state` (status,
attempt, progress), without an id and again whenever it changes; then chunk, data, progress, restarted and gap (both:
drop what you have), and one of completed, failed, cancelled. `reconnect` says that the connection, not the job, ends.
The cursor is the Last-Event-ID header, else ``?after=``, else ``?from=latest`` for only what is still to come; a
malformed one is refused even if another wins. Without one, ``?snapshot=1`` sums up what was said so far in a single
`snapshot`. 204: the viewer has had everything, or the job he was following has expired.

**Pages** for ``?after=&limit=&wait=`` are ``{"events": [{"id", "type", "data"}], "next", "done", "retry_after_ms",
"state"}``.

An id that a path cannot carry travels as ``…/jobs/~?id=``: use the URLs of the replies. Errors are RFC 9457 problems.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import warnings
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from hashlib import sha256
from inspect import isawaitable, iscoroutinefunction
from time import time
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, cast
from urllib.parse import quote, unquote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from outlast import (
    ConfigurationError,
    IdempotencyConflictError,
    InvalidArgumentError,
    JobError,
    JobInUseError,
    JobNotFoundError,
    Queue,
    QuotaExceededError,
    ReplyShapeError,
    ServerError,
    TransportError,
)
from outlast._checks import Duration, check_count, check_id, check_several, to_ms
from outlast.codec import dump_json
from outlast.protocol import Tail
from outlast.protocol.tail import REGION_LAG, check_cursor
from outlast.queue import check_queue
from outlast.records import TERMINAL

from ._frames import SSE_HEADERS, FailureText, generic_failure, parse_result, project
from ._http import Problem, idempotency_key, json_reply, number, object_body, precondition, wants
from ._stream import EventStream, Limits, Reader, reconnect
from ._tokens import check_token, make_token

if TYPE_CHECKING:
    from outlast import AsyncClient, AsyncJobs, Job

    AnyJob = Job[Any, Any]
else:
    AnyJob = Any  # of annotations alone; to enqueue, Job is not loaded

__all__ = ["ANY", "Action", "Authorize", "Edge"]

log = logging.getLogger("outlast.edge")

Action = Literal["enqueue", "get", "cancel", "watch", "inspect", "operate"]
"""What `authorize` is asked about. The dashboard asks about the last two."""


class _Any:
    """The type of `ANY`."""

    def __repr__(self) -> str:
        return "ANY"


ANY: Final = _Any()
"""What `authorize` returns for a caller who may see and cancel every job: an operator, your own backend."""

Owner = str | _Any | None
Authorize = Callable[[Request, Action, "AnyJob | None"], Owner | Awaitable[Owner]]
"""The hook of an `Edge` that says who a caller is."""

AnyQueue = Queue[Any, Any]

OPTIONS = frozenset(
    {
        "id",
        "priority",
        "delay",
        "max_attempts",
        "timeout",
        "expires",
        "deadline",
        "result_ttl",
        "idempotency_ttl",
        "owner",
        "webhook",
    }
)
"""What a body may hold besides the payload: arguments of enqueue."""
_METHODS = {"jobs": "POST", "job": "GET, HEAD", "cancel": "POST", "events": "GET, HEAD"}
LOOKS = 6
"""For a job that a lagging replica may not know yet."""
_MARGIN = 5.0
"""Seconds before the platform's own end by which we have ended."""


class Target(NamedTuple):
    """What a path names. `base`: the escaped path in front of ``/jobs``."""

    queue: AnyQueue
    kind: str
    id: str
    base: str


class _Shown:
    """The result as JSON to pass on: a viewer's stream needs neither pydantic nor a result that fits the type."""

    def encode(self, value: Any) -> str:
        return dump_json(value)

    def decode(self, text: str) -> Any:
        return parse_result(text)


class Edge:
    """HTTP routes over the queues of a database, for browsers and SDKs.

    - `client`: an `outlast.AsyncClient`, or a function that gives one for a request (Cloudflare's environment comes
      with the request).
    - `queues`: the declared queues to serve. One alone is also served without its name in the path.
    - `authorize(request, action, job)` says who the caller is: an owner (text), `ANY`, or None for nobody. It may be
      async; a plain one runs in a thread. `action` is enqueue, get, cancel or watch; `job` is None for enqueue and for
      an id that nobody has. `outlast_edge.dashboard` asks with inspect and operate, for the whole of the queues. The
      owner is stored on the jobs he makes, and other people's jobs answer him exactly like ids that nobody has. It may
      raise Starlette's HTTPException (401, 429 …). A job without an owner is seen with `ANY` only.
    - `public`: serve everybody, without `authorize`. Whoever learns an id can read and cancel that job. It warns.
    - `accept`: which of id, priority, delay, max_attempts, timeout, expires, deadline, result_ttl and idempotency_ttl a
      caller may choose; by default none, because they are for your users to abuse. A caller with `ANY` may choose all
      of them, and `owner`.
    - `secret`: for `watch_token`; several to change it (the first signs, all are accepted). Default:
      OUTLAST_EDGE_SECRET.
    - `failure_text`: from a failure's text on the record to what an end user may read; one sentence by default.
    - `max_stream` (240 s): how long one event stream lasts before it asks its viewer to come back. Below your
      platform's limit; where the platform tells its deadline (Vercel, Lambda), 5 s before it at the latest.
    - `max_polls` (800): reads for one request.
    - `keepalive` (15 s): silence before a comment goes out, below the idle limit of the proxies in between.
    - `max_wait` (25 s): the most that ``?wait=`` gives.
    - `send_timeout` (30 s): how long a viewer may read nothing while there is something for it.
    - `max_body`: bytes of a request; by default twice the queue's `max_payload` and 16 KiB.
    - `prefix` ("/v1"): in front of all paths.
    """

    def __init__(
        self,
        client: AsyncClient | Callable[[Request], AsyncClient],
        *,
        queues: Sequence[AnyQueue],
        authorize: Authorize | None = None,
        public: bool = False,
        accept: Collection[str] = (),
        secret: str | bytes | Sequence[str | bytes] | None = None,
        failure_text: FailureText = generic_failure,
        max_stream: Duration = 240.0,
        max_polls: int = 800,
        keepalive: Duration = 15.0,
        max_wait: Duration = 25.0,
        send_timeout: Duration = 30.0,
        max_body: int | None = None,
        prefix: str = "/v1",
    ) -> None:
        if authorize is None and not public:
            raise ConfigurationError(
                "Edge needs authorize=: a function (request, action, job) that says who the caller is. "
                "public=True serves everybody instead"
            )
        if authorize is not None and public:
            raise ConfigurationError("authorize and public=True contradict each other; give one of them")
        if public:
            warnings.warn(
                "Edge(public=True): everybody may enqueue, and who learns a job's id may read and cancel it",
                stacklevel=2,
            )
        if authorize is not None and not callable(authorize):
            raise InvalidArgumentError(
                f"authorize is {type(authorize).__name__}; give a function (request, action, job)"
            )
        if not callable(client) and not hasattr(client, "aclose"):
            # Its enqueue would make the job, and the answer would be an error all the same.
            raise InvalidArgumentError(f"client is {type(client).__name__}; give an AsyncClient, or a function of one")
        check_several(queues, "queues")
        for queue in queues:
            check_queue(queue)
        check_several(accept, "accept")
        self.queues = {queue.name: queue for queue in queues}
        if not queues or len(self.queues) != len(queues):
            raise InvalidArgumentError("queues is empty or names a queue twice; give each queue to serve once")
        if unknown := set(accept) - (OPTIONS - {"owner"}):
            raise InvalidArgumentError(
                f"accept={sorted(accept)} has {sorted(unknown)}; choose from {sorted(OPTIONS - {'owner'})}"
            )
        if prefix and (not prefix.startswith("/") or prefix.endswith("/")):
            raise InvalidArgumentError(f"prefix={prefix!r} is not a path; write it like '/v1', or ''")
        self._client = client
        self._authorize = authorize
        self._accept = frozenset(accept)
        self._secret = secret
        self._failure_text = failure_text
        self._max_stream = to_ms(max_stream, "max_stream", least=0.1) / 1000
        self._max_polls = check_count(max_polls, "max_polls", least=4, most=1_000_000)
        self._keepalive = to_ms(keepalive, "keepalive", least=0.01) / 1000
        self._max_wait = to_ms(max_wait, "max_wait") / 1000
        self._send_timeout = to_ms(send_timeout, "send_timeout", least=0.01) / 1000
        self._max_body = None if max_body is None else check_count(max_body, "max_body", most=2**31)
        self.prefix = prefix
        self._segments = prefix.split("/") if prefix else [""]
        self._shown: dict[str, AnyQueue] = {
            queue.name: Queue(queue.name, result=cast("Any", _Shown())) for queue in queues
        }

    def app(self) -> Starlette:
        """An ASGI application with these routes and nothing else."""
        return Starlette(routes=self.routes, exception_handlers={HTTPException: _http_problem})

    @property
    def routes(self) -> list[BaseRoute]:
        """For ``Mount("/api", routes=edge.routes)`` or the routes of your own application."""
        return [_JobsRoute(self), Route(f"{self.prefix}/watch.js", _watch_js)]

    def watch_token(self, queue: AnyQueue | str, id: str, ttl: Duration = 3600.0) -> str:
        """A signed right to read one job for `ttl` seconds, to be given as ``?token=``.

        For EventSource, which cannot send headers, and for viewers without an account. It opens the record and its
        events, not cancel, and is not asked for again while a stream lasts. It shows up in the logs of servers, so
        keep `ttl` near the job's own length. Raises ConfigurationError without a secret.
        """
        name = queue if isinstance(queue, str) else queue.name
        if name not in self.queues:
            raise InvalidArgumentError(f"queue={name!r} is not served here; choose from {sorted(self.queues)}")
        secrets = self._secrets()
        if not secrets:
            raise ConfigurationError("watch tokens need Edge(secret=…) or OUTLAST_EDGE_SECRET: 32 random characters")
        return make_token(secrets[0], name, check_id(id), to_ms(ttl, "ttl", least=1) / 1000)

    def _secrets(self) -> list[bytes]:
        given = self._secret if self._secret is not None else os.environ.get("OUTLAST_EDGE_SECRET") or ()
        several = [given] if isinstance(given, (str, bytes)) else list(given)
        secrets = [item.encode() if isinstance(item, str) else item for item in several]
        if any(len(item) < 16 for item in secrets):
            raise ConfigurationError("the secret for watch tokens is shorter than 16 bytes; use 32 random characters")
        return secrets

    # -- one request ---------------------------------------------------------------------------------------------------

    def find(self, scope: Scope) -> Target | None:
        """What the path names, if it is ours. The escaped path decides: an id may hold a slash."""
        escaped = cast("bytes", scope.get("raw_path") or b"").partition(b"?")[0].decode("latin-1")
        if unquote(escaped) != scope["path"]:
            escaped = quote(scope["path"])  # none was given, or somebody has rewritten the path since
        parts = escaped.split("/")
        root = scope.get("root_path", "").rstrip("/")
        # A proxy may have taken the root off already; then the whole path is ours.
        skip = next((n for n in range(1, len(parts)) if unquote("/".join(parts[:n])) == root), 1)
        base, rest = "/".join(parts[:skip]) or quote(root), ["", *parts[skip:]]
        if rest[: len(self._segments)] != self._segments:
            return None
        rest = rest[len(self._segments) :]
        base += self.prefix
        try:
            if rest[:1] == ["queues"] and len(rest) > 2:
                queue = self.queues.get(unquote(rest[1], errors="strict"))
                base += f"/queues/{rest[1]}"
                rest = rest[2:]
            else:
                queue = next(iter(self.queues.values())) if len(self.queues) == 1 else None
            if queue is None or rest[:1] != ["jobs"]:
                return None
            match rest[1:]:
                case []:
                    return Target(queue, "jobs", "", base)
                case [id] if id:
                    kind = "job"
                case [id, ("cancel" | "events") as kind] if id:
                    pass
                case _:
                    return None
            return Target(queue, kind, unquote(id, errors="strict"), base)
        except UnicodeDecodeError:
            return None

    async def answer(self, target: Target, request: Request) -> Response:
        """The response to a request that is ours, whatever goes wrong."""
        allow = f"{_METHODS[target.kind]}, OPTIONS"
        try:
            if request.method == "OPTIONS":
                return Response(status_code=204, headers={"Allow": allow})
            if request.method not in allow.split(", "):
                raise Problem(405, "method_not_allowed", f"Use {allow}.", headers={"Allow": allow})
            if target.id == "~" and "id" in request.query_params:
                target = target._replace(id=request.query_params["id"])
            jobs = self._jobs(request, target.queue)
            match target.kind:
                case "jobs":
                    return await self._enqueue(request, target, jobs)
                case "job":
                    return await self._get(request, target, jobs)
                case "cancel":
                    return await self._cancel(request, target, jobs)
                case _:
                    return await self._events(request, target, jobs)
        except Exception as error:
            return problem_of(error, f"{request.method} {target.kind}").response()

    def _jobs(self, request: Request, queue: AnyQueue) -> AsyncJobs[Any, Any]:
        client = self._client(request) if callable(self._client) else self._client
        return client.queue(queue)

    # -- who may -------------------------------------------------------------------------------------------------------

    async def _owner(self, request: Request, action: Action, job: AnyJob | None) -> Owner:
        if self._authorize is None:
            return ANY
        if iscoroutinefunction(self._authorize) or sys.platform == "emscripten":
            answer = self._authorize(request, action, job)
        else:
            answer = await run_in_threadpool(self._authorize, request, action, job)
        owner = await answer if isawaitable(answer) else answer
        if owner is None or isinstance(owner, (str, _Any)):
            return owner or None
        raise ConfigurationError(f"authorize returned {type(owner).__name__}; return the owner as str, ANY or None")

    async def _load(self, request: Request, action: Action, target: Target, jobs: AsyncJobs[Any, Any]) -> AnyJob | None:
        """The job, if it is there for this caller. A stranger's costs the same calls as one that does not exist."""
        token = request.query_params.get("token")
        if token is not None and action in ("get", "watch"):
            check_token(self._secrets(), target.queue.name, target.id, token)
        # A replica that lags may not know the job yet. Strangers' jobs are looked for as often as unknown ones.
        for look in range(LOOKS if jobs._settings.read_regions else 1):
            if look > 0:
                await asyncio.sleep(REGION_LAG / LOOKS)
            try:
                job = await jobs.get(target.id)
            except InvalidArgumentError:
                return None  # not an id that any job can have
            owner = ANY if token is not None and action != "cancel" else await self._owner(request, action, job)
            if job is not None and (owner is ANY or (owner is not None and owner == job.owner)):
                return job
        return None

    # -- POST jobs -----------------------------------------------------------------------------------------------------

    async def _enqueue(self, request: Request, target: Target, jobs: AsyncJobs[Any, Any]) -> Response:
        queue = target.queue
        caller = await self._owner(request, "enqueue", None)
        if caller is None:
            raise Problem(403, "forbidden", "You may not enqueue here.")
        key = idempotency_key(request)
        body = await object_body(request, self._most(queue))
        if "payload" not in body:
            raise Problem(422, "bad_body", 'The body has no "payload".')
        options = {name: value for name, value in body.items() if name != "payload"}
        trusted = caller is ANY and self._authorize is not None
        for name in options:
            if name not in OPTIONS:
                mend = "send the header Idempotency-Key" if name == "idempotency_key" else "see the documentation"
                raise Problem(422, "unknown_field", f"{name[:60]!r} is not known here; {mend}.")
            if not trusted and name not in self._accept:
                raise Problem(422, "not_accepted", f"{name!r} is for the server to choose (Edge(accept=…) opens it).")
        owner = caller if isinstance(caller, str) else options.pop("owner", None)
        payload = parse_payload(queue, body["payload"])
        if key is not None:
            key = owned_key(owner, key)
        try:
            if "id" in options and not trusted:
                taken = await jobs.get(options["id"])
                if taken is not None and caller is not ANY and taken.owner != caller:
                    raise JobInUseError("somebody else's", taken.id)
            made = await jobs.enqueue(payload, owner=owner, idempotency_key=key, **options)
        except InvalidArgumentError as error:
            raise Problem(422, "invalid", f"{error}.") from None
        except IdempotencyConflictError:
            raise Problem(422, "idempotency_conflict", "This Idempotency-Key was used with another payload.") from None
        except JobInUseError:
            raise Problem(409, "job_in_use", "The id belongs to a job that has not finished.") from None
        job = await jobs.get(made.id) if made.deduplicated else None
        links = _links(target, made.id)
        status = job.status if job is not None else "scheduled" if options.get("delay") else "waiting"
        reply = {"id": made.id, "status": status, "deduplicated": made.deduplicated, **links}
        return json_reply(request, reply, 200 if made.deduplicated else 202, {"Location": links["url"]})

    # -- GET and cancel ------------------------------------------------------------------------------------------------

    async def _get(self, request: Request, target: Target, jobs: AsyncJobs[Any, Any]) -> Response:
        wait = number(request, "wait", 0.0, most=self._limit(request.scope, self._max_wait))
        job = await self._load(request, "get", target, jobs)
        if job is not None and wait > 0 and job.status not in TERMINAL:
            with suppress(TimeoutError, JobError):
                await self._jobs(request, self._shown[target.queue.name]).wait(job.id, timeout=wait)
            job = await jobs.get(job.id)
        if job is None:
            raise _not_found()
        record = self._record(target, job)
        tag, known = precondition(request, record)
        headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
        if known:
            return Response(status_code=304, headers=headers)
        return json_reply(request, record, headers=headers)

    async def _cancel(self, request: Request, target: Target, jobs: AsyncJobs[Any, Any]) -> Response:
        if await self._load(request, "cancel", target, jobs) is None:
            raise _not_found()
        cancelled = await jobs.cancel(target.id)
        job = await jobs.get(target.id)
        if job is None:
            raise _not_found()
        return json_reply(request, {**self._record(target, job), "cancelled": cancelled})

    def _record(self, target: Target, job: AnyJob) -> dict[str, Any]:
        times = {
            name: None if (moment := getattr(job, name)) is None else moment.isoformat(timespec="milliseconds")
            for name in ("created_at", "updated_at", "started_at", "finished_at")
        }
        record = {
            "id": job.id,
            "queue": target.queue.name,
            "status": job.status,
            "attempt": job.attempt,
            "max_attempts": job.max_attempts,
            "progress": job.progress,
            "priority": job.priority,
            "cancel_requested": job.cancel_requested,
            **times,
            **_links(target, job.id),
        }
        if job.status == "completed":
            record["result"] = parse_result(job._result if job._result is not None else "null")
        if job.status == "failed":
            record["error"] = self._failure_text(job.error or "")
        return record

    # -- events --------------------------------------------------------------------------------------------------------

    async def _events(self, request: Request, target: Target, jobs: AsyncJobs[Any, Any]) -> Response:
        kind = wants(request, "text/event-stream", "application/json")
        if kind is None:
            raise Problem(406, "not_acceptable", "Events are there as text/event-stream and as application/json.")
        query = request.query_params
        cursors = [_cursor(text) for text in (request.headers.get("last-event-id"), query.get("after"))]
        after = next((cursor for cursor in cursors if cursor is not None), None)
        if query.get("from", "latest") != "latest":
            raise Problem(400, "bad_parameter", "?from= takes only latest.")
        if kind == "application/json":
            return await self._page(request, target, jobs, after)
        resumed = after is not None
        if not resumed and "from" in query:
            after = "latest"
        snapshot = not resumed and after is None and query.get("snapshot") not in (None, "", "0")
        try:
            job = await self._load(request, "watch", target, jobs)
            if job is None:
                if resumed:
                    return Response(status_code=204, headers={"Cache-Control": "no-store"})
                raise _not_found()
            if request.method == "HEAD":
                return _no_length(Response(headers=SSE_HEADERS))
            reader = self._reader(request, target.queue, job, after)
            tail = reader.tail
            # Whether a finished job has anything left decides between 200 and 204: EventSource stops at that.
            ready = await reader.rest() if job.status in TERMINAL else []
            if tail.done and not ready:
                return Response(status_code=204, headers={"Cache-Control": "no-store"})
        except JobNotFoundError:
            raise _not_found() from None  # it has expired just now
        except (TransportError, ServerError) as error:
            # Any status but 200 would end an EventSource for good.
            log.warning("watch: %s: %s", type(error).__name__, error)
            return Response(b": the database does not answer\n" + reconnect("unavailable"), headers=SSE_HEADERS)
        return EventStream(
            reader,
            ready,
            self._limits(request.scope),
            progress=job.progress,
            snapshot=snapshot,
            failure_text=self._failure_text,
        )

    async def _page(self, request: Request, target: Target, jobs: AsyncJobs[Any, Any], after: str | None) -> Response:
        wait = number(request, "wait", 0.0, most=self._limit(request.scope, self._max_wait))
        limit = int(number(request, "limit", 100, least=1, most=500))
        if after is None and "from" in request.query_params:
            after = "latest"
        job = await self._load(request, "watch", target, jobs)
        if job is None:
            raise _not_found()
        shown = self._jobs(request, self._shown[target.queue.name])
        try:
            page = await shown.events(job.id, after=after, limit=limit, wait=wait)
        except JobError:
            raise _not_found() from None
        events = [
            {"id": event.id, "type": kind, "data": data}
            for event in page.events
            for kind, data in [project(event, self._failure_text)]
        ]
        pause = 0 if page.done else 150 if events else 600 if job.status == "active" else 1000
        state = {"status": job.status, "attempt": job.attempt, "progress": job.progress}
        return json_reply(
            request,
            {"events": events, "next": page.next, "done": page.done, "retry_after_ms": pause, "state": state},
            headers={"Vary": "Accept"},
        )

    def _reader(self, request: Request, queue: AnyQueue, job: AnyJob, after: str | None = None) -> Reader:
        """Reads the events of a job that the caller may see."""
        shown = self._jobs(request, self._shown[queue.name])
        tail = Tail(shown._keys, job.id, shown.queue, after=after, read_regions=shown._settings.read_regions)
        return Reader(
            shown._client._reads,
            tail,
            (job.status, job.attempt),
            blocking=shown._transport.blocking,
            polls=self._max_polls,
        )

    def _most(self, queue: AnyQueue) -> int:
        """Bytes that a request to enqueue may have."""
        return self._max_body if self._max_body is not None else 2 * queue.max_payload + 16 * 1024

    def _limits(self, scope: Scope) -> Limits:
        return Limits(self._limit(scope, self._max_stream), self._keepalive, self._send_timeout)

    def _limit(self, scope: Scope, seconds: float) -> float:
        """`seconds`, or less where the platform says that it ends us before."""
        left = _platform_left(scope)
        return seconds if left is None else max(0.1, min(seconds, left - _MARGIN))


def parse_payload(queue: AnyQueue, value: Any) -> Any:
    """A payload of the queue from JSON that a caller sent."""
    try:
        text = dump_json(value)
        if len(text.encode()) > queue.max_payload:
            raise Problem(413, "too_large", f"The payload may have at most {queue.max_payload} bytes of JSON.")
        return queue.payload_codec.decode(text)
    except (InvalidArgumentError, ReplyShapeError) as error:
        raise Problem(422, "bad_payload", f"The payload {error}.") from None
    except (ValueError, TypeError):
        raise Problem(422, "bad_payload", "The payload is not one of this queue.") from None


def owned_key(owner: str | None, key: str) -> str:
    """A caller's idempotency key as the queue has it: with the owner in it, so that nobody else's can be hit."""
    return "edge:" + sha256(json.dumps([owner, key]).encode()).hexdigest()


def problem_of(error: Exception, what: str) -> Problem:
    """The answer to `what`, which failed: no failure goes through to the server's outermost layer.

    So a CORS layer in between sees it, and the browser shows a status instead of a network error. Raises
    ClientDisconnect again: there is nobody to answer.
    """
    if isinstance(error, ClientDisconnect):
        raise error
    if isinstance(error, Problem):
        return error
    if isinstance(error, HTTPException):
        return _from_exception(error)
    if isinstance(error, (TransportError, ServerError)):
        log.warning("%s: %s: %s", what, type(error).__name__, error)
        wait = max(getattr(error, "retry_after", None) or 0, 60 if isinstance(error, QuotaExceededError) else 5)
        return Problem(
            503,
            "unavailable",
            "The job store does not answer. Try again, with the same Idempotency-Key if there was one.",
            headers={"Retry-After": str(round(wait))},
        )
    log.error("%s failed", what, exc_info=error)
    return Problem(500, "internal", "Something went wrong on the server.")


def _platform_left(scope: Scope) -> float | None:
    """Seconds until the platform ends this request, where it tells: Vercel's runtime, Lambda behind Mangum."""
    context: Any = scope.get("aws.context")
    if context is not None:
        return float(context.get_remaining_time_in_millis()) / 1000
    vercel: Any = sys.modules.get("vercel_runtime.deadline")
    if vercel is not None and (deadline := vercel.get_deadline()) is not None:
        return float(deadline.timestamp()) - time()
    return None


def _cursor(text: str | None) -> str | None:
    """A cursor that was given, None for the start."""
    try:
        cursor = check_cursor(text)
    except InvalidArgumentError:
        cursor = "latest"
    if cursor == "latest":
        raise Problem(400, "bad_cursor", "The cursor is not an event's id; give one, or none for the start.")
    return cursor if text not in (None, "", "0") else None


def _links(target: Target, id: str) -> dict[str, str]:
    """Where to go on with a job: paths on this host."""
    name, query = quote(id, safe=""), ""
    if set(id) & set("/\\%") or id in (".", ".."):
        # Browsers resolve dots and proxies unescape slashes, whatever the escaping: such an id travels beside the path.
        name, query = "~", f"?id={name}"
    url = f"{target.base}/jobs/{name}"
    return {"url": url + query, "events_url": f"{url}/events{query}", "cancel_url": f"{url}/cancel{query}"}


def _not_found() -> Problem:
    return Problem(404, "job_not_found", "There is no such job.")


def _no_length(response: Response) -> Response:
    del response.headers["content-length"]
    return response


def _from_exception(error: HTTPException) -> Problem:
    code = {
        401: "unauthorized",
        403: "forbidden",
        404: "not_found",
        405: "method_not_allowed",
        429: "too_many_requests",
    }
    return Problem(error.status_code, code.get(error.status_code, "error"), error.detail, headers=error.headers)


async def _http_problem(request: Request, error: Exception) -> Response:
    return _from_exception(cast("HTTPException", error)).response()


async def _watch_js(request: Request) -> Response:
    """The helper for browsers: ``import {watchJob} from "/v1/watch.js"``."""
    from importlib.resources import files

    source = files("outlast_edge").joinpath("watch.js").read_bytes()
    headers = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
    return Response(source, media_type="text/javascript", headers=headers)


class _JobsRoute(BaseRoute):
    """All the paths of an edge. Starlette's own matching sees the unescaped path, in which an id's slash cuts it."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        target = self.edge.find(scope) if scope["type"] == "http" else None
        if target is None:
            return Match.NONE, {}
        return Match.FULL, {"endpoint": self.edge, "path_params": {**scope.get("path_params", {})}, "outlast": target}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self.edge.answer(scope["outlast"], Request(scope, receive))
        except ClientDisconnect:
            return
        await response(scope, receive, send)
