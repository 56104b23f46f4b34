"""Following a job as Server-Sent Events."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import redis

import outlast.protocol.tail
from outlast import AsyncClient, Queue
from outlast.protocol import Keys
from outlast_edge import ANY, Edge

from .conftest import Counting, Web, Worker, anybody
from .readers import ENDS, EventSource, Got, Text, naive, parse, raw, sse

TOKENS = [f"{n} " for n in range(30)]


def test_first_frame_is_the_state_and_has_no_id(web: Web, worker: Worker) -> None:
    job = web.enqueue()
    worker.take()
    worker.say("a", progress="0.5")
    worker.say("0.5", kind="progress")
    stream = sse(web.http, job["events_url"])
    assert next(stream) == Got("state", {"status": "active", "attempt": 1, "progress": 0.5}, "", 1000)
    worker.end('"a"')
    assert [(event.type, event.data) for event in stream] == [
        ("chunk", {"text": "a"}),
        ("progress", {"value": 0.5}),
        ("completed", {"result": "a"}),
    ]


def test_headers_keep_proxies_from_holding_the_stream(web: Web, worker: Worker) -> None:
    job = web.enqueue()
    worker.take()
    worker.end()
    headers = web.http.get(job["events_url"], headers={"accept": "text/event-stream"}).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache, no-transform"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-content-type-options"] == "nosniff"
    assert "content-length" not in headers
    assert "content-encoding" not in headers


def test_state_is_told_again_when_it_changes(web: Web, worker: Worker) -> None:
    job = web.enqueue()
    stream = sse(web.http, job["events_url"])
    assert next(stream).data["status"] == "waiting"
    worker.take()
    worker.say("a")
    # A read between the two calls tells the state before there is a chunk; one after both, the chunk first.
    seen = {event.type: event.data for event in (next(stream), next(stream))}
    assert seen == {"chunk": {"text": "a"}, "state": {"status": "active", "attempt": 1, "progress": 0.0}}
    worker.again()
    assert next(stream).data == {"attempt": 2}
    assert next(stream).data == {"status": "active", "attempt": 2, "progress": 0.0}


def test_a_silent_start_shows_within_a_few_reads(web: Web, worker: Worker) -> None:
    job = web.enqueue()
    stream = sse(web.http, job["events_url"])
    next(stream)
    time.sleep(0.3)
    worker.take()
    started = time.monotonic()
    assert next(stream) == Got("state", {"status": "active", "attempt": 1, "progress": 0.0}, "", None)
    assert time.monotonic() - started < 5


class Live:
    """A job of 30 tokens whose worker is lost after the 15th. Each step happens when the viewer is ready for it."""

    def __init__(self, worker: Worker) -> None:
        self.steps = self._run(worker)

    @staticmethod
    def _run(worker: Worker) -> Iterator[None]:
        worker.take()
        for attempt in (1, 2):
            for token in TOKENS if attempt == 2 else TOKENS[:15]:
                worker.say(token)
                yield
            if attempt == 1:
                worker.again()
                yield
        worker.end(json.dumps("".join(TOKENS)))
        yield


@pytest.mark.parametrize("n", range(1, 31))
def test_cut_after_every_nth_event(n: int, web: Web, worker: Worker) -> None:
    job = web.enqueue()
    live = Live(worker).steps
    view = Text()
    while view.end is None:
        seen = 0
        for event in sse(web.http, job["events_url"], view.cursor):
            view.take(event)
            if event.type == "state":
                if seen == 0:
                    next(live, None)
                continue
            seen += 1
            if seen == n or view.end:
                break  # the connection is closed here
            next(live, None)
    assert view.text == "".join(TOKENS) == view.end.data["result"]
    assert view.count == 15 + 1 + 30 + 1, "an event came twice, or not at all"


@pytest.mark.parametrize("n", range(1, 31))
def test_cut_after_every_nth_event_over_pages(n: int, web: Web, worker: Worker) -> None:
    job = web.enqueue()
    live = Live(worker).steps
    view = Text()
    done = False
    while not done:
        for _ in range(n):
            next(live, None)
        page = web.http.get(
            job["events_url"],
            params={"limit": n, "wait": 5, **({"after": view.cursor} if view.cursor else {})},
            headers={"accept": "application/json"},
        ).json()
        for event in page["events"]:
            view.take(Got(event["type"], event["data"], event["id"]))
        view.cursor, done = page["next"], page["done"]
    assert view.end is not None
    assert view.text == "".join(TOKENS) == view.end.data["result"]


CHUNKS_H32 = [
    *("\n", "a\nb", "\r", "\r\n", "a\u2028b", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x00", "data: x"),
    *(": x", "id: 9", "event: completed", "\n\n", "\n\nevent: completed\ndata: {}\n\n", "retry: 1"),
]
CHUNKS_H33 = ["", " ", " hello", "hello ", "\t", *(f" t{n}" for n in range(200))]


@pytest.mark.parametrize("chunks", [CHUNKS_H32, CHUNKS_H33], ids=["h32_line_ends", "h33_blanks"])
async def test_h32_h33_every_reader_gets_each_chunk_exactly(
    chunks: list[str], web: Web, worker: Worker, client: AsyncClient, queue: Queue[Any, Any]
) -> None:
    job = web.enqueue()
    worker.take()
    worker.say(*chunks)
    worker.end(json.dumps("".join(chunks)))
    body = raw(web, job["events_url"])
    pages = web.http.get(job["events_url"], params={"limit": 500}, headers={"accept": "application/json"}).json()
    got = {
        "httpx-sse": [event.data["text"] for event in sse(web.http, job["events_url"]) if event.type == "chunk"],
        "by the book": [event.data["text"] for event in parse(body) if event.type == "chunk"],
        "naive": [event.data["text"] for event in naive(body) if event.type == "chunk"],
        "pages": [event["data"]["text"] for event in pages["events"] if event["type"] == "chunk"],
        "watch": [event.data async for event in client.queue(queue).watch(job["id"]) if event.type == "chunk"],
    }
    await client.aclose()
    assert {name: chunks == texts for name, texts in got.items()} == dict.fromkeys(got, True)
    assert [event.type for event in naive(body)][-1] == "completed"
    assert [event.type for event in naive(body)].count("completed") == 1


async def test_h31_half_a_character_reads_the_same_everywhere(
    web: Web, worker: Worker, raw: redis.Redis, keys: Keys, client: AsyncClient, queue: Queue[Any, Any]
) -> None:
    """A foreign writer's broken text kills no reader, and all of them show the same."""
    job = web.enqueue()
    worker.take()
    for n, (kind, body) in enumerate(
        [("chunk", b"\xed\xa0\xbd!"), ("data", b'"\\ud83d"'), ("data", b'"\\ud83d\\ude00"')]
    ):
        raw.xadd(keys.events(job["id"]), {b"t": kind.encode(), b"d": body, b"a": b"1"}, f"{worker.job.b}-{n + 1}")
    worker.n = 3
    worker.end('"\\udc00"')
    jobs = client.queue(queue)
    watched = [event async for event in jobs.watch(job["id"])]
    await client.aclose()
    text, half, whole, end = [event for event in sse(web.http, job["events_url"]) if event.type != "state"]
    assert text.data["text"] == watched[0].data == "���!"
    assert (half.data["value"], whole.data["value"]) == (watched[1].value, watched[2].value) == ("\ud83d", "😀")
    assert end.data["result"] == watched[3].result
    pages = web.http.get(job["events_url"], headers={"accept": "application/json"}).json()
    assert [event["data"] for event in pages["events"]] == [text.data, half.data, whole.data, end.data]


def test_h34_a_late_reader_is_told_of_the_gap(web: Web, worker: Worker) -> None:
    job = web.enqueue()
    worker.take()
    live, early = Text(), Text()
    stream = sse(web.http, job["events_url"])
    for n in range(0, 1000, 50):
        worker.say(*(f"{i} " for i in range(n, n + 50)), max_len=100)
        while live.count < n + 50:
            live.take(next(stream))
        if n == 0:
            for event in sse(web.http, job["events_url"]):
                early.take(event)
                if early.count == 40:
                    break
    whole = "".join(f"{i} " for i in range(1000))
    worker.end(json.dumps(whole))
    for event in stream:
        live.take(event)
    assert live.text == whole
    for after in (early.cursor, None):
        gap, *chunks, end = [event for event in sse(web.http, job["events_url"], after) if event.type != "state"]
        assert gap.type == "gap"
        assert gap.data["first_available"] == chunks[0].id
        numbers = [int(event.data["text"]) for event in chunks]
        assert numbers == list(range(numbers[0], 1000))
        assert 100 <= len(numbers) < 300
        assert end.data["result"] == whole
    assert web.http.get(job["url"]).json()["result"] == whole


def test_h35_a_cursor_from_an_earlier_life_skips_nothing(
    serve: Callable[..., Web], client: AsyncClient, queue: Queue[Any, Any], worker: Worker
) -> None:
    web = serve(Edge(client, queues=[queue], authorize=anybody).app())

    def enqueue() -> dict[str, Any]:
        reply = web.http.post("/v1/jobs", json={"payload": 1, "id": "chat"})
        assert reply.status_code == 202, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    job = enqueue()
    worker.take()
    worker.say(*(f"old{n} " for n in range(20)))
    worker.end()
    cursors = [event.id for event in sse(web.http, job["events_url"]) if event.id]
    old = (cursors[3], cursors[-2], cursors[-1])
    enqueue()
    streams = [sse(web.http, job["events_url"], cursor) for cursor in old]  # before it starts
    for stream in streams:
        next(stream)
    worker.take()
    worker.say("new0 ", "new1 ")
    streams += [sse(web.http, job["events_url"], cursor) for cursor in old]  # while it runs
    for stream in streams[3:]:
        next(stream)
    worker.say("new2 ", "new3 ", "new4 ")
    worker.end()
    streams += [sse(web.http, job["events_url"], cursor) for cursor in old]  # after its end
    for stream in streams:
        view = Text()
        view.text = "old text "
        for event in stream:
            view.take(event)
        assert view.text == "new0 new1 new2 new3 new4 "


async def test_h35_nor_does_one_from_before_retry_dead(
    web: Web, worker: Worker, client: AsyncClient, queue: Queue[Any, Any]
) -> None:
    job = web.enqueue()
    worker.take()
    worker.say(*(f"old{n} " for n in range(5)))
    worker.end("why", "failed")
    cursors = [event.id for event in sse(web.http, job["events_url"]) if event.id]
    assert await client.queue(queue).retry_dead(job["id"])
    await client.aclose()
    old = (cursors[1], cursors[-1])
    streams = [sse(web.http, job["events_url"], cursor) for cursor in old]
    for stream in streams:
        next(stream)
    worker.take()
    worker.say("new0 ", "new1 ")
    worker.end()
    streams += [sse(web.http, job["events_url"], cursor) for cursor in old]
    for stream in streams:
        view = Text()
        view.text = "old text "
        for event in stream:
            view.take(event)
        assert view.text == "new0 new1 "


GARBAGE = [
    *("abc", "$", "+", "-", "5-", "-5", "-1-1", "1-1-1", "latest", "１-１", "99999999999999999999-0", "9" * 10_000),
    *("1 OR 1", "0x10", "1e3", "5-99999999999999999999"),
]


@pytest.mark.parametrize("accept", ["text/event-stream", "application/json"])
def test_h36_garbage_cursors_are_refused_before_anything_streams(accept: str, web: Web, worker: Worker) -> None:
    job = web.enqueue()
    as_header = [*(text.encode() for text in GARBAGE), b"\xff\xfe"]
    replies = [web.http.get(job["events_url"], params={"after": text}, headers={"accept": accept}) for text in GARBAGE]
    replies += [
        web.http.get(job["events_url"], headers=[(b"accept", accept.encode()), (b"last-event-id", text)])
        for text in as_header
    ]
    replies.append(web.http.get(job["events_url"] + "?after=%ff", headers={"accept": accept}))
    good = {"accept": accept, "last-event-id": "1-1"}
    replies.append(web.http.get(job["events_url"], params={"after": "abc"}, headers=good))
    for reply in replies:
        assert reply.status_code == 400, reply.request
        assert reply.headers["content-type"] == "application/problem+json"
        assert reply.json()["code"] == "bad_cursor"
        assert not any(word in reply.text.lower() for word in ("redis", "xread", "stream id", "err "))


def test_h36_the_start_can_be_spelled_and_the_future_answers(web: Web, worker: Worker) -> None:
    job = web.enqueue()
    worker.take()
    worker.say("a")
    for start in ("", "0"):
        stream = sse(web.http, job["events_url"], after=start)
        assert [next(stream).type, next(stream).type] == ["state", "chunk"]
    future = sse(web.http, job["events_url"], "18446744073709551615-18446744073709551615")
    assert [next(future).type, next(future).type, next(future).type] == ["state", "gap", "chunk"]
    worker.end()
    late = [event.type for event in sse(web.http, job["events_url"], "18446744073709551615-1")]
    assert late == ["state", "gap", "chunk", "completed"]


def test_h36_the_header_wins_over_the_query(web: Web, worker: Worker) -> None:
    job = web.enqueue()
    worker.take()
    worker.say("a", "b", "c")
    worker.end()
    ids = [event.id for event in sse(web.http, job["events_url"])]
    got = [event.data.get("text") for event in sse(web.http, job["events_url"], ids[2], after=ids[1])]
    assert got == [None, "c", None]
    latest = [event.type for event in sse(web.http, job["events_url"], ids[2], **{"from": "latest"})]
    assert latest == ["state", "chunk", "completed"]


def test_h37_readers_after_the_end(web: Web, worker: Worker, raw: redis.Redis, keys: Keys) -> None:
    for status in ENDS:
        job = web.enqueue()
        worker.take()
        worker.say("a")
        worker.end('"a"' if status == "completed" else "why", status)  # type: ignore[arg-type]
        a = list(sse(web.http, job["events_url"]))
        assert [event.type for event in a] == ["state", "chunk", status]
        accept = {"accept": "text/event-stream"}
        last = web.http.get(job["events_url"], headers={**accept, "last-event-id": a[-1].id})
        assert (last.status_code, last.content) == (204, b"")
        assert [event.type for event in sse(web.http, job["events_url"], a[1].id)] == ["state", status]
        raw.delete(keys.events(job["id"]))
        c = list(sse(web.http, job["events_url"]))
        assert [event.type for event in c] == ["state", status]
        assert c[-1].data == a[-1].data
        raw.delete(keys.job(job["id"]))
        for id in (job["id"], "never-was"):
            url = f"/v1/jobs/{id}/events"
            assert web.http.get(url, headers=accept).status_code == 404
            assert web.http.get(url, headers={**accept, "last-event-id": a[1].id}).status_code == 204
            assert web.http.get(url, headers={"accept": "application/json"}).status_code == 404


def test_h57_a_browser_stops_by_itself_after_the_end(web: Web, worker: Worker, raw: redis.Redis, keys: Keys) -> None:
    job = web.enqueue()
    source = EventSource(web.http, job["events_url"])
    thread = threading.Thread(target=source.run, args=(30,))
    thread.start()
    worker.take()
    worker.say("a", "b")
    worker.end()
    thread.join(20)
    assert source.closed
    assert source.requests == 2, "one that saw the end, one that was told to stop"
    assert [event.type for event in source.got if event.type != "state"] == ["chunk", "chunk", "completed"]
    raw.delete(keys.job(job["id"]), keys.events(job["id"]))
    for expired in (source.last_id, None):
        again = EventSource(web.http, job["events_url"])
        again.last_id = expired
        again.run(5)
        assert (again.requests, again.got) == (1, [])


def test_from_latest_leaves_out_what_was(web: Web, worker: Worker) -> None:
    job = web.enqueue()
    worker.take()
    worker.say("a", "b")
    stream = sse(web.http, job["events_url"], **{"from": "latest"})
    next(stream)
    time.sleep(0.2)  # the place of "latest" is read after the state was sent
    worker.say("c")
    worker.end()
    assert [event.type for event in stream] == ["chunk", "completed"]


def test_snapshot_is_one_event_for_all_that_was_said(web: Web, worker: Worker) -> None:
    job = web.enqueue()
    worker.take()
    worker.say("old")
    worker.again()
    worker.say(*(f"{n} " for n in range(1200)))
    worker.say('{"tool":1}', kind="data")
    stream = sse(web.http, job["events_url"], snapshot="1")
    next(stream)
    snapshot = next(stream)
    text = "".join(f"{n} " for n in range(1200))
    assert (snapshot.type, snapshot.data) == ("snapshot", {"text": text, "values": [{"tool": 1}], "attempt": 2})
    worker.say("more")
    worker.end('"x"')
    assert [event.type for event in stream] == ["chunk", "completed"]
    resumed = [event.type for event in sse(web.http, job["events_url"], snapshot.id, snapshot="1")]
    assert resumed == ["state", "chunk", "completed"], "a cursor wins: the viewer has the text already"
    late = list(sse(web.http, job["events_url"], snapshot="1"))
    assert [event.type for event in late] == ["state", "snapshot", "completed"]
    assert late[1].data["text"] == text + "more"


def test_h56_silence_is_filled_below_a_proxys_idle_limit(
    serve: Callable[..., Web], client: AsyncClient, queue: Queue[Any, Any], worker: Worker
) -> None:
    web = serve(Edge(client, queues=[queue], authorize=anybody, keepalive=0.15).app())
    job = web.enqueue()
    worker.take()
    worker.say("a")
    bodies: list[str] = []
    reader = threading.Thread(target=lambda: bodies.append(raw(web, job["events_url"], idle=1.5)))
    reader.start()
    time.sleep(3)  # twice what cuts the connection
    worker.say("b")
    worker.end('"ab"')
    reader.join(20)
    [body] = bodies
    assert body.count("\n:\n") >= 8
    assert [event.type for event in parse(body)] == ["state", "chunk", "chunk", "completed"]
    assert [event.id for event in parse(body)][1:3] == [f"{worker.job.b}-1", f"{worker.job.b}-2"]


def test_h59_a_stream_ends_itself_and_goes_on_where_it_was(
    serve: Callable[..., Web], client: AsyncClient, queue: Queue[Any, Any], worker: Worker
) -> None:
    web = serve(Edge(client, queues=[queue], authorize=anybody, max_stream=0.25).app())
    job = web.enqueue()
    source = EventSource(web.http, job["events_url"])
    follow(source, worker, 150)
    ends = [event for event in source.got if event.type == "reconnect"]
    assert len(ends) >= 5
    assert ends[0].data == {"reason": "max_duration", "max_stream": 0.25}
    assert [event.data["text"] for event in source.got if event.type == "chunk"] == [f"{n} " for n in range(150)]


def test_h59_a_function_that_is_killed_loses_nothing_either(
    serve: Callable[..., Web], client: AsyncClient, queue: Queue[Any, Any], worker: Worker
) -> None:
    app = Edge(client, queues=[queue], authorize=anybody).app()

    async def killed(scope: Any, receive: Any, send: Any) -> None:
        import asyncio

        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        task = asyncio.ensure_future(app(scope, receive, send))
        await asyncio.wait([task], timeout=0.3)
        task.cancel()  # the connection is torn in the middle of the body
        await asyncio.wait([task])

    web = serve(killed, alone=True)
    job = web.enqueue()
    source = EventSource(web.http, job["events_url"])
    follow(source, worker, 100, retry=0.05)
    assert source.requests >= 5
    assert [event.data["text"] for event in source.got if event.type == "chunk"] == [f"{n} " for n in range(100)]


def follow(source: EventSource, worker: Worker, count: int, retry: float | None = None) -> None:
    """Let a browser follow a job of `count` numbered tokens."""
    if retry is not None:
        # The state frame would set a second; the server that was killed had no say.
        source.__class__ = type("Impatient", (EventSource,), {"retry": property(lambda _: retry, lambda *_: None)})
    thread = threading.Thread(target=source.run, args=(60,))
    thread.start()
    worker.take()
    for n in range(count):
        worker.say(f"{n} ")
        time.sleep(0.012)
    worker.end()
    thread.join(60)
    assert source.closed


def test_polls_of_a_request_are_bounded(serve: Callable[..., Web], polling: Counting, queue: Queue[Any, Any]) -> None:
    web = serve(Edge(AsyncClient(transport=polling), queues=[queue], authorize=anybody, max_polls=4).app())
    job = web.enqueue()
    polling.calls.clear()
    *_, last = sse(web.http, job["events_url"])
    assert (last.type, last.data["reason"], last.retry) == ("reconnect", "max_polls", 100)
    assert len(polling.calls) == 1 + 4


def test_a_quiet_viewer_polls_ever_more_rarely(
    serve: Callable[..., Web],
    polling: Counting,
    queue: Queue[Any, Any],
    worker: Worker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At a tenth of the real times: 15 ms after data, 60 while quiet, 200 once quiet for a second."""
    for name, seconds in {"FAST": 0.015, "STEADY": 0.06, "SLOW": 0.2, "QUIET_AFTER": 1.0}.items():
        monkeypatch.setattr(outlast.protocol.tail, name, seconds)
    web = serve(Edge(AsyncClient(transport=polling), queues=[queue], authorize=anybody).app())
    job = web.enqueue()
    worker.take()
    worker.say("a")
    stream = sse(web.http, job["events_url"])
    next(stream)
    threading.Timer(4.5, worker.end).start()
    time.sleep(2.5)
    before = len(polling.calls)
    time.sleep(1.5)
    quiet = len(polling.calls) - before
    assert 1 <= quiet <= 1.5 / 0.18 + 1
    assert [event.type for event in stream] == ["chunk", "completed"]


def test_over_tcp_a_viewer_waits_on_the_server(
    serve: Callable[..., Web], counting: Counting, queue: Queue[Any, Any], worker: Worker
) -> None:
    web = serve(Edge(AsyncClient(transport=counting), queues=[queue], authorize=anybody).app())
    job = web.enqueue()
    worker.take()
    worker.say("a")
    stream = sse(web.http, job["events_url"])
    assert [next(stream).type, next(stream).type] == ["state", "chunk"]
    time.sleep(0.5)
    counting.calls.clear()
    time.sleep(1)
    assert counting.calls == []
    sent = time.monotonic()
    worker.say("b")
    assert next(stream).type == "chunk"
    assert time.monotonic() - sent < 0.5
    worker.end()
    assert [event.type for event in stream] == ["completed"]


def test_a_fault_before_the_first_byte_is_still_a_stream(
    serve: Callable[..., Web], counting: Counting, queue: Queue[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    from outlast import ServerError, TransportError

    web = serve(Edge(AsyncClient(transport=counting), queues=[queue], authorize=anybody).app())
    job = web.enqueue()
    for fault in (TransportError("refused by redis.internal:6379"), ServerError("LOADING redis", code="LOADING")):
        counting.fault = fault
        reply = web.http.get(job["events_url"], headers={"accept": "text/event-stream"})
        assert (reply.status_code, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        [event] = parse(reply.text)
        assert (event.type, event.data) == ("reconnect", {"reason": "unavailable"})
        assert 4000 <= (event.retry or 0) <= 6000
        for url, method in (("events_url", "GET"), ("url", "GET"), ("cancel_url", "POST")):
            reply = web.http.request(method, job[url], headers={"accept": "application/json"})
            assert (reply.status_code, reply.json()["code"]) == (503, "unavailable")
            assert reply.headers["retry-after"] == "5"
            assert "redis" not in reply.text
        caplog.clear()
        assert web.http.post("/v1/jobs", json={"payload": 1}).status_code == 503
        # Not for the caller, but for whoever runs it: what is wrong, and where.
        assert caplog.messages == [f"POST jobs: {type(fault).__name__}: {fault}"]


def test_a_fault_in_mid_stream_asks_the_viewer_to_come_back(
    serve: Callable[..., Web], polling: Counting, queue: Queue[Any, Any], worker: Worker
) -> None:
    from outlast import TransportError

    web = serve(Edge(AsyncClient(transport=polling), queues=[queue], authorize=anybody).app())
    job = web.enqueue()
    worker.take()
    worker.say("a")
    stream = sse(web.http, job["events_url"])
    assert [next(stream).type, next(stream).type] == ["state", "chunk"]
    polling.fault = TransportError("down")
    *_, last = stream
    assert (last.type, last.data) == ("reconnect", {"reason": "unavailable"})
    polling.fault = None
    worker.end()
    assert [event.type for event in sse(web.http, job["events_url"], f"{worker.job.b}-1")] == ["state", "completed"]


def test_a_record_that_vanishes_under_a_viewer_ends_the_stream(
    web: Web, worker: Worker, raw: redis.Redis, keys: Keys
) -> None:
    job = web.enqueue()
    stream = sse(web.http, job["events_url"])
    next(stream)
    raw.delete(keys.job(job["id"]))
    *_, last = stream
    assert (last.type, last.data) == ("reconnect", {"reason": "gone"})


def test_a_disconnect_never_cancels(web: Web, worker: Worker) -> None:
    job = web.enqueue()
    worker.take()
    stream = sse(web.http, job["events_url"])
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    worker.say("a")
    record = web.http.get(job["url"]).json()
    assert (record["status"], record["cancel_requested"]) == ("active", False)


def test_accept_decides_between_stream_and_pages(web: Web, worker: Worker) -> None:
    job = web.enqueue()
    worker.take()
    worker.end()
    for accept, kind in {
        "*/*": "text/event-stream; charset=utf-8",
        "text/html, */*;q=0.8": "text/event-stream; charset=utf-8",
        "application/json": "application/json",
        "application/*": "application/json",
        "text/event-stream;q=0.1, application/json;q=0.9": "application/json",
        "application/xml": "application/problem+json",
        "text/event-stream;q=0, application/json;q=0": "application/problem+json",
    }.items():
        reply = web.http.get(job["events_url"], headers={"accept": accept})
        assert reply.headers["content-type"] == kind, accept
    assert reply.status_code == 406


def test_vercels_deadline_ends_a_stream_before_the_platform_does(
    serve: Callable[..., Web], client: AsyncClient, queue: Queue[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys
    from datetime import UTC, datetime, timedelta
    from types import ModuleType

    runtime = ModuleType("vercel_runtime.deadline")
    runtime.get_deadline = lambda: datetime.now(UTC) + timedelta(seconds=5.4)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vercel_runtime.deadline", runtime)
    web = serve(Edge(client, queues=[queue], authorize=anybody).app())
    job = web.enqueue()
    started = time.monotonic()
    *_, last = sse(web.http, job["events_url"])
    assert last.data["reason"] == "max_duration"
    assert time.monotonic() - started < 4
    assert web.http.get(job["url"], params={"wait": 20}).json()["status"] == "waiting"
    assert time.monotonic() - started < 8


_ = (httpx, ANY)
