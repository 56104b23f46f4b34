"""The examples under the bootstrap that Vercel itself puts around a Python function."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import pytest
from httpx_sse import ServerSentEvent, connect_sse

from ..conftest import BEARER, ROOT, Hand, Packages, Relay, Upstream, dependencies, python_path, until_quiet
from .host import Host, invocation

EXAMPLES = ROOT / "edge" / "examples" / "vercel"
PATIENCE = 30.0


class Deploy(Protocol):
    def __call__(self, example: str, entry: str, variable: str, **environment: str) -> AbstractContextManager[Host]: ...


@pytest.fixture
def deploy(packages: Packages, python312: Path, upstream: Upstream, tmp_path: Path) -> Deploy:
    """Puts an example on Vercel: `entry` is its entry file, `variable` what that exports."""

    def start(example: str, entry: str, variable: str, **environment: str) -> Host:
        wanted = [*dependencies("client", "edge", example=EXAMPLES / example), "vercel-runtime>=0.24,<1"]
        path = python_path(packages.install("vercel", wanted, python=python312))
        folder = tmp_path / example
        shutil.copytree(EXAMPLES / example, folder)
        given = {**upstream.environment, "PYTHONPATH": f"{folder}:{path}", **environment}
        return Host(python312, folder, entry, variable, given, patience=PATIENCE)

    return start


def kinds(events: Iterator[ServerSentEvent]) -> Iterator[tuple[str, Any, str]]:
    for event in events:
        yield event.event, json.loads(event.data), event.id


def test_h59_the_app_streams_and_asks_back_before_the_deadline(deploy: Deploy, hand: Hand) -> None:
    with deploy("app", "app.py", "app") as host:
        created = host.client.post(
            "/v1/jobs", json={"payload": {"prompt": "hello"}}, headers={**BEARER, **invocation(1)}
        )
        assert created.status_code == 202
        made = created.json()
        hand.take(made["id"])
        heard, cursor = [], ""
        begin = time.monotonic()
        headers = {**BEARER, **invocation(2, deadline=7.0)}
        with connect_sse(host.client, "GET", made["events_url"], headers=headers) as source:
            events = kinds(source.iter_sse())
            assert next(events)[0] == "state"
            for word in ("one ", "two ", "three "):
                hand.say(word)  # the next is said only when this one was heard: a buffered stream never gets past it
                kind, data, cursor = next(event for event in events if event[0] != "state")
                assert kind == "chunk"
                heard.append(data["text"])
            kind, data, _ = next(events)
            assert (kind, data["reason"]) == ("reconnect", "max_duration")
            assert time.monotonic() - begin < 6, "it left well before the function is ended"
            assert next(events, None) is None
        hand.say("four")
        hand.end("one two three four")
        headers = {**BEARER, **invocation(3, deadline=60), "last-event-id": cursor}
        with connect_sse(host.client, "GET", made["events_url"], headers=headers) as source:
            kind, data, cursor = next(event for event in kinds(source.iter_sse()) if event[0] == "completed")
        assert data == {"result": "one two three four"}
        gone = host.client.get(made["events_url"], headers={**BEARER, "last-event-id": cursor})
        assert gone.status_code == 204, "a viewer that has seen the end is told to stop"
        assert host.client.get(made["url"]).status_code == 404, "nobody sees a job without saying who he is"


def test_a_viewer_that_leaves_leaves_nothing_behind(deploy: Deploy, hand: Hand, upstream: Upstream) -> None:
    with deploy("app", "app.py", "app") as host:
        made = host.client.post("/v1/jobs", json={"payload": {"prompt": "hello"}}, headers=BEARER).json()
        hand.take(made["id"])
        reads = upstream.faults.delay(0, times=None)
        with connect_sse(host.client, "GET", made["events_url"], headers=BEARER) as source:
            hand.say("one")
            next(event for event in source.iter_sse() if event.event == "chunk")
        until_quiet(reads)
        assert host.client.get(made["url"], headers=BEARER).json()["status"] == "active"


def test_a_plain_function_makes_a_job_with_one_request_and_once_however_often_it_is_asked(
    deploy: Deploy, hand: Hand, upstream: Upstream, relay: Relay
) -> None:
    requests = upstream.faults.delay(0, times=None)
    with deploy("function", "api/enqueue.py", "handler", UPSTASH_REDIS_REST_URL=relay.url) as host:

        def post(body: Any, **headers: str) -> tuple[int, Any]:
            answer = host.client.post("/api/enqueue", json=body, headers={**BEARER, **headers})
            return answer.status_code, answer.json()

        assert host.client.post("/api/enqueue", json={"prompt": "hello"}).status_code == 401
        assert requests.fired == 0
        status, made = post({"prompt": "hello"}, **{"idempotency-key": "click-1"})
        assert status == 202
        assert requests.fired in (1, 2), "two if the database had not seen the script"
        upstream.faults.drop_reply(executed=True)
        assert post({"prompt": "hello"}, **{"idempotency-key": "click-1"}) == (200, made)
        assert post({"prompt": "other"}, **{"idempotency-key": "click-1"})[0] == 422
        assert post({"other": 1})[0] == 400
        assert hand.waiting() == 1
        with ThreadPoolExecutor(8) as clicks:  # requests of one instance come in threads
            answers = list(clicks.map(lambda n: post({"prompt": f"number {n}"}), range(24)))
        assert {status for status, _ in answers} == {202}
        assert hand.waiting() == 25
        relay.cut(reset=True)
        assert post({"prompt": "after the cut"})[0] == 202
        assert hand.waiting() == 26
