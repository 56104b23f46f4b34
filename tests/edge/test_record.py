"""GET and cancel, and what is the same for all routes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Mount

from outlast import AsyncClient, Queue
from outlast.protocol import Keys
from outlast_edge import ANY, Edge

from .conftest import Counting, Web, Worker, anybody


def test_the_record_has_what_a_page_needs_and_not_the_payload(web: Web, worker: Worker) -> None:
    job = web.enqueue({"prompt": "secret"})
    worker.take()
    worker.say("x", progress="0.25")
    reply = web.http.get(job["url"])
    record = reply.json()
    assert (record["id"], record["status"], record["attempt"], record["progress"]) == (job["id"], "active", 1, 0.25)
    assert record["finished_at"] is None
    assert record["created_at"].endswith("+00:00")
    assert "result" not in record
    assert "error" not in record
    assert "secret" not in reply.text
    worker.end('{"big":12345678901234567890,"tiny":0.1}')
    assert web.http.get(job["url"]).json()["result"] == {"big": 12345678901234567890, "tiny": 0.1}


def test_what_went_wrong_is_for_the_operator(
    serve: Callable[..., Web], client: AsyncClient, queue: Queue[Any, Any], worker: Worker, raw: redis.Redis, keys: Keys
) -> None:
    web = serve(Edge(client, queues=[queue], authorize=anybody).app())
    job = web.enqueue()
    worker.take()
    worker.again()
    assert "error" not in web.http.get(job["url"]).json(), "an error that a retry may mend is nobody's business"
    worker.end("ProviderError: key sk-123 refused by 10.0.0.7", "failed")
    replies = [
        web.http.get(job["url"]),
        web.http.get(job["events_url"], headers={"accept": "text/event-stream"}),
        web.http.get(job["events_url"], headers={"accept": "application/json"}),
    ]
    for reply in replies:
        assert "The job failed." in reply.text
        assert "sk-123" not in reply.text
    assert b"sk-123" in raw.hget(keys.job(job["id"]), "error")
    open_web = serve(Edge(client, queues=[queue], authorize=anybody, failure_text=lambda text: text[:13]).app())
    assert open_web.http.get(job["url"]).json()["error"] == "ProviderError"


def test_wait_answers_at_the_end_or_when_the_time_is_up(web: Web, worker: Worker) -> None:
    job = web.enqueue()
    started = time.monotonic()
    assert web.http.get(job["url"], params={"wait": 0.3}).json()["status"] == "waiting"
    assert 0.3 <= time.monotonic() - started < 5
    worker.take()
    threading.Timer(0.3, worker.end).start()
    assert web.http.get(job["url"], params={"wait": 15}).json()["result"] == "done"
    failing = web.enqueue()
    worker.take()
    threading.Timer(0.3, worker.end, ("no", "failed")).start()
    assert web.http.get(failing["url"], params={"wait": 15}).json()["status"] == "failed"
    assert time.monotonic() - started < 10
    assert web.http.get(job["url"], params={"wait": "soon"}).json()["code"] == "bad_parameter"


def test_an_unchanged_record_is_not_sent_again(web: Web, worker: Worker) -> None:
    job = web.enqueue()
    first = web.http.get(job["url"])
    tag = first.headers["etag"]
    for known in (tag, f'W/{tag}, "other"', "*"):
        again = web.http.get(job["url"], headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    worker.take()
    changed = web.http.get(job["url"], headers={"if-none-match": tag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != tag
    assert changed.headers["cache-control"] == "private, no-cache"


def test_cancel_stops_what_has_not_started_and_flags_what_runs(web: Web, worker: Worker) -> None:
    waiting = web.enqueue()
    for _ in range(2):
        reply = web.http.post(waiting["cancel_url"])
        assert reply.status_code == 200
        assert (reply.json()["status"], reply.json()["cancelled"]) == ("cancelled", True)
    running = web.enqueue()
    worker.take()
    for _ in range(2):
        reply = web.http.post(running["cancel_url"]).json()
        assert (reply["status"], reply["cancelled"], reply["cancel_requested"]) == ("active", True, True)
    worker.end()
    assert web.http.get(running["url"]).json()["status"] == "cancelled"
    done = web.enqueue()
    worker.take()
    worker.end()
    reply = web.http.post(done["cancel_url"]).json()
    assert (reply["status"], reply["cancelled"]) == ("completed", False)


def test_pages_for_those_who_cannot_stream(web: Web, worker: Worker) -> None:
    job = web.enqueue()
    accept = {"accept": "application/json"}
    empty = web.http.get(job["events_url"], headers=accept).json()
    assert (empty["events"], empty["next"], empty["done"]) == ([], "0-0", False)
    assert empty["retry_after_ms"] == 1000
    assert empty["state"] == {"status": "waiting", "attempt": 0, "progress": 0.0}
    worker.take()
    worker.say(*"abcde")
    page = web.http.get(job["events_url"], params={"limit": 2}, headers=accept).json()
    assert [event["data"]["text"] for event in page["events"]] == ["a", "b"]
    assert page["next"] == page["events"][-1]["id"]
    rest = web.http.get(job["events_url"], params={"after": page["next"]}, headers=accept).json()
    assert [event["data"]["text"] for event in rest["events"]] == ["c", "d", "e"]
    threading.Timer(0.3, worker.end).start()
    end = web.http.get(job["events_url"], params={"after": rest["next"], "wait": 15}, headers=accept).json()
    assert ([event["type"] for event in end["events"]], end["done"], end["retry_after_ms"]) == (["completed"], True, 0)
    over = web.http.get(job["events_url"], params={"after": end["next"], "wait": 15}, headers=accept).json()
    assert (over["events"], over["done"]) == ([], True)
    for bad in ({"limit": "0"}, {"limit": "x"}, {"wait": "-1"}, {"from": "now"}):
        assert web.http.get(job["events_url"], params=bad, headers=accept).status_code == 400
    assert web.http.get(job["events_url"], params={"from": "latest"}, headers=accept).json()["done"] is True


def test_each_path_says_which_methods_it_has(web: Web) -> None:
    job = web.enqueue()
    for path, allowed in {
        "/v1/jobs": "POST, OPTIONS",
        job["url"]: "GET, HEAD, OPTIONS",
        job["cancel_url"]: "POST, OPTIONS",
        job["events_url"]: "GET, HEAD, OPTIONS",
    }.items():
        options = web.http.options(path)
        assert (options.status_code, options.headers["allow"], options.content) == (204, allowed, b"")
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"):
            if method in allowed.split(", "):
                continue
            reply = web.http.request(method, path)
            assert (reply.status_code, reply.headers["allow"]) == (405, allowed), (method, path)


def test_head_is_get_without_its_body(web: Web, worker: Worker) -> None:
    job = web.enqueue()
    get, head = web.http.get(job["url"]), web.http.head(job["url"])
    same = ("content-type", "content-length", "etag", "cache-control")
    assert [get.headers[name] for name in same] == [head.headers[name] for name in same]
    assert head.content == b""
    stream = web.http.head(job["events_url"], headers={"accept": "text/event-stream"})
    assert (stream.status_code, stream.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert "content-length" not in stream.headers
    assert web.http.head("/v1/jobs/unknown").status_code == 404


@pytest.mark.parametrize("kind", ["async", "plain"])
def test_what_authorize_raises_is_an_answer(
    kind: str, serve: Callable[..., Web], client: AsyncClient, queue: Queue[Any, Any]
) -> None:
    def refuse(request: Any, action: str, job: Any) -> Any:
        match request.headers.get("x-do"):
            case "401":
                raise HTTPException(401, "Log in first.", {"www-authenticate": "Bearer"})
            case "bug":
                raise KeyError("secret")
            case "int":
                return 7
            case _:
                return None

    async def refuse_later(request: Any, action: str, job: Any) -> Any:
        return refuse(request, action, job)

    web = serve(Edge(client, queues=[queue], authorize=refuse if kind == "plain" else refuse_later).app())
    for path, method in (("/v1/jobs/x", "GET"), ("/v1/jobs", "POST"), ("/v1/jobs/x/events", "GET")):
        reply = web.http.request(method, path, headers={"x-do": "401"})
        assert (reply.status_code, reply.json()["code"]) == (401, "unauthorized")
        assert reply.json()["detail"] == "Log in first."
        assert reply.headers["www-authenticate"] == "Bearer"
        for cause in ("bug", "int"):
            reply = web.http.request(method, path, headers={"x-do": cause})
            assert (reply.status_code, reply.json()["code"]) == (500, "internal")
            assert "secret" not in reply.text
    assert web.http.get("/v1/jobs/x").status_code == 404
    assert web.http.post("/v1/jobs", json={"payload": 1}).status_code == 403


def test_mounted_anywhere_it_speaks_of_where_it_is(
    serve: Callable[..., Web], client: AsyncClient, queue: Queue[Any, Any]
) -> None:
    edge = Edge(client, queues=[queue], authorize=anybody)
    mounts = [Mount("/a b/{tenant}", routes=edge.routes), Mount("/app", app=edge.app()), Mount("/", routes=edge.routes)]
    web = serve(Starlette(routes=mounts))
    for root in ("/a%20b/t%C3%A9", "/app", ""):
        made = web.http.post(f"{root}/v1/jobs", json={"payload": 1})
        assert made.status_code == 202, root
        assert made.json()["url"] == f"{root}/v1/jobs/{made.json()['id']}"
        assert web.http.get(made.json()["url"]).status_code == 200
        assert web.http.get(f"{root}/v1/watch.js").headers["content-type"].startswith("text/javascript")
        assert web.http.get(f"{root}/v1/nothing").status_code == 404
    behind = serve(edge.app(), root_path="/proxied")
    made = behind.http.post("/v1/jobs", json={"payload": 1})
    assert made.json()["url"] == f"/proxied/v1/jobs/{made.json()['id']}"


def test_one_app_can_hold_edges_for_different_people(
    serve: Callable[..., Web], client: AsyncClient, queue: Queue[Any, Any]
) -> None:
    staff = Edge(client, queues=[Queue(queue.name + "-staff")], authorize=lambda *_: None)
    web = serve(Starlette(routes=[*staff.routes, *Edge(client, queues=[queue], authorize=anybody).routes]))
    assert web.http.post(f"/v1/queues/{queue.name}/jobs", json={"payload": 1}).status_code == 202
    assert web.http.post(f"/v1/queues/{queue.name}-staff/jobs", json={"payload": 1}).status_code == 403


def test_a_client_can_come_with_the_request(
    serve: Callable[..., Web], client: AsyncClient, queue: Queue[Any, Any]
) -> None:
    """On Cloudflare the environment, and so the database's address, is part of the request."""
    web = serve(Edge(lambda request: client, queues=[queue], authorize=anybody).app())
    assert web.http.get(web.enqueue()["url"]).status_code == 200


def test_unknown_paths_are_problems_too(web: Web) -> None:
    reply = web.http.get("/elsewhere")
    assert (reply.status_code, reply.json()["code"]) == (404, "not_found")


_ = (ANY, Counting)
