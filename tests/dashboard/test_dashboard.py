"""The dashboard over HTTP: what it costs, who may, what it hides and changes. tests/browser shows it to Chromium."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import redis
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.routing import Mount
from starlette.testclient import TestClient
from tests.servers import start_valkey

from outlast import AsyncClient, ConfigurationError, Queue
from outlast_edge import ANY, Edge
from outlast_edge.dashboard import Dashboard, TokenGate
from outlast_worker.gateway import Database, GatewayConfig, GatewayServer

from .fleet import SECRET, Fleet, everything

MINE = {"x-outlast-dashboard": "1"}
MOST = 60
"""Commands that a page may cost."""
TOKEN = "sixteen-characters-and-more"


class Site:
    """A dashboard under /admin, asked as its page asks."""

    def __init__(self, http: TestClient) -> None:
        self.http = http

    def get(self, name: str, **query: str) -> Any:
        reply = self.http.get(f"/admin/api/{name}", params=query)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def post(self, name: str, **body: Any) -> Any:
        reply = self.http.post(f"/admin/api/{name}", json=body, headers=MINE)
        assert reply.status_code == 200, reply.text
        return reply.json()


Serve = Callable[..., Site]


@pytest.fixture
def site() -> Iterator[Serve]:
    with ExitStack() as stack:

        def serve(url: str, *names: str, authorize: Any = lambda *_: ANY, token: str = "", **options: Any) -> Site:
            client = AsyncClient(url, token) if token else AsyncClient(redis_url=url)
            edge = Edge(client, queues=[Queue(name) for name in names], authorize=authorize)
            app = Starlette(routes=[Mount("/admin", app=Dashboard(edge, **options).app())])
            http = stack.enter_context(TestClient(app))
            assert http.portal is not None
            stack.callback(http.portal.call, client.aclose)
            return Site(http)

        yield serve


@pytest.fixture
def fleet(valkey_url: str, queue_name: str) -> Iterator[Fleet]:
    fleet = Fleet(valkey_url, queue_name)
    yield fleet
    fleet.close()


def bill(raw: redis.Redis) -> int:
    """Commands since the last look, without those of a connection's start."""
    told: Any = raw.execute_command("INFO", "commandstats")
    free = ("hello", "client", "info", "config", "select", "auth", "ping")
    calls = {name.removeprefix("cmdstat_"): row["calls"] for name, row in told.items()}
    raw.execute_command("CONFIG", "RESETSTAT")
    return sum(count for name, count in calls.items() if name.partition("|")[0] not in free)


@pytest.mark.parametrize("jobs", [3, 3000])
def test_no_page_costs_more_than_sixty_commands_however_many_jobs_there_are(jobs: int, site: Serve) -> None:
    names = [f"q{n}" for n in range(9)]
    with start_valkey() as server:
        url = f"redis://{server.host}:{server.port}"
        raw = redis.Redis(host=server.host, port=server.port)
        fleet = Fleet(url, "q0")
        for name in names:
            fleet_of = Fleet(url, name)
            fleet_of.alive()
            fleet_of.die(3)
            fleet_of.jobs.enqueue("x")
            fleet_of.close()
        fleet.jobs.enqueue_many(["x"] * jobs)
        [running] = fleet.take()
        if jobs > 100:
            fleet.take(k=25)
        for priority in range(10):
            fleet.jobs.enqueue("x", priority=priority)
        raw.zadd("{q0}:dead", {f"same-{n}": 5 for n in range(jobs)})
        pages = site(url, *names)
        asked = {
            "queues": {},
            "queues, on": {"after": "q5"},
            **{
                f"queue {state}": {"queue": "q0", "state": state}
                for state in ("waiting", "active", "scheduled", "dead")
            },
            "queue, the last": {"queue": "q0", "state": "dead", "reverse": ""},
            "queue, a further page": {"queue": "q0", "state": "dead", "cursor": "5:same-1000"},
            "job": {"queue": "q0", "id": running.id},
            "queue usage": {"queue": "q0", "state": "usage"},
            "find": {"id": running.id},
        }
        costs: dict[str, int] = {}
        pages.get("queues")
        bill(raw)
        for page, query in asked.items():
            pages.get(page.partition(",")[0].partition(" ")[0], **query)
            costs[page] = bill(raw)
        fleet.close()
        raw.close()
    assert max(costs.values()) <= MOST, costs
    # The counting counts: ten bands of priorities, one read for each job that is shown.
    assert costs["queues"] == 55
    assert costs["queue waiting"] >= 40
    assert costs["job"] == 10


def test_everything_is_told_over_tcp_and_over_http(valkey_url: str, queue_name: str, site: Serve) -> None:
    ids = everything(valkey_url, queue_name)
    with GatewayServer(GatewayConfig(databases=[Database(redis_url=valkey_url, token=TOKEN)])) as gateway:
        for pages in (site(valkey_url, queue_name), site(gateway.url, queue_name, token=TOKEN)):
            [row] = pages.get("queues")["queues"]
            assert {"waiting": 41, "active": 1, "scheduled": 1, "dead": 4}.items() <= row.items()
            assert (row["workers"], row["slots"], row["next_waits"] > 0) == (2, 8, True)
            view = pages.get("queue", queue=queue_name, state="active")
            assert [(job["id"], job["worker"], job["progress"]) for job in view["jobs"]] == [(ids["active"], "w1", 0.4)]
            assert view["oldest_waits"] > 0
            assert view["rules"] == "at most 8 at once, rate 30/60s"
            assert {worker["state"] for worker in view["workers"]} == {"running", "blocked"}
            job = pages.get("job", queue=queue_name, id=ids["active"])
            assert {step["name"] for step in job["steps"]} == {"outline", "search the archive"}
            assert job["usage"] == {"input_tokens": 1200, "output_tokens": 340, "cost": 0.0123}
            assert (job["status"], job["worker"], job["events"]) == ("active", "w1", 3)
            assert pages.get("job", queue=queue_name, id=ids["scheduled"])["due_at"] > job["now"]
            assert pages.get("find", id=ids["odd"])["found"] == [{"queue": queue_name, "status": "waiting"}]
            [used] = pages.get("queue", queue=queue_name, state="usage")["days"].values()
            assert used == {"cost": 1.5, "output_tokens": 88000}


def test_every_job_of_a_state_is_on_exactly_one_page(fleet: Fleet, valkey_url: str, site: Serve) -> None:
    ids = [fleet.jobs.enqueue("x").id for _ in range(40)]
    pages = site(valkey_url, fleet.jobs.queue.name)
    page = pages.get("queue", queue=fleet.jobs.queue.name)
    seen = [job["id"] for job in page["jobs"]]
    while page["next"]:
        page = pages.get("queue", queue=fleet.jobs.queue.name, cursor=page["next"])
        seen += [job["id"] for job in page["jobs"]]
    assert seen == ids


def test_states_without_a_list_are_refused_with_the_reason(fleet: Fleet, valkey_url: str, site: Serve) -> None:
    pages = site(valkey_url, fleet.jobs.queue.name)
    reply = pages.http.get("/admin/api/queue", params={"queue": fleet.jobs.queue.name, "state": "completed"})
    assert reply.status_code == 400
    assert "get one by its id" in reply.json()["detail"]


def test_what_jobs_were_given_and_said_does_not_leave_the_server(valkey_url: str, queue_name: str, site: Serve) -> None:
    ids = everything(valkey_url, queue_name)
    shut, open_ = site(valkey_url, queue_name), site(valkey_url, queue_name, payloads=True)

    def all_of(pages: Site) -> str:
        asked = [("queues", {})] + [("queue", {"queue": queue_name, "state": s}) for s in ("waiting", "active", "dead")]
        asked += [("job", {"queue": queue_name, "id": id}) for id in ids.values()]
        asked += [("events", {"queue": queue_name, "id": ids["done"]})]
        return "".join(pages.http.get(f"/admin/api/{name}", params=query).text for name, query in asked)

    assert SECRET not in all_of(shut)
    shown = all_of(open_)
    assert shown.count(SECRET) > 5
    stream = shut.http.get("/admin/api/events", params={"queue": queue_name, "id": ids["done"]}).text
    assert 'event: chunk\ndata: {"text":""}' in stream, "that it said something is told"
    assert 'event: completed\ndata: {"result":null}' in stream


def test_an_operator_cancels_retries_pauses_and_resumes(fleet: Fleet, valkey_url: str, site: Serve) -> None:
    name = fleet.jobs.queue.name
    pages = site(valkey_url, name)
    id = fleet.jobs.enqueue("x").id
    assert pages.post("cancel", queue=name, id=id) == {"done": True}
    assert pages.get("job", queue=name, id=id)["status"] == "cancelled"
    [dead] = fleet.die(1)
    assert pages.post("retry", queue=name, id=dead) == {"done": True}
    assert pages.post("retry", queue=name, id=dead) == {"done": False}
    pages.post("pause", queue=name)
    assert pages.get("queue", queue=name)["paused"] is True
    assert fleet.take() == []
    pages.post("resume", queue=name)
    assert [job.id for job in fleet.take()] == [dead]


def test_all_dead_jobs_are_retried_once_even_if_they_die_again_meanwhile(
    fleet: Fleet, valkey_url: str, site: Serve
) -> None:
    name = fleet.jobs.queue.name
    pages = site(valkey_url, name)
    ids = fleet.die(60)
    batch: dict[str, Any] = {"cursor": None, "before": None}
    total = 0
    for _ in range(10):
        batch = pages.post("retry-all", queue=name, cursor=batch["cursor"], before=batch["before"])
        total += batch["retried"]
        for job in fleet.take(k=60):
            fleet.end(job, "again", "failed")
        if batch["cursor"] is None:
            break
    assert (total, batch["cursor"]) == (60, None)
    assert [job.attempt for job in map(fleet.jobs.get, ids) if job is not None] == [1] * 60


def test_only_an_operator_gets_in(fleet: Fleet, valkey_url: str, site: Serve) -> None:
    name = fleet.jobs.queue.name
    id = fleet.jobs.enqueue("x", owner="anna").id
    asked: list[tuple[str, Any]] = []

    def authorize(request: Any, action: str, job: Any) -> Any:
        asked.append((action, job))
        who = request.headers.get("who")
        if who == "nobody":
            raise HTTPException(401, "sign in")
        return ANY if who == "root" or (who == "reader" and action == "inspect") else who

    pages = site(valkey_url, name, authorize=authorize)
    paths = ["/", "/page.js", "/api/queues", f"/api/queue?queue={name}", f"/api/job?queue={name}&id={id}"]
    paths += [f"/api/events?queue={name}&id={id}", f"/api/find?id={id}"]
    for who, status in (("", 403), ("anna", 403), ("nobody", 401)):
        for path in paths:
            assert pages.http.get(f"/admin{path}", headers={"who": who}).status_code == status, (who, path)
    for who, status in (("reader", 403), ("anna", 403), ("root", 200)):
        reply = pages.http.post("/admin/api/cancel", json={"queue": name, "id": id}, headers={**MINE, "who": who})
        assert reply.status_code == status
    assert pages.http.get("/admin/api/queues", headers={"who": "reader"}).status_code == 200
    assert set(asked) == {("inspect", None), ("operate", None)}


@pytest.mark.parametrize(
    "headers",
    [{}, {**MINE, "sec-fetch-site": "cross-site"}, {**MINE, "sec-fetch-site": "same-site"}],
    ids=["no header", "another site", "a neighbour"],
)
def test_another_site_changes_nothing(headers: dict[str, str], fleet: Fleet, valkey_url: str, site: Serve) -> None:
    name, id = fleet.jobs.queue.name, fleet.jobs.enqueue("x").id
    pages = site(valkey_url, name)
    for change in ("cancel", "retry", "retry-all", "pause", "resume"):
        reply = pages.http.post(f"/admin/api/{change}", json={"queue": name, "id": id}, headers=headers)
        assert (reply.status_code, reply.json()["code"]) == (403, "cross_site")
        assert pages.http.get(f"/admin/api/{change}").status_code == 405
    form = {**MINE, "content-type": "text/plain"}
    reply = pages.http.post("/admin/api/cancel", content=json.dumps({"queue": name, "id": id}), headers=form)
    assert reply.status_code == 415
    job = fleet.jobs.get(id)
    assert job is not None
    assert (fleet.jobs.rules().paused, job.status) == (False, "waiting")


def test_the_page_may_load_nothing_from_elsewhere_and_run_nothing_inline(valkey_url: str, site: Serve) -> None:
    pages = site(valkey_url, "any")
    for path in ("/", "/page.css", "/page.js", "/watch.js", "/icon.svg", "/api/queues", "/api/job?queue=no&id=no"):
        reply = pages.http.get("/admin" + path)
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
    page = pages.http.get("/admin/").text
    assert "<script>" not in page
    assert "style=" not in page
    assert "://" not in page


def test_a_public_edge_has_no_dashboard() -> None:
    with pytest.warns(UserWarning, match="everybody"):
        edge = Edge(AsyncClient(redis_url="redis://127.0.0.1:1"), queues=[Queue("q")], public=True)
    with pytest.raises(ConfigurationError, match="authorize="):
        Dashboard(edge)


def test_the_token_opens_once_in_the_address_and_then_as_a_cookie_that_no_script_reads() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("in")(scope, receive, send)

    http = TestClient(TokenGate(app, TOKEN), follow_redirects=False)
    assert http.get("/").status_code == 401
    assert http.get("/?token=wrong").status_code == 401
    assert http.get("/?token=%FFé").status_code == 401
    first = http.get("/", params={"token": TOKEN})
    cookie = first.headers["set-cookie"]
    assert (first.status_code, first.headers["location"]) == (303, "./")
    assert "HttpOnly" in cookie
    assert TOKEN not in cookie
    assert http.get("/api/queues").text == "in"
    assert TestClient(TokenGate(app, TOKEN + "2"), cookies=dict(http.cookies)).get("/").status_code == 401


def test_the_command_prints_the_address_that_opens_it_and_ends_in_good_order(
    fleet: Fleet, valkey_url: str, queue_name: str
) -> None:
    fleet.jobs.enqueue("x")
    command = [sys.executable, "-m", "outlast_worker", "dashboard", queue_name, "--redis-url", valkey_url]
    with subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            with httpx.Client(follow_redirects=True, timeout=20) as browser:
                base = address.partition("?")[0]
                assert browser.get(f"{base}api/queues").status_code == 401
                page = browser.get(address)
                assert (page.status_code, "token" in str(page.url)) == (200, False)
                [row] = browser.get(f"{base}api/queues").json()["queues"]
                assert (row["queue"], row["waiting"]) == (queue_name, 1)
                foreign = browser.get(f"{base}api/queues", headers={"host": "evil.example"})
                assert foreign.status_code == 400, "a name that was made to resolve to loopback"
        finally:
            process.terminate()
        assert process.wait(20) == 0
