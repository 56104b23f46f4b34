"""OpenAI's Chat Completions, for existing applications: their calls outlive deploys of the worker and of the server.

``POST {path}/chat/completions``, plain or as a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from outlast import Cancelled, Chunk, Completed, Data, Event, Failed, Gap, Restarted

from .._edge import AnyJob
from .._frames import SSE_HEADERS, FailureText, dump, parse_result
from .._http import Problem, json_reply
from .._stream import CutOff, Limits, Reader, Stream
from ._facade import as_dict, as_list
from ._openai import OpenAIFacade, text_of

__all__ = ["Deltas", "OpenAIChat"]


class OpenAIChat(OpenAIFacade):
    """Chat Completions over the queues of an edge. `default` and `path`: see `OpenAIFacade`.

    The handler's text is the content; an ``emit({"choices": […]})`` of the API's own chunks is passed through. A result
    that is a dict with "choices" and perhaps "usage" is answered as it is, a str as one message, any other as its JSON.

    What was streamed cannot be taken back in this protocol. When an attempt starts over after its first words, the
    stream goes on if the new attempt says the same, and breaks off with an error once it does not. Answers that are
    not streamed survive every restart.
    """

    @property
    def routes(self) -> list[BaseRoute]:
        return [self._route(f"{self._path}/chat/completions", self._post, "POST")]

    async def _post(self, request: Request) -> Response:
        queue, job, body = await self._create(request)
        shape = {
            "id": f"chatcmpl-{job.id}",
            "created": 0 if job.created_at is None else int(job.created_at.timestamp()),
            "model": body["model"],
        }
        if body.get("stream"):
            usage = bool(as_dict(body.get("stream_options")).get("include_usage"))
            deltas = Deltas(shape, usage=usage, failure_text=self._edge._failure_text)
            return _DeltaStream(self._edge._reader(request, queue, job), self._edge._limits(request.scope), deltas)
        job = await self._finished(request, queue, job)
        if job.status != "completed":
            text = self._edge._failure_text(job.error or "") if job.status == "failed" else "The job was cancelled."
            raise Problem(500, f"job_{job.status}", text, headers={"x-should-retry": "false"})
        return json_reply(request, {**shape, "object": "chat.completion", **_completion(job)})


class Deltas:
    """The chunks of a completion from a job's events. Pure."""

    def __init__(self, shape: dict[str, Any], *, usage: bool, failure_text: FailureText) -> None:
        self._shape = {**shape, "object": "chat.completion.chunk"}
        self._usage = usage
        self._failure_text = failure_text
        self._said = ""
        self._again = ""
        """What a new attempt has to repeat before it may go on."""
        self._other = False
        self.over = False

    def open(self) -> Iterator[dict[str, Any]]:
        yield self._chunk({"role": "assistant", "content": ""})

    def take(self, event: Event[Any]) -> Iterator[dict[str, Any]]:
        match event:
            case Chunk():
                yield from self._say(event.data)
            case Data() if "choices" in as_dict(event.value):
                self._other = True
                yield {**as_dict(event.value), **self._shape}
            case Restarted() | Gap():
                self._again = self._said + self._again
                self._said = ""
                if self._other:
                    yield from self._break()
            case Completed():
                yield from self._complete(event.result)
            case Failed():
                yield from self._fail(self._failure_text(event.error), "job_failed")
            case Cancelled():
                yield from self._fail("The job was cancelled.", "job_cancelled")
            case _:
                pass

    def _say(self, text: str) -> Iterator[dict[str, Any]]:
        repeated = min(len(text), len(self._again))
        if text[:repeated] != self._again[:repeated]:
            yield from self._break()
            return
        self._said += text
        self._again = self._again[repeated:]
        if text := text[repeated:]:
            yield self._chunk({"content": text})

    def _complete(self, result: Any) -> Iterator[dict[str, Any]]:
        choice = as_dict(next(iter(as_list(as_dict(result).get("choices"))), None))
        message = as_dict(choice.get("message")) if choice else {"content": text_of(result)}
        whole = str(message.get("content") or "")
        if not self._other:
            # What was said so far, repeated or still to be repeated, must be how the result begins.
            if not whole.startswith(self._said + self._again):
                yield from self._break()
                return
            if rest := whole[len(self._said + self._again) :]:
                yield self._chunk({"content": rest})
            calls = as_list(message.get("tool_calls"))
            if calls := [{"index": place, **as_dict(call)} for place, call in enumerate(calls)]:
                yield self._chunk({"tool_calls": calls})
            yield self._chunk({}, str(choice.get("finish_reason") or "stop"))
        if self._usage:
            yield {**self._shape, "choices": [], "usage": as_dict(result).get("usage")}

    def _break(self) -> Iterator[dict[str, Any]]:
        yield from self._fail("The answer started over and became another; send the request again.", "restarted")

    def _fail(self, text: str, code: str) -> Iterator[dict[str, Any]]:
        self.over = True
        yield {"error": {"message": text, "type": "server_error", "code": code, "param": None}}

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {**self._shape, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]}


class _DeltaStream(Stream):
    def __init__(self, reader: Reader, limits: Limits, deltas: Deltas) -> None:
        super().__init__(reader, (), limits, SSE_HEADERS)
        self._deltas = deltas

    def _open(self) -> bytes:
        return b"".join(map(_frame, self._deltas.open()))

    def _encode(self, events: Sequence[Event[Any]]) -> bytes:
        frames: list[bytes] = []
        for event in events:
            if not self._deltas.over:
                frames += map(_frame, self._deltas.take(event))
        if self._deltas.over:
            self._reader.tail.done = True  # what follows could not be told
        if self._reader.tail.done:
            frames.append(b"data: [DONE]\n\n")
        return b"".join(frames)

    def _close(self, reason: str) -> bytes:
        raise CutOff(f"a completion's stream ends before the completion: {reason}")


def _completion(job: AnyJob) -> dict[str, Any]:
    result = parse_result(job._result if job._result is not None else "null")
    fields = as_dict(result)
    if "choices" in fields:
        return fields
    message = {"role": "assistant", "content": text_of(result), "refusal": None}
    return {
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": fields.get("usage"),
    }


def _frame(chunk: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % dump(chunk)
