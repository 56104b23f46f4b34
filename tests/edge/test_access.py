"""Who may see what."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

import outlast_edge._edge
from outlast import AsyncClient, Client, ConfigurationError, InvalidArgumentError, Queue, TransportError
from outlast.protocol import Keys
from outlast_edge import ANY, Edge

from .conftest import Counting, Web, Worker, anybody
from .readers import sse


def who(request: Any, action: str, job: Any) -> Any:
    name = request.headers.get("x-user")
    return ANY if name == "boss" else name


ROUTES = [
    ("GET", "/v1/jobs/{}", "*/*"),
    ("GET", "/v1/jobs/{}?wait=1", "*/*"),
    ("HEAD", "/v1/jobs/{}", "*/*"),
    ("GET", "/v1/jobs/~?id={}", "*/*"),
    ("POST", "/v1/jobs/{}/cancel", "*/*"),
    ("GET", "/v1/jobs/{}/events", "text/event-stream"),
    ("HEAD", "/v1/jobs/{}/events", "text/event-stream"),
    ("GET", "/v1/jobs/{}/events?after=1-1", "text/event-stream"),
    ("GET", "/v1/jobs/{}/events?snapshot=1", "text/event-stream"),
    ("GET", "/v1/jobs/{}/events?from=latest", "text/event-stream"),
    ("GET", "/v1/jobs/{}/events?wait=1", "application/json"),
    ("GET", "/v1/jobs/{}/events?after=1-1", "application/json"),
]


@pytest.mark.parametrize(("method", "path", "accept"), ROUTES)
def test_h72_somebody_elses_job_answers_like_an_unknown_one(
    method: str,
    path: str,
    accept: str,
    serve: Callable[..., Web],
    counting: Counting,
    queue: Queue[Any, Any],
    worker: Worker,
    raw: redis.Redis,
    keys: Keys,
) -> None:
    web = serve(Edge(AsyncClient(transport=counting), queues=[queue], authorize=who).app())
    job = web.enqueue("secret", **{"x-user": "ann"})
    worker.take()
    worker.say("secret")
    before = raw.dump(keys.job(job["id"]))
    answers: dict[str, Any] = {}
    for name, id, user in [
        ("unknown", "0" * 32, "bob"),
        ("ann's", job["id"], "bob"),
        ("ann's, to nobody", job["id"], ""),
        ("ownerless", web.enqueue("free", **{"x-user": "boss"})["id"], "bob"),
    ]:
        counting.calls.clear()
        reply = web.http.request(method, path.format(id), headers={"x-user": user, "accept": accept})
        headers = {key: value for key, value in reply.headers.items() if key != "date"}
        answers[name] = (reply.status_code, reply.content, headers, list(counting.calls))
    assert answers["unknown"][0] in (404, 204)
    assert answers["unknown"][3] == ["HMGET"]
    for name, answer in answers.items():
        assert answer == answers["unknown"], name
    assert raw.dump(keys.job(job["id"])) == before
    mine = web.http.request("GET", f"/v1/jobs/{job['id']}", headers={"x-user": "ann"})
    assert mine.status_code == 200
    assert web.http.get(f"/v1/jobs/{job['id']}", headers={"x-user": "boss"}).status_code == 200


def test_a_lagging_replica_gets_time_and_strangers_wait_as_long(
    serve: Callable[..., Web],
    polling: Counting,
    queue: Queue[Any, Any],
    worker: Worker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outlast_edge._edge, "REGION_LAG", 0.3)
    web = serve(Edge(AsyncClient(transport=polling, read_regions=True), queues=[queue], authorize=who).app())
    job = web.enqueue("x", **{"x-user": "ann"})
    polling.calls.clear()
    polling.lag = 3
    assert web.http.get(job["url"], headers={"x-user": "ann"}).status_code == 200
    assert polling.calls == ["HMGET"] * 4
    answers = []
    for id in (job["id"], "unknown"):
        polling.calls.clear()
        assert web.http.get(f"/v1/jobs/{id}", headers={"x-user": "bob"}).status_code == 404
        answers.append(len(polling.calls))
    assert answers == [6, 6]


def test_h72_ids_cannot_be_guessed(web: Web) -> None:
    ids = {web.enqueue()["id"] for _ in range(50)}
    assert len(ids) == 50
    assert all(re.fullmatch("[0-9A-Za-z]{24}", id) for id in ids)
    assert all(len(set(place)) > 15 for place in zip(*ids, strict=True)), "every place is random"


def test_h72_without_a_hook_it_refuses_to_exist(client: AsyncClient, queue: Queue[Any, Any]) -> None:
    with pytest.raises(ConfigurationError, match="authorize="):
        Edge(client, queues=[queue])
    with pytest.raises(ConfigurationError, match="contradict"):
        Edge(client, queues=[queue], authorize=who, public=True)
    with pytest.warns(UserWarning, match="everybody"):
        Edge(client, queues=[queue], public=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"client": Client(env={})}, "client is Client; give an AsyncClient"),
        ({"queues": Queue("q")}, "queues is Queue; give a list"),
        ({"queues": ["q"]}, "queue is str; give a Queue"),
        ({"authorize": "ann"}, "authorize is str; give a function"),
        ({"accept": "priority"}, "accept is str; give a list"),
    ],
)
def test_what_would_fail_at_the_first_request_is_refused_before_it(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Edge(**{"client": AsyncClient(env={}), "queues": [Queue("q")], "authorize": who, **wrong})


def test_public_means_everybody_sees_and_nobody_chooses(
    serve: Callable[..., Web], client: AsyncClient, queue: Queue[Any, Any], raw: redis.Redis, keys: Keys
) -> None:
    with pytest.warns(UserWarning, match="everybody"):
        web = serve(Edge(client, queues=[queue], public=True).app())
    job = web.enqueue()
    assert web.http.get(job["url"]).status_code == 200
    for option in ({"priority": 9}, {"owner": "ann"}, {"id": "x"}):
        assert web.http.post("/v1/jobs", json={"payload": 1, **option}).json()["code"] == "not_accepted"


def test_authorize_is_told_what_for(
    serve: Callable[..., Web], client: AsyncClient, queue: Queue[Any, Any], worker: Worker
) -> None:
    asked: list[tuple[str, Any, Any]] = []

    async def note(request: Any, action: str, job: Any) -> Any:
        asked.append((action, job and job.owner, job and job.payload))
        return "ann"

    web = serve(Edge(client, queues=[queue], authorize=note).app())
    job = web.enqueue({"a": 1})
    web.http.get(job["url"])
    web.http.get(job["events_url"], headers={"accept": "application/json"})
    web.http.post(job["cancel_url"])
    web.http.get(job["events_url"], headers={"accept": "text/event-stream"})
    web.http.get("/v1/jobs/unknown")
    mine = ("ann", {"a": 1})
    assert asked == [
        ("enqueue", None, None),
        *((action, *mine) for action in ("get", "watch", "cancel", "watch")),
        ("get", None, None),
    ]


SECRET = "s" * 32


def test_a_watch_token_opens_one_job_for_reading(
    serve: Callable[..., Web], client: AsyncClient, queue: Queue[Any, Any], worker: Worker
) -> None:
    edge = Edge(client, queues=[queue], authorize=who, secret=SECRET)
    web = serve(edge.app())
    job, other = (web.enqueue(1, **{"x-user": "ann"}) for _ in range(2))
    worker.take()
    worker.end()
    token = edge.watch_token(queue, job["id"], ttl=60)
    assert [event.type for event in sse(web.http, job["events_url"], token=token)] == ["state", "completed"]
    assert web.http.get(job["url"], params={"token": token}).json()["result"] == "done"
    assert web.http.post(job["cancel_url"], params={"token": token}).status_code == 404
    assert web.http.post("/v1/jobs", json={"payload": 1}, params={"token": token}).status_code == 403
    bad = [
        (other["url"], token),
        (job["url"], token[:-1] + ("A" if token[-1] != "A" else "B")),
        (job["url"], token.replace("w1.", "w1.9")),
        (job["url"], ""),
        (job["url"], "x" * 10_000),
        (job["url"], Edge(client, queues=[queue], authorize=who, secret="t" * 32).watch_token(queue, job["id"])),
    ]
    for url, wrong in bad:
        reply = web.http.get(url, params={"token": wrong}, headers={"x-user": "ann"})
        assert (reply.status_code, reply.json()["code"]) == (403, "bad_token")


def test_a_watch_token_expires_and_its_secret_can_be_changed(
    serve: Callable[..., Web], client: AsyncClient, queue: Queue[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Edge(client, queues=[queue], authorize=who, secret=SECRET)
    edge = Edge(client, queues=[queue], authorize=who, secret=["n" * 32, SECRET])
    web = serve(edge.app())
    job = web.enqueue(1, **{"x-user": "ann"})
    for issuer in (old, edge):
        assert web.http.get(job["url"], params={"token": issuer.watch_token(queue.name, job["id"])}).status_code == 200
    token = edge.watch_token(queue, job["id"], ttl=60)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61)
    reply = web.http.get(job["url"], params={"token": token})
    assert (reply.status_code, reply.json()["code"]) == (403, "token_expired")


def test_watch_tokens_need_a_secret(
    client: AsyncClient, queue: Queue[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUTLAST_EDGE_SECRET", raising=False)
    edge = Edge(client, queues=[queue], authorize=who)
    with pytest.raises(ConfigurationError, match="OUTLAST_EDGE_SECRET"):
        edge.watch_token(queue, "x")
    monkeypatch.setenv("OUTLAST_EDGE_SECRET", "short")
    with pytest.raises(ConfigurationError, match="16 bytes"):
        edge.watch_token(queue, "x")
    monkeypatch.setenv("OUTLAST_EDGE_SECRET", SECRET)
    assert edge.watch_token(queue, "x").startswith("w1.")
    with pytest.raises(InvalidArgumentError, match="not served"):
        edge.watch_token("other", "x")


def test_h74_cross_origin_is_the_applications_decision(
    serve: Callable[..., Web], counting: Counting, queue: Queue[Any, Any], worker: Worker
) -> None:
    def sometimes(request: Any, action: str, job: Any) -> Any:
        if "x-bug" in request.headers:
            raise RuntimeError
        return ANY

    edge = Edge(AsyncClient(transport=counting), queues=[queue], authorize=sometimes)
    cors = Middleware(
        CORSMiddleware,
        allow_origins=["https://app.example"],
        allow_methods=["GET", "POST"],
        allow_headers=["content-type", "idempotency-key", "last-event-id"],
    )
    plain, open_ = serve(edge.app()), serve(Starlette(routes=edge.routes, middleware=[cors]))
    job = plain.enqueue()
    worker.take()
    worker.end()
    requests: list[tuple[str, str, dict[str, str], int]] = [
        ("GET", job["url"], {}, 200),
        ("GET", job["events_url"], {"accept": "text/event-stream", "last-event-id": "1-1"}, 200),
        ("POST", "/v1/jobs", {"content-type": "text/plain"}, 415),
        ("GET", "/v1/jobs/unknown", {}, 404),
        ("DELETE", job["url"], {}, 405),
        ("GET", job["url"], {"x-bug": "1"}, 500),
    ]
    preflights = [("POST", "/v1/jobs", "content-type,idempotency-key"), ("GET", job["events_url"], "last-event-id")]

    def cors_headers(reply: Any) -> dict[str, str]:
        return {name: value for name, value in reply.headers.items() if name.startswith("access-control-")}

    for origin, allowed in (("https://app.example", True), ("https://evil.example", False)):
        for method, url, headers, status in requests:
            for web, expected in ((open_, allowed), (plain, False)):
                reply = web.http.request(method, url, headers={"origin": origin, **headers})
                assert reply.status_code == status
                assert bool(cors_headers(reply)) == expected, (origin, method, url)
        counting.fault = TransportError("down")
        reply = open_.http.get(job["url"], headers={"origin": origin})
        counting.fault = None
        assert (reply.status_code, bool(cors_headers(reply))) == (503, allowed)
        for method, url, names in preflights:
            asking = {
                "origin": origin,
                "access-control-request-method": method,
                "access-control-request-headers": names,
            }
            reply = open_.http.options(url, headers=asking)
            assert (reply.status_code == 200, "access-control-allow-origin" in reply.headers) == (allowed, allowed)
            reply = plain.http.options(url, headers=asking)
            assert (reply.status_code, cors_headers(reply)) == (204, {})


ODD_IDS = [
    *("a:b", ":a", "-rf", "--help", "123", "007", "{x}", "}{", "a b", " a", "a/b?c#d%2F", "a/b", "..", ".", "...", "~"),
    *("é", "é", "🙂", "None", "null", "*", "a*", "%2e%2e", "a%", "x" * 512, "events", "cancel", "a/events", "a\\b"),
    *("a&token=b", "a+b", "//evil.example/", "jobs"),
]


@pytest.mark.parametrize("id", ODD_IDS)
def test_h43_every_id_works_in_every_route(id: str, web: Web, worker: Worker) -> None:
    made = web.http.post("/v1/jobs", json={"payload": 1, "id": id})
    assert made.status_code == 202
    job = made.json()
    assert job["id"] == id
    assert web.http.get(job["url"]).json()["id"] == id
    worker.take()
    worker.say("a")
    stream = sse(web.http, job["events_url"])
    assert [next(stream).type, next(stream).type] == ["state", "chunk"]
    page = web.http.get(job["events_url"], params={"limit": 5}, headers={"accept": "application/json"})
    # httpx's params replace a query: ask again with the query that the reply gave
    if "?" in job["events_url"]:
        page = web.http.get(job["events_url"] + "&limit=5", headers={"accept": "application/json"})
    assert [event["type"] for event in page.json()["events"]] == ["chunk"]
    assert web.http.post(job["cancel_url"]).json()["id"] == id
    worker.end()
    assert [event.type for event in stream] == ["cancelled"]


def test_h43_ids_with_slashes_also_work_escaped_in_the_path(web: Web) -> None:
    for id, path in {"a/b?c#d%2F": "a%2Fb%3Fc%23d%252F", "a/events": "a%2Fevents", "é": "%C3%A9"}.items():
        assert web.http.post("/v1/jobs", json={"payload": 1, "id": id}).status_code == 202
        assert web.http.get(f"/v1/jobs/{path}").json()["id"] == id
    for path in ("%ff", "a/b", "a%00b", "x" * 513, "a/b/events"):
        assert web.http.get(f"/v1/jobs/{path}").status_code == 404, path


def test_h43_ids_that_the_queue_refuses_are_refused_with_a_reason(web: Web) -> None:
    for id in ("", "a\nb", "a\r\nevent: x", "\0", "x" * 513, 123):
        reply = web.http.post("/v1/jobs", content=json.dumps({"payload": 1, "id": id}), headers=JSON)
        assert (reply.status_code, reply.json()["code"]) == (422, "invalid")
        assert "id" in reply.json()["detail"]


JSON = {"content-type": "application/json"}
_ = anybody
