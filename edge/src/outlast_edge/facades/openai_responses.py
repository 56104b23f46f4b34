"""OpenAI's Responses API, background mode included, for the official SDKs and whatever else speaks it.

::

    POST  {path}/responses               make one; answers at once (background), at its end, or as a stream
    GET   {path}/responses/{id}          how it stands; ?stream=true&starting_after=N for its events
    POST  {path}/responses/{id}/cancel   stop it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from outlast import Cancelled, Chunk, Completed, Event, Failed, Gap, Restarted

from .._edge import Action, AnyJob, AnyQueue
from .._frames import SSE_HEADERS, FailureText, frame, parse_result
from .._http import Problem, json_reply
from .._stream import CutOff, Limits, Reader, Stream
from ._facade import as_dict, as_list
from ._openai import OpenAIFacade, payload_of, text_of

__all__ = ["Events", "OpenAIResponses"]

DEFAULTS: dict[str, Any] = {
    "previous_response_id": None,
    "instructions": None,
    "tools": [],
    "tool_choice": "auto",
    "truncation": "disabled",
    "parallel_tool_calls": True,
    "text": {"format": {"type": "text"}},
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_logprobs": 0,
    "temperature": 1.0,
    "reasoning": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "store": True,
    "background": False,
    "service_tier": "default",
    "metadata": {},
    "safety_identifier": None,
    "prompt_cache_key": None,
}
"""What a response repeats of its request: clients require every field."""
STATUSES = {"waiting": "queued", "scheduled": "queued", "active": "in_progress"}


class OpenAIResponses(OpenAIFacade):
    """The Responses API over the queues of an edge. `default` and `path`: see `OpenAIFacade`.

    The handler's text is the output text; events of other kinds are not shown. A result that is a dict with "output" (a
    list of the API's own items, such as function calls) and perhaps "usage" becomes the response's; a str becomes one
    message, and any other result its JSON. When an attempt starts over, its message is closed as incomplete and a new
    output item begins: the response's final output has only the last.
    """

    @property
    def routes(self) -> list[BaseRoute]:
        one = self._path + "/responses/{id}"
        return [
            self._route(f"{self._path}/responses", self._post, "POST"),
            self._route(one, self._get, "GET"),
            self._route(f"{one}/cancel", self._cancel, "POST"),
        ]

    async def _post(self, request: Request) -> Response:
        queue, job, body = await self._create(request)
        if body.get("stream"):
            return self._stream(request, queue, job, -1)
        if not body.get("background"):
            job = await self._finished(request, queue, job)
        return json_reply(request, self._response(queue, job))

    async def _get(self, request: Request) -> Response:
        queue, job = await self._find(request, "get")
        query = request.query_params
        if query.get("stream", "false").lower() in ("true", "1"):
            after = query.get("starting_after", "-1")
            if not after.removeprefix("-").isdecimal() or len(after) > 17:
                raise Problem(400, "bad_parameter", "starting_after takes an event's sequence_number.")
            return self._stream(request, queue, job, int(after))
        return json_reply(request, self._response(queue, job))

    async def _cancel(self, request: Request) -> Response:
        queue, job = await self._find(request, "cancel")
        jobs = self._edge._jobs(request, queue)
        await jobs.cancel(job.id)
        return json_reply(request, self._response(queue, await jobs.get(job.id) or job))

    async def _find(self, request: Request, action: Action) -> tuple[AnyQueue, AnyJob]:
        id = str(request.path_params["id"])
        for queue in self._edge.queues.values():
            # A queue's name may begin like another's, so a name that fits decides nothing yet.
            prefix = _id(queue, "")
            if id.startswith(prefix) and (job := await self._load(request, action, queue, id[len(prefix) :])):
                return queue, job
        raise Problem(404, "not_found", f"There is no response with the id {id[:200]!r}.")

    def _response(self, queue: AnyQueue, job: AnyJob) -> dict[str, Any]:
        resource = Resource(queue, job)
        if job.status == "completed":
            result = parse_result(job._result if job._result is not None else "null")
            text, others, usage = read_result(result)
            output = compose(others, [message(f"msg_{job.id}", text)] if text or not others else [])
            return resource("completed", output=output, usage=usage)
        if job.status == "failed":
            return resource("failed", error=_error(self._edge._failure_text(job.error or "")))
        cancelled = job.status == "cancelled" or job.cancel_requested
        return resource("cancelled" if cancelled else STATUSES[job.status])

    def _stream(self, request: Request, queue: AnyQueue, job: AnyJob, after: int) -> Response:
        events = Events(Resource(queue, job), after=after, failure_text=self._edge._failure_text)
        return _EventStream(self._edge._reader(request, queue, job), self._edge._limits(request.scope), events, after)


class Resource:
    """A response in whatever state."""

    def __init__(self, queue: AnyQueue, job: AnyJob) -> None:
        request = payload_of(job)
        self.id = _id(queue, job.id)
        self.job_id = job.id
        self.created_ms = 0 if job.created_at is None else round(job.created_at.timestamp() * 1000)
        finished = None if job.finished_at is None else int(job.finished_at.timestamp())
        repeated = {name: request.get(name) for name in DEFAULTS}
        self._fields = {
            "id": self.id,
            "object": "response",
            "created_at": self.created_ms // 1000,
            "model": request.get("model", queue.name),
            **{name: DEFAULTS[name] if value is None else value for name, value in repeated.items()},
        }
        self._finished = finished

    def __call__(
        self,
        status: str,
        *,
        output: Sequence[dict[str, Any]] = (),
        error: dict[str, Any] | None = None,
        usage: Any = None,
        at: int | None = None,
    ) -> dict[str, Any]:
        """The response as it stands. `at`: when it was completed, if the record did not say yet."""
        return {
            **self._fields,
            "status": status,
            "completed_at": (self._finished or at) if status == "completed" else None,
            "incomplete_details": None,
            "output": list(output),
            "error": error,
            "usage": usage,
        }


class Events:
    """The events of a response from a job's. Pure: the same events give the same numbers.

    A sequence number is made of the entry's id and the place in what the entry gives: ``n * 16 + place``, plus how much
    the id's time is above the job's own. So a number that a client has kept means the same on every connection, and
    after a restart has dropped what was before. `after`: the last number that the client has.
    """

    def __init__(self, resource: Resource, *, after: int, failure_text: FailureText) -> None:
        self._resource = resource
        self._after = after
        self._failure_text = failure_text
        self._base = 0
        self._origin = 0
        """Where what is said now began: it gives the item its id."""
        self._headless = False
        self._running = False
        self._item: dict[str, Any] | None = None
        self._index = 0
        self._text: list[str] = []
        self._done: list[dict[str, Any]] = []

    def open(self) -> Iterator[dict[str, Any]]:
        yield self._event("created", 0, response=self._resource("queued"))
        yield self._event("queued", 1, response=self._resource("queued"))

    def run(self) -> Iterator[dict[str, Any]]:
        """What follows once a worker has the job."""
        if not self._running:
            self._running = True
            yield self._event("in_progress", 2, response=self._resource("in_progress"))

    def take(self, event: Event[Any]) -> Iterator[dict[str, Any]]:
        match event:
            case Chunk():
                yield from self.run()
                yield from self._say(self._at(event.id), event.data)
            case Restarted():
                yield from self.run()
                at = self._at(event.id)
                yield from self._restart(at if at > self._base else self._base + 8, event.id)
            case Gap():
                yield from self.run()
                before = self._at(event.first_available) - 16
                if self._base == 0 and before + 5 <= self._after:
                    self._headless = True  # the client has had what is gone, and its item 0 is open
                    yield from self._begin(3)
                else:
                    yield from self._restart(max(before, self._base + 8), event.id)
            case Completed():
                yield from self._complete(event.id, event.result)
            case Failed():
                response = self._resource("failed", error=_error(self._failure_text(event.error)))
                yield from self._finish("failed", response)
            case Cancelled():
                # There is no event of that name; the status tells.
                yield from self._finish("incomplete", self._resource("cancelled"))
            case _:
                yield from self.run()

    def _complete(self, id: str, result: Any) -> Iterator[dict[str, Any]]:
        yield from self.run()
        text, others, usage = read_result(result)
        said = "".join(self._text)
        if self._headless and text.endswith(said):
            said = text
        if not text.startswith(said):
            yield from self._restart(self._base + 8, id)
            said = ""
        at = self._base + 16
        if rest := text[len(said) :]:
            yield from self._say(at, rest)
            at += 6
        own = [] if self._item is None else [message(self._item["id"], text)]
        self._text = [text]
        yield from self._end("completed", at)
        at += 3
        for item in others:
            if item.get("type") != "message":
                yield from self._whole(item, at)
                at += 4
        finished = int(id.partition("-")[0]) // 1000
        response = self._resource("completed", output=compose(others, own), usage=usage, at=finished)
        yield self._event("completed", at, response=response)

    def _finish(self, kind: str, response: dict[str, Any]) -> Iterator[dict[str, Any]]:
        at = self._base + 16
        partial = [] if self._item is None else [message(self._item["id"], "".join(self._text), "incomplete")]
        yield from self._end("incomplete", at)
        yield self._event(kind, at + 3, response={**response, "output": partial})

    def _say(self, base: int, text: str) -> Iterator[dict[str, Any]]:
        self._base = base
        if self._item is None:
            yield from self._begin(base)
        self._text.append(text)
        yield self._part("output_text.delta", base + 5, delta=text, logprobs=[])

    def _begin(self, at: int) -> Iterator[dict[str, Any]]:
        self._item = message(f"msg_{self._resource.job_id}_{self._origin}", "", "in_progress")
        yield self._event("output_item.added", at, output_index=self._index, item={**self._item, "content": []})
        yield self._part("content_part.added", at + 1, part=_part(""))

    def _end(self, status: str, at: int) -> Iterator[dict[str, Any]]:
        item, text = self._item, "".join(self._text)
        if item is not None:
            yield self._part("output_text.done", at, text=text, logprobs=[])
            yield self._part("content_part.done", at + 1, part=_part(text))
            item = message(item["id"], text, status)
            yield self._event("output_item.done", at + 2, output_index=self._index, item=item)
            self._index += 1
        self._item = None
        self._text.clear()

    def _restart(self, base: int, id: str) -> Iterator[dict[str, Any]]:
        """The message that is open is no more. `id`: of what starts over."""
        if self._item is None and self._index == 0 and not id.endswith("-1"):
            # What was said before is gone, so there is nothing to close; a viewer that comes back may have had it as
            # item 0, and the next must be another.
            yield from self._begin(3)
        self._base = self._origin = base
        yield from self._end("incomplete", base)

    def _whole(self, item: dict[str, Any], at: int) -> Iterator[dict[str, Any]]:
        """An item that comes in one piece."""
        where = {"output_index": self._index, "item_id": item.get("id")}
        called = item.get("type") == "function_call"
        begun = {**item, "arguments": "", "status": "in_progress"} if called else item
        yield self._event("output_item.added", at, output_index=self._index, item=begun)
        if called:
            arguments, name = item.get("arguments", ""), item.get("name")
            yield self._event("function_call_arguments.delta", at + 1, delta=arguments, **where)
            yield self._event("function_call_arguments.done", at + 2, arguments=arguments, name=name, **where)
        yield self._event("output_item.done", at + 3, output_index=self._index, item=item)
        self._index += 1

    def _part(self, kind: str, number: int, **more: Any) -> dict[str, Any]:
        item = self._item or {}
        return self._event(kind, number, item_id=item["id"], output_index=self._index, content_index=0, **more)

    def _event(self, kind: str, number: int, **more: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": number, **more}

    def _at(self, id: str) -> int:
        ms, _, n = id.partition("-")
        # Twelve days of ms stay below 2**53, which is as far as JavaScript counts.
        return (max(0, int(ms) - self._resource.created_ms) << 23) + (int(n) << 4)


class _EventStream(Stream):
    def __init__(self, reader: Reader, limits: Limits, events: Events, after: int) -> None:
        super().__init__(reader, (), limits, SSE_HEADERS)
        self._events = events
        self._after = after

    def _open(self) -> bytes:
        return self._frames(self._events.open())

    def _encode(self, events: Sequence[Event[Any]]) -> bytes:
        frames = [self._frames(self._events.take(event)) for event in events]
        if self._reader.look(events)[0] == "active":
            frames.append(self._frames(self._events.run()))
        return b"".join(frames)

    def _close(self, reason: str) -> bytes:
        raise CutOff(f"a response's stream ends before the response: {reason}")

    def _frames(self, events: Iterator[dict[str, Any]]) -> bytes:
        return b"".join(frame(event["type"], event) for event in events if event["sequence_number"] > self._after)


def read_result(result: Any) -> tuple[str, list[dict[str, Any]], Any]:
    """The text of a result, its output items if it has any, and its usage."""
    fields = as_dict(result)
    if "output" not in fields:
        return text_of(result), [], None
    output = [as_dict(item) for item in as_list(fields["output"])]
    parts = [as_dict(part) for item in output if item.get("type") == "message" for part in as_list(item.get("content"))]
    return "".join(str(part.get("text", "")) for part in parts), output, fields.get("usage")


def compose(items: Sequence[dict[str, Any]], own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The final output: the result's items, with the message that was streamed in the place of its own."""
    kept: list[dict[str, Any]] = []
    for item in items:
        if item.get("type") != "message":
            kept.append(item)
        elif own:
            kept.append({**item, **own.pop()})
    return kept + own


def message(id: str, text: str, status: str = "completed") -> dict[str, Any]:
    return {"type": "message", "id": id, "status": status, "role": "assistant", "content": [_part(text)]}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _error(text: str) -> dict[str, Any]:
    return {"code": "server_error", "message": text}


def _id(queue: AnyQueue, job_id: str) -> str:
    return f"resp_{queue.name}_{job_id}"
