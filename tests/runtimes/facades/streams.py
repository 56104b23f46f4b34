"""Durable Streams with a side to write: what the conformance suite needs to test the side that we have.

A stream is a job that a worker has; a write is a flush of that worker, and closing settles the job. So the reading side
under test is the product's, over the real layout. Writing is for the tests alone: no producers, forks or expiry.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from outlast import AsyncClient, Event
from outlast.protocol import holding
from outlast_edge import Edge
from outlast_edge.facades.durable_streams import HEADERS, DurableStreams, Json, _offset

TIMES = {"lease_ms": 3_600_000, "result_ttl_ms": 3_600_000, "dead_ttl_ms": 3_600_000}


class Form(Json):
    """The messages as they were written; the end is none of them."""

    def __init__(self, content_type: str) -> None:
        self.content_type = content_type
        self.is_json = content_type.partition(";")[0].strip().lower() == "application/json"

    def messages(self, events: Sequence[Event[Any]], failure_text: Any) -> list[bytes]:
        return [event.data.encode("latin-1") for event in events if event.type == "chunk"]

    def pack(self, messages: Sequence[bytes]) -> bytes:
        return super().pack(messages) if self.is_json else b"".join(messages)


@dataclass
class Written:
    form: Form
    job: holding.Reserved
    n: int = 0
    closed: bool = False
    seq: str = ""


class WritableStreams(DurableStreams):
    def __init__(self, edge: Edge, client: AsyncClient) -> None:
        super().__init__(edge, path="/v1/stream")
        self.jobs = client.queue(self._queue)
        self.streams: dict[str, Written] = {}
        self.requests = 0

    @property
    def routes(self) -> list[BaseRoute]:
        return [*super().routes, self._route(self._path + "/{id:path}", self.write, "PUT", "POST", "DELETE")]

    def _form(self, job: Any) -> Json:
        return self.streams[job.id].form

    async def _load(self, request: Request, action: Any, queue: Any, id: str) -> Any:
        return await super()._load(request, action, queue, id) if id in self.streams else None

    async def write(self, request: Request) -> Response:
        id, stream = request.path_params["id"], self.streams.get(request.path_params["id"])
        kind = request.headers.get("content-type")
        body, close = await request.body(), request.headers.get("stream-closed") == "true"
        if request.method == "DELETE":
            return Response(status_code=204 if self.streams.pop(id, None) else 404, headers=HEADERS)
        if request.method == "PUT":
            kind = kind or "application/octet-stream"
            if stream is not None:
                same = stream.form.content_type.lower() == kind.lower() and stream.closed == close
                return await self.answer(stream, 200 if same else 409)
            stream = self.streams[id] = Written(Form(kind), await self.take(id))
            if body and not await self.append(stream, body, empty=True):
                return Response(status_code=400, headers=HEADERS)
            if close:
                await self.close(stream)
            response = await self.answer(stream, 201)
            response.headers["Location"] = str(request.url)
            return response
        if stream is None:
            return Response(status_code=404, headers=HEADERS)
        if stream.closed:
            return await self.answer(stream, 409 if body else 204)
        if not body and not close:
            return Response(status_code=400, headers=HEADERS)
        if body:
            if kind is None:
                return Response(status_code=400, headers=HEADERS)
            seq = request.headers.get("stream-seq", "")
            if kind.lower() != stream.form.content_type.lower() or (seq and seq <= stream.seq):
                return Response(status_code=409, headers=HEADERS)
            stream.seq = seq or stream.seq
            if not await self.append(stream, body):
                return Response(status_code=400, headers=HEADERS)
        if close:
            await self.close(stream)
        return await self.answer(stream, 204)

    async def take(self, id: str) -> holding.Reserved:
        await self.jobs.enqueue("written by the tests", id=id)
        self.requests += 1
        call = holding.reserve(self.jobs._keys, worker="tests", request=self.requests, k=1, **TIMES)
        [job] = (await self.jobs._transport.send(call)).jobs
        return job

    async def append(self, stream: Written, body: bytes, *, empty: bool = False) -> bool:
        messages = [body]
        if stream.form.is_json:
            try:
                value = json.loads(body)
            except ValueError:
                return False
            values = value if isinstance(value, list) else [value]
            messages = [json.dumps(each).encode() for each in values]
            if not messages:
                return empty
        events = [("chunk", message.decode("latin-1")) for message in messages]
        call = holding.flush(self.jobs._keys, stream.job, first=stream.n + 1, events=events, max_len=100_000)
        assert await self.jobs._transport.send(call) == "ok"
        stream.n += len(events)
        return True

    async def close(self, stream: Written) -> None:
        stream.closed = True
        times = {"ttl_ms": 3_600_000, "cancel_ttl_ms": 3_600_000}
        call = holding.settle(self.jobs._keys, stream.job, status="completed", body="null", count=stream.n, **times)
        await self.jobs._transport.send(call)

    async def answer(self, stream: Written, status: int) -> Response:
        page = await self.jobs.events(stream.job.id, after="latest")
        headers = {**HEADERS, "Stream-Next-Offset": _offset(page.next), "Content-Type": stream.form.content_type}
        if page.done:
            headers["Stream-Closed"] = "true"
        return Response(status_code=status, headers=headers)
