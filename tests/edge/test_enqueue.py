"""POST: making jobs over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import redis
from pydantic import BaseModel

from outlast import AsyncClient, Queue
from outlast.protocol import Keys
from outlast_edge import ANY, Edge

from .conftest import Counting, Web, Worker, anybody


class Prompt(BaseModel):
    prompt: str
    heat: float = 1.0


def who(request: Any, action: str, job: Any) -> Any:
    """An owner named in a header; the boss may do everything."""
    name = request.headers.get("x-user")
    return ANY if name == "boss" else name


@pytest.fixture
def owned(serve: Callable[..., Web], counting: Counting, queue: Queue[Any, Any]) -> Web:
    return serve(Edge(AsyncClient(transport=counting), queues=[queue], authorize=who).app())


def post(web: Web, body: Any, user: str = "boss", **headers: str) -> httpx.Response:
    return web.http.post("/v1/jobs", json=body, headers={"x-user": user, **headers})


def test_a_new_job_is_accepted_and_says_where_to_go_on(web: Web, worker: Worker, queue: Queue[Any, Any]) -> None:
    reply = web.http.post("/v1/jobs", json={"payload": {"prompt": "hi"}})
    assert reply.status_code == 202
    made = reply.json()
    assert made["status"] == "waiting"
    assert made["deduplicated"] is False
    assert reply.headers["location"] == made["url"] == f"/v1/jobs/{made['id']}"
    assert made["events_url"] == made["url"] + "/events"
    assert made["cancel_url"] == made["url"] + "/cancel"
    assert reply.headers["cache-control"] == "no-store"
    assert worker.take() == made["id"]
    assert json.loads(worker.job.payload) == {"prompt": "hi"}
    named = web.http.post(f"/v1/queues/{queue.name}/jobs", json={"payload": 1}).json()
    assert named["url"] == f"/v1/queues/{queue.name}/jobs/{named['id']}"
    assert web.http.get(named["url"]).json()["id"] == named["id"]


def test_an_enqueue_is_one_call_to_the_database(owned: Web, counting: Counting) -> None:
    assert post(owned, {"payload": 1}, "ann").status_code == 202
    assert counting.calls == ["enqueue"]


def test_the_same_key_gives_the_same_job(owned: Web) -> None:
    first = post(owned, {"payload": 1}, "ann", **{"idempotency-key": "k1"})
    again = post(owned, {"payload": 1}, "ann", **{"idempotency-key": '"k1"'})
    assert (first.status_code, again.status_code) == (202, 200)
    assert again.json() == {**first.json(), "deduplicated": True}
    assert again.headers["location"] == first.headers["location"]


def test_twenty_clicks_are_one_job(owned: Web, raw: redis.Redis, keys: Keys) -> None:
    with ThreadPoolExecutor(20) as pool:
        replies = list(pool.map(lambda _: post(owned, {"payload": 1}, "ann", **{"idempotency-key": "k"}), range(20)))
    assert sorted(reply.status_code for reply in replies) == [200] * 19 + [202]
    assert len({reply.json()["id"] for reply in replies}) == 1
    assert raw.zcard(keys.ready) == 1


def test_a_key_is_its_owners_alone(owned: Web) -> None:
    """Neither the job nor the conflict of somebody else's key can be seen."""
    made = [post(owned, {"payload": user}, user, **{"idempotency-key": "k"}) for user in ("ann", "bob", "boss")]
    assert [reply.status_code for reply in made] == [202, 202, 202]
    assert len({reply.json()["id"] for reply in made}) == 3


def test_a_key_with_another_payload_is_refused(owned: Web, raw: redis.Redis, keys: Keys) -> None:
    post(owned, {"payload": 1}, "ann", **{"idempotency-key": "k"})
    reply = post(owned, {"payload": 2}, "ann", **{"idempotency-key": "k"})
    assert (reply.status_code, reply.json()["code"]) == (422, "idempotency_conflict")
    assert raw.zcard(keys.ready) == 1


@pytest.mark.parametrize("key", ["", "a" * 256, "a b", '"', '"a', "é", '"a"b"', "a\tb"])
def test_bad_keys_are_refused(key: str, owned: Web) -> None:
    headers = [(b"x-user", b"ann"), (b"idempotency-key", key.encode())]
    reply = owned.http.post("/v1/jobs", json={"payload": 1}, headers=headers)
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_idempotency_key")


def test_the_owner_is_stored(owned: Web, raw: redis.Redis, keys: Keys) -> None:
    mine = post(owned, {"payload": 1}, "ann").json()
    assert raw.hget(keys.job(mine["id"]), "owner") == b"ann"
    for_bob = post(owned, {"payload": 1, "owner": "bob"}).json()
    assert raw.hget(keys.job(for_bob["id"]), "owner") == b"bob"
    assert raw.hget(keys.job(post(owned, {"payload": 1}).json()["id"]), "owner") is None


def test_options_are_for_the_trusted_unless_opened(
    serve: Callable[..., Web], client: AsyncClient, queue: Queue[Any, Any], raw: redis.Redis, keys: Keys
) -> None:
    web = serve(Edge(client, queues=[queue], authorize=who, accept=["delay"]).app())
    options = {"priority": 9, "delay": 60, "max_attempts": 1, "timeout": 5, "result_ttl": 60, "id": "mine"}
    boss = post(web, {"payload": 1, **options})
    assert (boss.status_code, boss.json()["status"], boss.json()["id"]) == (202, "scheduled", "mine")
    assert raw.hmget(keys.job("mine"), "priority", "maxAttempts", "timeoutMs") == [b"9", b"1", b"5000"]
    for name, value in options.items():
        reply = post(web, {"payload": 1, name: value}, "ann")
        assert (reply.status_code, name) == (202 if name == "delay" else 422, name)
    assert post(web, {"payload": 1, "owner": "bob"}, "ann").json()["code"] == "not_accepted"


def test_a_chosen_id_cannot_take_somebody_elses_place(
    serve: Callable[..., Web], client: AsyncClient, queue: Queue[Any, Any], worker: Worker
) -> None:
    web = serve(Edge(client, queues=[queue], authorize=who, accept=["id"]).app())
    post(web, {"payload": "ann's", "id": "x"}, "ann")
    worker.take()
    running = [post(web, {"payload": 1, "id": "x"}, user) for user in ("ann", "bob")]
    worker.end('"secret"')
    ended = post(web, {"payload": "bob's", "id": "x"}, "bob")
    assert {(reply.status_code, reply.text) for reply in (*running, ended)} == {(409, running[0].text)}
    assert web.http.get("/v1/jobs/x", headers={"x-user": "ann"}).json()["result"] == "secret"
    assert post(web, {"payload": "again", "id": "x"}, "ann").status_code == 202


REFUSED = [
    (b"", 400, "bad_json"),
    (b"{", 400, "bad_json"),
    (b'{"payload": NaN}', 400, "bad_json"),
    (b'{"payload": "\xff"}', 400, "bad_json"),
    (b"[" * 100_000, 400, "bad_json"),
    (b'{"payload": ' + b"9" * 5000 + b"}", 400, "bad_json"),
    (b"[]", 422, "bad_body"),
    (b"null", 422, "bad_body"),
    (b"{}", 422, "bad_body"),
    (b'{"payload": 1, "prioritty": 3}', 422, "unknown_field"),
    (b'{"payload": 1, "idempotency_key": "k"}', 422, "unknown_field"),
    (b'{"payload": 1, "priority": 10}', 422, "invalid"),
    (b'{"payload": 1, "priority": true}', 422, "invalid"),
    (b'{"payload": 1, "delay": -1}', 422, "invalid"),
    (b'{"payload": 1, "delay": "5"}', 422, "invalid"),
    (b'{"payload": 1, "delay": null}', 422, "invalid"),
    (b'{"payload": 1, "id": ""}', 422, "invalid"),
    (b'{"payload": 1, "id": 5}', 422, "invalid"),
    (b'{"payload": 1, "owner": 5}', 422, "invalid"),
    (b'{"payload": "\\ud83d"}', 422, "bad_payload"),
]


@pytest.mark.parametrize(("body", "status", "code"), REFUSED)
def test_bad_bodies_are_refused_before_anything_is_queued(
    body: bytes, status: int, code: str, web: Web, raw: redis.Redis, keys: Keys
) -> None:
    reply = web.http.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["code"]) == (status, code)
    assert ("Idempotency-Key" in reply.json()["detail"]) is (b"idempotency_key" in body)
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.json()["status"] == status
    assert raw.keys(f"{keys.base}*") == []


def test_a_payload_that_does_not_fit_the_declaration_names_the_place_and_not_the_value(
    serve: Callable[..., Web], client: AsyncClient, queue_name: str, raw: redis.Redis, keys: Keys
) -> None:
    web = serve(Edge(client, queues=[Queue(queue_name, payload=Prompt)], authorize=anybody).app())
    reply = web.http.post("/v1/jobs", json={"payload": {"prompt": "secret", "heat": "secret"}})
    assert (reply.status_code, reply.json()["code"]) == (422, "bad_payload")
    assert "heat" in reply.json()["detail"]
    assert "secret" not in reply.text
    assert raw.keys(f"{keys.base}*") == []
    good = web.http.post("/v1/jobs", json={"payload": {"prompt": "p"}})
    assert good.status_code == 202
    assert raw.hget(keys.job(good.json()["id"]), "payload") == b'{"prompt":"p","heat":1.0}'


def test_sizes_are_limited_before_anything_is_queued(
    serve: Callable[..., Web], client: AsyncClient, queue_name: str, raw: redis.Redis, keys: Keys
) -> None:
    small = Queue(queue_name, max_payload=1000)
    web = serve(Edge(client, queues=[small], authorize=anybody).app())

    sent = 0

    def parts(count: int) -> Any:
        nonlocal sent
        yield b'{"payload": "'
        for _ in range(count):
            sent += 1
            yield b"x" * 100_000
        yield b'"}'

    kind = {"content-type": "application/json"}
    assert web.http.post("/v1/jobs", json={"payload": "x" * 998}).status_code == 202
    raw.delete(*raw.keys(f"{keys.base}*"))
    for reply in (
        web.http.post("/v1/jobs", json={"payload": "x" * 999}),
        web.http.post("/v1/jobs", json={"payload": "x" * 100_000}),
        web.http.post("/v1/jobs", content=parts(500), headers=kind),  # no Content-Length to go by
        web.http.post("/v1/jobs", json={"payload": "é" * 500}),
    ):
        assert (reply.status_code, reply.json()["code"]) == (413, "too_large")
    assert sent < 400, "50 MB were read before they were refused"
    assert raw.keys(f"{keys.base}*") == []


def test_only_json_is_taken(web: Web) -> None:
    """A form on another site can post text with the visitor's cookies, but not JSON."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        reply = web.http.post("/v1/jobs", content=b'{"payload": 1}', headers={"content-type": kind})
        assert (reply.status_code, reply.json()["code"]) == (415, "not_json")
    gzip = {"content-type": "application/json", "content-encoding": "gzip"}
    assert web.http.post("/v1/jobs", content=b"x", headers=gzip).status_code == 415
    other = {"content-type": "application/vnd.api+json; charset=utf-8"}
    assert web.http.post("/v1/jobs", content=b'{"payload": 1}', headers=other).status_code == 202


def test_several_queues_are_told_apart_by_their_path(
    serve: Callable[..., Web], client: AsyncClient, queue_name: str
) -> None:
    odd = Queue(queue_name + " / ü%2F")
    web = serve(Edge(client, queues=[Queue(queue_name), odd], authorize=anybody).app())
    assert web.http.post("/v1/jobs", json={"payload": 1}).status_code == 404
    assert web.http.post("/v1/queues/other/jobs", json={"payload": 1}).status_code == 404
    from urllib.parse import quote

    made = web.http.post(f"/v1/queues/{quote(odd.name, safe='')}/jobs", json={"payload": 1})
    assert made.status_code == 202
    assert web.http.get(made.json()["url"]).json()["queue"] == odd.name
    assert web.http.get(f"/v1/queues/{queue_name}/jobs/{made.json()['id']}").status_code == 404
