"""The examples for servers of one's own: three ASGI servers in one line each, Flask and Django."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse

from ..conftest import BASE_PYTHON, BEARER, ROOT, Hand, Packages, Upstream, dependencies, python_path, until_quiet

EXAMPLES = ROOT / "edge" / "examples"
PYTHON = [str(BASE_PYTHON), "-S", "-m"]

ASGI = {
    "uvicorn": ["uvicorn", "app:app", "--port", "PORT"],
    "granian": ["granian", "--interface", "asgi", "app:app", "--port", "PORT"],
    "hypercorn": ["hypercorn", "app:app", "--bind", "127.0.0.1:PORT"],
}
WSGI = {
    "flask": ["flask", "--app", "flask_app", "run", "--port", "PORT"],
    "django": ["django_app", "runserver", "--noreload", "127.0.0.1:PORT"],
}


@pytest.fixture(scope="session")
def installed(packages: Packages) -> str:
    """PYTHONPATH with everything that the two examples name, and the other two servers."""
    wanted = {
        *dependencies("client", "edge", "worker", example=EXAMPLES / "asgi"),
        *dependencies("client", "edge", example=EXAMPLES / "wsgi"),
        *("granian>=2,<3", "hypercorn>=0.17,<1"),
    }
    return python_path(ROOT / "worker" / "src", packages.install("servers", sorted(wanted)))


@pytest.fixture
def site(request: pytest.FixtureRequest, installed: str, upstream: Upstream) -> Iterator[httpx.Client]:
    """A client of the server that the test asks for: (folder of the example, command, environment)."""
    folder, command, environment = request.param
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    process = subprocess.Popen(
        [*PYTHON, *(part.replace("PORT", str(port)) for part in command)],
        cwd=EXAMPLES / folder,
        env={
            "PATH": os.defpath,
            "PYTHONPATH": f"{EXAMPLES / folder}:{installed}",
            "PYTHONDONTWRITEBYTECODE": "1",
            **upstream.environment,
            **({"UPSTASH_REDIS_REST_URL": "", "UPSTASH_REDIS_REST_TOKEN": ""} if environment == "tcp" else {}),
            "REDIS_URL": upstream.redis_url,
        },
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            end = time.monotonic() + 30
            while True:
                try:
                    client.get("/")
                    break
                except httpx.TransportError:
                    assert process.poll() is None, "the server did not start"
                    assert time.monotonic() < end, "the server does not listen"
                    time.sleep(0.05)
            yield client
    finally:
        process.terminate()
        process.wait()


def listen(site: httpx.Client, url: str, headers: dict[str, str], hand: Hand) -> None:
    """Hear a job's words as they come, leave, come back, hear the end, and be told to stop."""
    heard, cursor = [], ""
    with connect_sse(site, "GET", url, headers=headers) as source:
        events = (event for event in source.iter_sse() if event.event != "state")
        for word in ("one ", "two\n", "\u2028three "):
            hand.say(word)  # the next is said only when this one was heard: a buffered stream never gets past it
            event = next(events)
            assert event.event == "chunk"
            heard.append(json.loads(event.data)["text"])
            cursor = event.id
    hand.say("four")
    hand.end("the answer")
    with connect_sse(site, "GET", url, headers={**headers, "last-event-id": cursor}) as source:
        rest = [event for event in source.iter_sse() if event.event != "state"]
    assert heard == ["one ", "two\n", "\u2028three "]
    assert [(event.event, json.loads(event.data)) for event in rest] == [
        ("chunk", {"text": "four"}),
        ("completed", {"result": "the answer"}),
    ]
    assert site.get(url, headers={**headers, "last-event-id": rest[-1].id}).status_code == 204
    assert site.get(url, headers={**headers, "last-event-id": "garbage"}).status_code == 400


@pytest.mark.parametrize(
    ("site", "over"),
    [
        pytest.param(("asgi", command, over), over, id=f"{name}-{over}")
        for name, command in ASGI.items()
        for over in (("http", "tcp") if name == "uvicorn" else ("tcp",))
    ],
    indirect=["site"],
)
def test_an_asgi_server_in_one_line(site: httpx.Client, over: str, hand: Hand, upstream: Upstream) -> None:
    requests = upstream.faults.delay(0, times=None)
    made = site.post("/v1/jobs", json={"payload": {"prompt": "hello"}}, headers=BEARER)
    assert made.status_code == 202
    hand.take(made.json()["id"])
    listen(site, made.json()["events_url"], BEARER, hand)
    assert (requests.fired > 0) == (over == "http")


@pytest.mark.parametrize(
    "site", [pytest.param(("asgi", command, "http"), id=name) for name, command in ASGI.items()], indirect=True
)
def test_h58_a_viewer_that_leaves_is_let_go_and_the_job_runs_on(
    site: httpx.Client, hand: Hand, upstream: Upstream
) -> None:
    """Before the first event, in silence, and in mid-token; on three servers, each with its own way of telling."""
    made = site.post("/v1/jobs", json={"payload": {"prompt": "hello"}}, headers=BEARER).json()
    reads = upstream.faults.delay(0, times=None)
    with connect_sse(site, "GET", made["events_url"], headers=BEARER):
        pass
    hand.take(made["id"])
    with connect_sse(site, "GET", made["events_url"], headers=BEARER) as source:
        hand.say("one")
        next(event for event in source.iter_sse() if event.event == "chunk")
        time.sleep(0.5)
    with connect_sse(site, "GET", made["events_url"], headers=BEARER) as source:
        hand.say("two")
        next(event for event in source.iter_sse() if event.event == "chunk")
    until_quiet(reads)
    assert reads.fired > 0
    assert site.get(made["url"], headers=BEARER).json()["status"] == "active"
    hand.end("the answer")


@pytest.mark.parametrize("site", [("wsgi", WSGI["flask"], "http")], indirect=True)
def test_a_flask_view(site: httpx.Client, hand: Hand) -> None:
    watch_in_a_view(site, hand, unknown={401})


@pytest.mark.parametrize("site", [("wsgi", WSGI["django"], "http")], indirect=True)
def test_a_django_view(site: httpx.Client, hand: Hand) -> None:
    watch_in_a_view(site, hand, unknown={404})


def watch_in_a_view(site: httpx.Client, hand: Hand, unknown: set[int]) -> None:
    user = {"x-user": "ann"}
    made: dict[str, Any] = site.post("/jobs", json={"prompt": "hello"}, headers=user).json()
    hand.take(made["id"])
    assert site.get(made["events_url"], headers={"x-user": "bob"}).status_code == 404
    assert site.get(made["events_url"]).status_code in unknown
    listen(site, made["events_url"], user, hand)
    other = site.post("/jobs", json={"prompt": "stop me"}, headers=user).json()
    assert site.post(f"/jobs/{other['id']}/cancel", headers={"x-user": "bob"}).status_code == 404
    assert site.post(f"/jobs/{other['id']}/cancel", headers=user).json() == {"cancelled": True}
