"""The UI message stream of the Vercel AI SDK (v5, v6, v7): a backend for ``useChat``.

::

    POST  {path}               a message: makes a job and streams it
    GET   {path}/{id}/stream   the answer that is under way, from its start; 204 when there is none
    POST  {path}/{id}/stop     stop it

{id} is the chat's id, or the run id of the header ``x-workflow-run-id``, with which `WorkflowChatTransport` reconnects
(``?startIndex=``).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from outlast import (
    Cancelled,
    Chunk,
    Completed,
    Data,
    Event,
    Failed,
    Gap,
    IdempotencyConflictError,
    InvalidArgumentError,
    JobInUseError,
    Progress,
    Restarted,
)
from outlast.codec import dump_json
from outlast.protocol import Call, Keys
from outlast.protocol.wire import maybe_text
from outlast.records import TERMINAL

from .._edge import ANY, Action, AnyJob, AnyQueue, Edge, owned_key, parse_payload
from .._frames import SSE_HEADERS, FailureText, dump
from .._http import Problem, idempotency_key, json_reply, object_body
from .._stream import CutOff, Limits, Reader, Stream
from ._facade import Facade, as_dict, submit

__all__ = ["AiSdk", "Chunks"]

RUN = "run-"
CHAT_TTL_MS = 86_400_000
"""How long a chat finds its latest answer: a day, far longer than a page waits for one."""
PAD: dict[str, Any] = {"type": "data-outlast-pad", "data": 0, "transient": True}
PASSED = ("text-", "reasoning-", "tool-", "source-", "data-")
"""Chunks that a worker may emit by itself begin like this …"""
PASSED_WHOLE = frozenset({"file", "message-metadata", "start-step", "finish-step"})
"""… or are these. Start, finish, error and abort are the job's."""

Chunk_ = dict[str, Any]


class AiSdk(Facade):
    """A backend for ``useChat`` over one queue, whose payload is the body that useChat posts.

    - `queue`: one of the edge's; the only one by default.
    - `path`: useChat's `api`.
    - `restart`: what a viewer gets when a new attempt starts over. "data": the parts of both stay, with a part of type
      ``data-outlast-restarted`` in between; show only what follows the last one. "reset-step" (AI SDK 7 only, older
      ones break off): the old parts vanish by themselves.
    - `replay_finished`: answer a resume with an answer that has ended, as long as its record lives, instead of 204.
      For apps that store no messages themselves.
    - `supersede`: a new message of a chat cancels the answer that is still under way there: nobody could see it.

    The handler's text becomes text parts; its `emit({...})` of the SDK's own chunks (reasoning, tools, sources, files,
    data) is passed through, any other value becomes a ``data-outlast`` part. The answer's text is the job's result, if
    that is a str.
    """

    def __init__(
        self,
        edge: Edge,
        queue: AnyQueue | None = None,
        *,
        path: str = "/api/chat",
        restart: Literal["data", "reset-step"] = "data",
        replay_finished: bool = False,
        supersede: bool = True,
    ) -> None:
        super().__init__(edge)
        if restart not in ("data", "reset-step"):
            raise InvalidArgumentError(f"restart={restart!r} is not known; give 'data' or 'reset-step'")
        self._queue = self._only(queue)
        self._path = path
        self._reset = restart == "reset-step"
        self._replay_finished = replay_finished
        self._supersede = supersede

    @property
    def routes(self) -> list[BaseRoute]:
        one = self._path + "/{id:path}"
        return [
            self._route(self._path, self._send, "POST"),
            self._route(f"{one}/stream", self._resume, "GET"),
            self._route(f"{one}/stop", self._stop, "POST"),
        ]

    def _fail(self, problem: Problem) -> Response:
        # The SDK shows the body's text as the error's message.
        return Response(problem.body["detail"], problem.status, problem.headers, media_type="text/plain")

    async def _send(self, request: Request) -> Response:
        edge, queue = self._edge, self._queue
        caller = await edge._owner(request, "enqueue", None)
        if caller is None:
            raise Problem(403, "forbidden", "You may not chat here.")
        owner = caller if isinstance(caller, str) else None
        body = await object_body(request, edge._most(queue), untyped=True)
        payload = parse_payload(queue, body)
        jobs = edge._jobs(request, queue)
        chat = body.get("id")
        key = idempotency_key(request)
        if key is None and isinstance(chat, str) and body.get("trigger") == "submit-message":
            # The same message once more is a repeat; a regeneration is meant, however often it is asked for.
            key = dump_json(body)
        id = None
        if key is not None:
            # An id that can be told before the job is made: the chat's note and the job go out together.
            key = owned_key(owner, f"chat {queue.name} {key}")
            id = sha256(key.encode()).hexdigest()[:32]

        def note(id: str) -> Call[str | None]:
            return Call(("SET", _chat_key(jobs._keys, owner, str(chat)), id, "PX", str(CHAT_TTL_MS), "GET"), maybe_text)

        try:
            id, before = await submit(
                jobs, payload, note if isinstance(chat, str) else None, owner=owner, id=id, idempotency_key=key
            )
        except IdempotencyConflictError:
            raise Problem(422, "idempotency_conflict", "This Idempotency-Key was used with another message.") from None
        except JobInUseError as error:
            id, before = error.job_id, None  # a repeat whose key is gone
        except InvalidArgumentError as error:
            raise Problem(422, "invalid", f"{error}.") from None
        if before is not None and before != id and self._supersede:
            job, _ = await asyncio.gather(jobs.get(id), jobs.cancel(before))
        else:
            job = await jobs.get(id)
        if job is None:
            raise Problem(503, "unavailable", "The message was taken, but cannot be read yet. Reload.")
        return self._stream(request, job)

    async def _resume(self, request: Request) -> Response:
        start = request.query_params.get("startIndex")
        try:
            index = None if start is None else int(start[:12])
        except ValueError:
            raise Problem(400, "bad_parameter", "?startIndex= takes a whole number.") from None
        job = await self._find(request, "watch")
        if job is None and index is not None:
            raise Problem(404, "not_found", "There is no such answer.")  # 204 would be asked again without end
        if job is None or (index is None and job.status in TERMINAL and not self._replay_finished):
            return Response(status_code=204, headers={"Cache-Control": "no-store"})
        return self._stream(request, job, index)

    async def _stop(self, request: Request) -> Response:
        job = await self._find(request, "cancel")
        if job is not None and job.status not in TERMINAL:
            most, headers = self._edge._most(self._queue), request.headers
            empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
            body = {} if empty else await object_body(request, most, untyped=True)
            if body.get("activeStreamId") in (None, job.id, RUN + job.id):  # else it means an answer before this one
                await self._edge._jobs(request, self._queue).cancel(job.id)
        return json_reply(request, {"success": True})

    async def _find(self, request: Request, action: Action) -> AnyJob | None:
        id = str(request.path_params["id"])
        if id.startswith(RUN) and (job := await self._load(request, action, self._queue, id[len(RUN) :])) is not None:
            return job
        caller = await self._edge._owner(request, action, None)
        if caller is None:
            return None
        jobs = self._edge._jobs(request, self._queue)
        chat = _chat_key(jobs._keys, caller if isinstance(caller, str) else None, id)
        job_id = await jobs._transport.send(Call(("GET", chat), maybe_text))
        job = None if job_id is None else await jobs.get(job_id)
        return job if job is not None and (caller is ANY or caller == job.owner) else None

    def _stream(self, request: Request, job: AnyJob, start: int | None = None) -> Response:
        chunks = Chunks(_message_id(job), reset=self._reset, failure_text=self._edge._failure_text)
        headers = {**SSE_HEADERS, "x-vercel-ai-ui-message-stream": "v1", "x-workflow-run-id": RUN + job.id}
        if start is not None and start < 0:
            # It counts from the end to begin at a part's start; all parts do so at the answer's own. The index of the
            # last chunk is told such that the client comes to 0.
            headers["x-workflow-stream-tail-index"] = str(-start - 1)
        reader = self._edge._reader(request, self._queue, job)
        return _ChunkStream(reader, self._edge._limits(request.scope), headers, chunks, start)


class Chunks:
    """The chunks of a job's events, in order. Pure: the same events give the same chunks.

    A client that counts (startIndex) must find the same place after the events before a restart are gone. So no entry
    gives more than two chunks, and at a restart the count is padded to what it can be at most by then.
    """

    def __init__(self, message_id: str, *, reset: bool, failure_text: FailureText) -> None:
        self.count = 0
        """Chunks so far."""
        self._message_id = message_id
        self._reset = reset
        self._failure_text = failure_text
        self._part: str | None = None
        self._text: list[str] = []

    def open(self) -> Iterator[Chunk_]:
        yield from self._counted({"type": "start", "messageId": self._message_id}, {"type": "start-step"})

    def take(self, event: Event[Any]) -> Iterator[Chunk_]:
        """What an event is to a viewer."""
        match event:
            case Chunk():
                yield from self._say(event.id, event.data)
            case Data():
                yield from self._data(event.value)
            case Progress():
                data = {"value": event.value}
                yield from self._counted({"type": "data-outlast-progress", "data": data, "transient": True})
            case Restarted():
                yield from self._restart({"attempt": event.attempt}, at=2 * int(event.id.partition("-")[2]) + 1)
            case Gap():
                yield from self._restart({"attempt": event.attempt, "gap": True})
            case Completed():
                if isinstance(event.result, str):
                    said = "".join(self._text)
                    if not event.result.startswith(said):
                        yield from self._restart({"attempt": event.attempt})
                        said = ""
                    if rest := event.result[len(said) :]:
                        yield from self._say(event.id, rest)
                yield from self._end()
                yield from self._counted({"type": "finish-step"}, {"type": "finish", "finishReason": "stop"})
            case Failed():
                yield from self._end()
                yield from self._counted({"type": "error", "errorText": self._failure_text(event.error)})
                yield from self._counted({"type": "finish", "finishReason": "error"})
            case Cancelled():
                yield from self._end()
                yield from self._counted({"type": "abort", "reason": "cancelled"})
                yield from self._counted({"type": "finish", "finishReason": "other"})

    def _counted(self, *chunks: Chunk_) -> Iterator[Chunk_]:
        self.count += len(chunks)
        yield from chunks

    def _say(self, id: str, text: str) -> Iterator[Chunk_]:
        if self._part is None:
            self._part = id
            yield from self._counted({"type": "text-start", "id": id})
        self._text.append(text)
        yield from self._counted({"type": "text-delta", "id": self._part, "delta": text})

    def _end(self) -> Iterator[Chunk_]:
        part, self._part = self._part, None
        if part is not None:
            yield from self._counted({"type": "text-end", "id": part})

    def _data(self, value: Any) -> Iterator[Chunk_]:
        chunk = as_dict(value)
        kind = chunk.get("type")
        if not isinstance(kind, str) or not (kind.startswith(PASSED) or kind in PASSED_WHOLE):
            chunk = {"type": "data-outlast", "data": value}
        elif kind == "text-delta":
            self._text.append(str(chunk.get("delta", "")))
        elif self._reset and kind.endswith("-step"):
            return  # a reset takes back one step, so the answer is one
        yield from self._end()
        yield from self._counted(chunk)

    def _restart(self, data: dict[str, Any], *, at: int = 0) -> Iterator[Chunk_]:
        """`at`: the count that all viewers are brought to, those who saw what was before and those who did not."""
        self._text.clear()
        yield from self._end()
        yield from self._counted(*[PAD] * (at - self.count))
        yield from self._counted(
            {"type": "reset-step"} if self._reset else {"type": "data-outlast-restarted", "data": data}
        )


class _ChunkStream(Stream):
    def __init__(
        self, reader: Reader, limits: Limits, headers: dict[str, str], chunks: Chunks, start: int | None
    ) -> None:
        super().__init__(reader, (), limits, headers)
        self._chunks = chunks
        self._skip = max(0, start or 0)
        self._counts = start is not None
        """Whether the client reconnects by itself until it has seen `finish`."""

    def _open(self) -> bytes:
        return self._frames(self._chunks.open())

    def _encode(self, events: Sequence[Event[Any]]) -> bytes:
        frames: list[bytes] = []
        for event in events:
            if isinstance(event, Gap) and self._chunks.count == 2:
                self._skip = 0  # what the count refers to is gone
            frames.append(self._frames(self._chunks.take(event), end=event.type in TERMINAL))
        if self._reader.tail.done:
            frames.append(b"data: [DONE]\n\n")
        return b"".join(frames)

    def _close(self, reason: str) -> bytes:
        if self._counts:
            return b""
        raise CutOff(f"an AI SDK stream ends before its answer: {reason}")

    def _frames(self, chunks: Iterator[Chunk_], *, end: bool = False) -> bytes:
        first, made = self._chunks.count, list(chunks)
        if end:
            self._skip = min(self._skip, self._chunks.count - 1)  # `finish` is for everybody, however he has counted
        return b"".join(b"data: %b\n\n" % dump(chunk) for place, chunk in enumerate(made, first) if place >= self._skip)


def _chat_key(keys: Keys, owner: str | None, chat: str) -> str:
    return f"{keys.base}chat:{sha256(json.dumps([owner, chat]).encode()).hexdigest()}"


def _message_id(job: AnyJob) -> str:
    """The id of the message that the answer is: the one that it goes on with after a tool call, else the job's."""
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        last: Any = json.loads(job._payload or "")["messages"][-1]
        if last["role"] == "assistant" and isinstance(last["id"], str):
            return str(last["id"])
    return job.id
