"""The read side of Durable Streams. The public conformance suite runs in tests/runtimes/facades."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from httpx_sse import connect_sse

from outlast_edge.facades.durable_streams import DurableStreams

from .conftest import Hand, Site


@pytest.fixture
def ds(site: Callable[..., Site]) -> Site:
    return site(DurableStreams, max_wait=0.3)


@pytest.fixture
def stream(ds: Site, hand: Hand, valkey_url: str) -> str:
    from outlast import Client

    with Client(redis_url=valkey_url) as client:
        job = client.queue(_queue(hand)).enqueue("hello")
    hand.take()
    return f"/ds/{job.id}"


def _queue(hand: Hand) -> Any:
    from outlast import Queue

    return Queue(hand.keys.name)


def test_catch_up_page_by_page_to_the_end(ds: Site, hand: Hand, stream: str) -> None:
    empty = ds.http.get(stream)
    assert empty.json() == []
    assert empty.headers["stream-up-to-date"] == "true"
    assert "stream-closed" not in empty.headers
    hand.say("a", {"x": 1})
    page = ds.http.get(stream, params={"offset": empty.headers["stream-next-offset"]})
    assert [(event["type"], event["data"]) for event in page.json()] == [
        ("chunk", {"text": "a"}),
        ("data", {"value": {"x": 1}}),
    ]
    hand.end("a")
    end = ds.http.get(stream, params={"offset": page.headers["stream-next-offset"]})
    assert [event["type"] for event in end.json()] == ["completed"]
    assert end.headers["stream-closed"] == "true"
    offsets = [each.headers["stream-next-offset"] for each in (empty, page, end)]
    assert offsets == sorted(set(offsets))
    after = ds.http.get(stream, params={"offset": offsets[-1]})
    assert (after.json(), after.headers["stream-closed"]) == ([], "true")


def test_a_page_is_full_before_it_is_up_to_date(ds: Site, hand: Hand, stream: str) -> None:
    hand.say(*[{"n": n} for n in range(600)])
    first = ds.http.get(stream)
    assert "stream-up-to-date" not in first.headers
    second = ds.http.get(stream, params={"offset": first.headers["stream-next-offset"]})
    assert second.headers["stream-up-to-date"] == "true"
    assert [event["data"]["value"]["n"] for event in first.json() + second.json()] == list(range(600))


def test_long_poll_waits_and_tells_a_quiet_stream_from_a_closed_one(ds: Site, hand: Hand, stream: str) -> None:
    ask = {"offset": "-1", "live": "long-poll"}
    quiet = ds.http.get(stream, params=ask)
    assert quiet.status_code == 204
    assert quiet.headers["stream-up-to-date"] == "true"
    threading.Timer(0.1, hand.say, ("a",)).start()
    got = ds.http.get(stream, params={**ask, "cursor": quiet.headers["stream-cursor"]})
    assert [event["type"] for event in got.json()] == ["chunk"]
    assert int(got.headers["stream-cursor"]) > int(quiet.headers["stream-cursor"]), "no cache may answer it again"
    hand.end("a")
    end = ds.http.get(stream, params={**ask, "offset": got.headers["stream-next-offset"]})
    closed = ds.http.get(stream, params={**ask, "offset": end.headers["stream-next-offset"]})
    assert (closed.status_code, closed.headers["stream-closed"]) == (204, "true")


def test_live_stream(ds: Site, hand: Hand, stream: str) -> None:
    got: list[tuple[str, Any]] = []
    with connect_sse(ds.http, "GET", stream, params={"offset": "-1", "live": "sse"}) as source:
        for event in source.iter_sse():
            got.append((event.event, json.loads(event.data)))
            if len(got) == 1:
                assert got[0][1]["upToDate"] is True
                hand.say("a")
            elif len(got) == 3:
                hand.again()
                hand.say("b")
                hand.end("b")
    messages = [message for kind, data in got if kind == "data" for message in data]
    assert [message["type"] for message in messages] == ["chunk", "restarted", "chunk", "completed"]
    assert got[-1][0] == "control"
    assert got[-1][1]["streamClosed"] is True
    offsets = [data["streamNextOffset"] for kind, data in got if kind == "control"]
    assert offsets == sorted(offsets)


def test_caching(ds: Site, hand: Hand, stream: str) -> None:
    hand.say("a")
    first = ds.http.get(stream)
    assert ds.http.get(stream, headers={"if-none-match": first.headers["etag"]}).status_code == 304
    hand.say("b")
    assert ds.http.get(stream, headers={"if-none-match": first.headers["etag"]}).status_code == 200
    for response in (ds.http.head(stream), ds.http.get(stream, params={"offset": "now"})):
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["stream-next-offset"] > first.headers["stream-next-offset"]


@pytest.mark.parametrize(
    "query",
    ["offset=", "offset=a,b", "offset=1&offset=2", "live=sse", "offset=-1&live=x", "offset=9999999999999999999999_1"],
)
def test_bad_questions(ds: Site, stream: str, query: str) -> None:
    response = ds.http.get(f"{stream}?{query}")
    assert response.status_code == 400
    assert response.headers["x-content-type-options"] == "nosniff"


def test_streams_are_their_owners_and_nobody_writes(site: Callable[..., Site], hand: Hand, stream: str) -> None:
    closed = site(DurableStreams, authorize=lambda request, action, job: "somebody")
    assert closed.http.get(stream).status_code == 404
    assert closed.http.head(stream).status_code == 404
    assert closed.http.get("/ds/unknown").status_code == 404
    for method in ("PUT", "POST", "DELETE"):
        assert closed.http.request(method, stream).status_code == 405
