"""Viewers that vanish, stall and leave, and what stands between them and us."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware

import outlast_worker.tcp
from outlast import AsyncClient, Queue
from outlast_edge import Edge

from .conftest import Counting, Web, Worker, anybody
from .readers import Got, parse, sse


def view(web: Web, url: str) -> socket.socket:
    """A viewer that has asked and reads nothing yet."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", int(web.url.rpartition(":")[2])))
    connection.sendall(f"GET {url} HTTP/1.1\r\nHost: {web.host}\r\nAccept: text/event-stream\r\n\r\n".encode())
    return connection


def until(true: Callable[[], bool], seconds: float, what: str) -> float:
    started = time.monotonic()
    while not true():
        assert time.monotonic() - started < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - started


def test_h54_viewers_that_vanish_leave_nothing_behind(
    serve: Callable[..., Web],
    client: AsyncClient,
    queue: Queue[Any, Any],
    worker: Worker,
    raw: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outlast_worker.tcp, "IDLE", 0.5)
    edge = Edge(client, queues=[queue], authorize=anybody, keepalive=0.2, send_timeout=0.6)
    web = serve(edge.app(), alone=True)
    job = web.enqueue()
    worker.take()
    worker.say("a")
    connections = len(raw.client_list())
    leaving = [view(web, job["events_url"]) for _ in range(30)]
    until(lambda: web.viewers() >= 60, 10, "all viewers are being served")
    for connection in leaving:
        connection.close()
    assert until(lambda: web.viewers() == 0, 5, "those who left are forgotten") < 2
    stalled = [view(web, job["events_url"]) for _ in range(30)]
    slow = [view(web, job["events_url"]) for _ in range(10)]
    until(lambda: web.viewers() >= 80, 10, "all viewers are being served")
    live = sse(web.http, job["events_url"])
    next(live)
    for n in range(20):  # 4 MB, more than the buffers between us and them hold
        worker.say(str(n % 10) * 200_000)
        for connection in slow:
            connection.recv(1)
    assert [next(live).data["text"][:1] for _ in range(3)] == ["a", "0", "1"]
    until(lambda: web.viewers() <= 3, 20, "who reads nothing, or nearly nothing, is given up")
    worker.end()
    assert [event.type for event in live][-1] == "completed"
    until(lambda: web.viewers() == 0, 10, "nobody is left")
    until(lambda: len(raw.client_list()) <= connections + 1, 10, "the connections to the database are given back")
    for connection in (*stalled, *slow):
        connection.close()
    assert web.http.get(job["url"]).json()["status"] == "completed"


def test_h54_a_slow_viewer_is_cut_off_and_goes_on_where_he_was(
    serve: Callable[..., Web], client: AsyncClient, queue: Queue[Any, Any], worker: Worker
) -> None:
    web = serve(Edge(client, queues=[queue], authorize=anybody, keepalive=0.2, send_timeout=0.5).app(), alone=True)
    job = web.enqueue()
    worker.take()
    slow = view(web, job["events_url"])
    seen: list[Got] = []
    live = threading.Thread(target=lambda: seen.extend(sse(web.http, job["events_url"])))
    live.start()
    until(lambda: web.viewers() >= 4, 10, "both are being served")
    whole = [f"{n % 10}" * 200_000 for n in range(30)]
    for text in whole:
        worker.say(text)
    until(lambda: web.viewers() <= 2, 20, "who reads nothing is given up, the other is not")
    worker.end()
    slow.settimeout(20)
    data = b""
    while part := slow.recv(1 << 20):
        data += part
    slow.close()
    _, _, chunked = data.partition(b"\r\n\r\n")
    body = b""
    while chunked:
        size, _, chunked = chunked.partition(b"\r\n")
        body, chunked = body + chunked[: int(size, 16)], chunked[int(size, 16) + 2 :]
    had = [event for event in parse(body.decode().rpartition("\n\n")[0]) if event.type == "chunk"]
    assert 0 < len(had) < len(whole)
    rest = list(sse(web.http, job["events_url"], had[-1].id))
    assert [event.data["text"] for event in (*had, *rest) if event.type == "chunk"] == whole
    live.join(20)
    assert [event.data["text"] for event in seen if event.type == "chunk"] == whole
    assert rest[-1].type == "completed"


def test_h54_a_black_hole_is_served_no_longer_than_a_stream_lasts(
    serve: Callable[..., Web], client: AsyncClient, queue: Queue[Any, Any]
) -> None:
    """It swallows the little comments, so that nothing tells it from a viewer who waits."""
    web = serve(Edge(client, queues=[queue], authorize=anybody, keepalive=0.2, max_stream=1.5).app(), alone=True)
    job = web.enqueue()
    quiet = [view(web, job["events_url"]) for _ in range(5)]
    until(lambda: web.viewers() >= 10, 10, "they are being served")
    until(lambda: web.viewers() == 0, 10, "they end with their stream")
    for connection in quiet:
        connection.close()


@pytest.mark.parametrize("when", ["before the first event", "in silence", "in mid-token"])
def test_h58_a_viewer_leaves_under_middleware(
    when: str,
    serve: Callable[..., Web],
    client: AsyncClient,
    queue: Queue[Any, Any],
    worker: Worker,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def function_style(request: Any, call_next: Any) -> Any:
        response = await call_next(request)
        response.headers["x-seen"] = "1"
        return response

    edge = Edge(client, queues=[queue], authorize=anybody, keepalive=0.3)
    middleware = [Middleware(BaseHTTPMiddleware, dispatch=function_style) for _ in range(2)]
    web = serve(Starlette(routes=edge.routes, middleware=middleware), alone=True)
    job = web.enqueue()
    stream = sse(web.http, job["events_url"])
    next(stream)
    if when != "before the first event":
        worker.take()
        worker.say("a", "b", "c")
        next(stream)
    if when == "in silence":
        time.sleep(0.7)
    assert web.viewers() > 0
    stream.close()  # type: ignore[attr-defined]
    assert until(lambda: web.viewers() == 0, 5, "the stream's tasks end") < 2.3
    record = web.http.get(job["url"]).json()
    assert (record["status"] in ("waiting", "active"), record["cancel_requested"]) == (True, False)
    assert [entry for entry in caplog.records if entry.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("tells_by", ["refusing to send", "a message"])
async def test_h58_each_way_of_telling_that_the_viewer_left_is_understood(
    tells_by: str, counting: Counting, queue: Queue[Any, Any], worker: Worker
) -> None:
    """Servers of ASGI 2.4 raise OSError from send, older ones answer receive: either alone is enough."""
    edge = Edge(AsyncClient(transport=counting), queues=[queue], authorize=anybody, keepalive=0.2)
    jobs = AsyncClient(transport=counting).queue(queue)
    job = await jobs.enqueue(1)
    gone, streaming = asyncio.Event(), asyncio.Event()
    sent: list[Any] = []

    async def receive() -> Any:
        await (gone if tells_by == "a message" else asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if gone.is_set() and tells_by == "refusing to send":
            raise OSError("gone")
        sent.append(message)
        if len(sent) == 2:
            streaming.set()

    path = f"/v1/jobs/{job.id}/events"
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "query_string": b"",
        "headers": [(b"accept", b"text/event-stream")],
    }
    serving = asyncio.ensure_future(edge.app()(scope, receive, send))
    await streaming.wait()
    gone.set()
    await asyncio.wait_for(serving, 2.2)
    await asyncio.sleep(0)
    calls = len(counting.calls)
    await asyncio.sleep(0.3)
    assert len(counting.calls) == calls, "nobody reads on for a viewer who has left"
    found = await jobs.get(job.id)
    assert found is not None
    assert found.status == "waiting"
    await counting.aclose()


def test_an_app_with_no_raw_path_still_finds_ids_without_slashes(
    serve: Callable[..., Web], client: AsyncClient, queue: Queue[Any, Any]
) -> None:
    app = Edge(client, queues=[queue], authorize=anybody).app()

    async def without(scope: Any, receive: Any, send: Any) -> None:
        scope.pop("raw_path", None)
        await app(scope, receive, send)

    web = serve(without)
    for id in ("plain", "a b", "é", "a%2Fb", "a/b"):
        job = web.http.post("/v1/jobs", json={"payload": 1, "id": id}).json()
        assert web.http.get(job["url"]).json()["id"] == id
