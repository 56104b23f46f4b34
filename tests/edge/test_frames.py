"""Frames for other frameworks, and the helper for browsers as it is served."""

from __future__ import annotations

import json
import math
from typing import Any

from pydantic import BaseModel

from outlast import AsyncClient, Cancelled, Chunk, Client, Completed, Data, Failed, Gap, Progress, Queue, Restarted
from outlast_edge import sse_frames
from outlast_edge._frames import dump

from .conftest import Web, Worker
from .readers import naive, parse


class Answer(BaseModel):
    text: str


EVENTS = [
    Gap("0-0", 1, "5-7"),
    Restarted("5-7", 2),
    Chunk("5-8", 2, "a\n\u2028b"),
    Data("5-9", 2, {"x": [1, None]}),
    Progress("5-10", 2, 0.5),
    Failed("6-0", 2, "secret"),
    Cancelled("7-0", 2),
    Completed("8-0", 2, Answer(text="é")),
]


def test_frames_of_any_watch_plain_and_async() -> None:
    body = b"".join(sse_frames(EVENTS)).decode()
    assert list(parse(body)) == list(naive(body))
    assert [(event.type, event.id, event.data) for event in parse(body)] == [
        ("gap", "0-0", {"first_available": "5-7"}),
        ("restarted", "5-7", {"attempt": 2}),
        ("chunk", "5-8", {"text": "a\n\u2028b"}),
        ("data", "5-9", {"value": {"x": [1, None]}}),
        ("progress", "5-10", {"value": 0.5}),
        ("failed", "6-0", {"error": "The job failed."}),
        ("cancelled", "7-0", {}),
        ("completed", "8-0", {"result": {"text": "é"}}),
    ]


async def test_a_wsgi_view_is_one_line(
    web: Web, worker: Worker, queue: Queue[Any, Any], valkey_url: str, client: AsyncClient
) -> None:
    job = web.enqueue()
    worker.take()
    worker.say("a", "b")
    worker.end()
    with Client(redis_url=valkey_url) as plain:
        sync_body = b"".join(sse_frames(plain.queue(queue).watch(job["id"])))
    async_body = b"".join([frame async for frame in sse_frames(client.queue(queue).watch(job["id"]))])
    await client.aclose()
    assert sync_body == async_body
    assert [event.type for event in parse(sync_body.decode())] == ["chunk", "chunk", "completed"]


def test_whatever_is_stored_becomes_json_that_browsers_read() -> None:
    for value, expected in [
        (math.nan, None),
        ({"a": [math.inf, 1]}, {"a": [None, 1]}),
        ("\ud83d", "\ud83d"),
        (["\ud83d", math.nan], ["\ud83d", None]),
        ("\u2028\u2029\x85\x00", "\u2028\u2029\x85\x00"),
        (10**30, 10**30),
    ]:
        data = dump(value)
        assert json.loads(data.decode(), parse_constant=lambda name: 1 / 0) == expected
        assert len(data.decode().splitlines()) == 1


def test_the_helper_for_browsers_is_served(web: Web) -> None:
    reply = web.http.get("/v1/watch.js")
    assert reply.status_code == 200
    assert "export function watchJob" in reply.text
    assert web.http.head("/v1/watch.js").status_code == 200
