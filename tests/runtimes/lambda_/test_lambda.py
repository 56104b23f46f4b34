"""The examples on Lambda's own runtime client, which the fake runtime API feeds, freezes and thaws."""

from __future__ import annotations

import base64
import json
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import pytest

from ..conftest import BASE_PYTHON, BEARER, ROOT, Hand, Packages, Relay, Upstream, dependencies, python_path
from .runtime_api import Invocation, Sandbox, url_event

EXAMPLE = ROOT / "edge" / "examples" / "lambda"
PYTHON = [str(BASE_PYTHON), "-S"]


class Deploy(Protocol):
    def __call__(self, handler: str, **environment: str) -> AbstractContextManager[Sandbox]: ...


@pytest.fixture
def deploy(packages: Packages, upstream: Upstream, tmp_path: Path) -> Deploy:
    """Puts the example on Lambda with `handler` as its handler; `stream.sh` stands for the streaming runtime."""
    wanted = [*dependencies("client", "edge", example=EXAMPLE), "awslambdaric>=3,<5"]
    path = python_path(packages.install("lambda", wanted), Path(__file__).parent)
    folder = tmp_path / "function"
    shutil.copytree(EXAMPLE, folder)
    (tmp_path / "python3").symlink_to(PYTHON[0])

    def start(handler: str, *, stream: bool = False, **environment: str) -> Sandbox:
        command = [*PYTHON, "-m", "awslambdaric", handler]
        if stream:  # what AWS_LAMBDA_EXEC_WRAPPER names is started with the runtime's own command as its arguments
            command.insert(0, folder / "bootstrap.sh")
        given = {"PYTHONPATH": f"{folder}:{path}", "PATH": str(tmp_path), "_HANDLER": handler}
        return Sandbox(list(map(str, command)), folder, {**upstream.environment, **given, **environment})

    return start


def body_of(answer: Mapping[str, Any], status: int) -> Any:
    assert answer["statusCode"] == status, answer
    body = answer["body"]
    return json.loads(base64.b64decode(body) if answer.get("isBase64Encoded") else body)


def enqueue(prompt: str, **headers: str) -> dict[str, Any]:
    return url_event("POST", "/", body={"prompt": prompt}, headers=headers)


def test_a_plain_handler_makes_jobs_looks_at_them_and_cancels(deploy: Deploy, hand: Hand) -> None:
    with deploy("function.handler") as sandbox:
        made = body_of(sandbox.invoke(enqueue("hello", **{"idempotency-key": "click-1"})), 202)
        assert body_of(sandbox.invoke(enqueue("hello", **{"idempotency-key": "click-1"})), 200) == made
        assert body_of(sandbox.invoke(enqueue("another", **{"idempotency-key": "click-1"})), 422)["id"] == made["id"]
        assert "prompt" in body_of(sandbox.invoke(url_event("POST", "/", body={"no": "prompt"})), 400)["error"]
        assert body_of(sandbox.invoke(url_event("GET", f"/{made['id']}")), 200)["status"] == "waiting"
        hand.take(made["id"])
        hand.end("the answer")
        done = body_of(sandbox.invoke(url_event("GET", f"/{made['id']}")), 200)
        assert (done["status"], done["result"]) == ("completed", "the answer")
        assert body_of(sandbox.invoke(url_event("DELETE", f"/{made['id']}")), 200) == {"cancelled": False}
        other = body_of(sandbox.invoke(enqueue("stop me")), 202)
        assert body_of(sandbox.invoke(url_event("DELETE", f"/{other['id']}")), 200) == {"cancelled": True}
        assert "no such job" in body_of(sandbox.invoke(url_event("GET", "/unknown")), 404)["error"]


@pytest.mark.parametrize("handler", ["function.handler", "handlers.loop_kept"])
def test_h60_one_connection_serves_all_invocations_and_its_loss_in_a_freeze_costs_nothing(
    deploy: Deploy, hand: Hand, relay: Relay, upstream: Upstream, handler: str
) -> None:
    event = enqueue("again")
    with deploy(handler, UPSTASH_REDIS_REST_URL=relay.url) as sandbox:
        for _ in range(3):
            sandbox.invoke(event)
        assert (relay.accepted, hand.waiting()) == (1, 3)
        for count, reset in enumerate((False, True), start=4):
            sandbox.freeze()
            relay.cut(reset=reset)
            sandbox.thaw()
            sandbox.invoke(event)
            assert hand.waiting() == count, "the enqueue after the thaw took effect once"


@pytest.mark.parametrize("executed", [True, False], ids=["reply lost", "request lost"])
@pytest.mark.parametrize("handler", ["function.handler", "handlers.loop_kept"])
def test_h60_a_reset_of_the_reused_connection_in_mid_request_takes_effect_once(
    deploy: Deploy, hand: Hand, upstream: Upstream, handler: str, executed: bool
) -> None:
    with deploy(handler) as sandbox:
        for count in range(1, 4):
            sandbox.invoke(enqueue("again"))
            lost = upstream.faults.drop_reply(executed=executed)
            sandbox.invoke(enqueue("again"))
            assert lost.fired == 1
            assert hand.waiting() == 2 * count


def test_h60_an_async_client_of_the_module_serves_a_new_event_loop_at_every_call(
    deploy: Deploy, hand: Hand, upstream: Upstream
) -> None:
    requests = upstream.faults.delay(0, times=None)
    with deploy("handlers.loop_each") as sandbox:
        assert len(set(sandbox.invoke({"count": 50}))) == 50
        assert hand.waiting() == 50
        assert requests.fired in (50, 51), "one request each; one more if the database had not seen the script"
        sandbox.freeze()
        sandbox.thaw()
        upstream.faults.drop_reply(executed=True)
        sandbox.invoke({"count": 1})
        assert hand.waiting() == 51
        assert "Warning" not in sandbox.log(), "nothing was left open behind a loop"
    with deploy("handlers.threads") as sandbox:
        assert len(set(sandbox.invoke({"count": 5, "threads": 4}))) == 20
        assert hand.waiting() == 71
        assert "Warning" not in sandbox.log(), "nothing was left open behind a loop"


def test_the_routes_behind_mangum_give_the_events_as_json_pages(deploy: Deploy, hand: Hand) -> None:
    json_only = {**BEARER, "accept": "application/json"}
    with deploy("app.handler") as sandbox:

        def ask(path: str, query: str = "", **options: Any) -> Any:
            return body_of(sandbox.invoke(url_event("GET", path, query=query, headers=json_only), **options), 200)

        create = url_event("POST", "/v1/jobs", body={"payload": {"prompt": "hello"}}, headers=BEARER)
        made = body_of(sandbox.invoke(create), 202)
        hand.take(made["id"])
        hand.say("one ", "two ")
        page = ask(made["events_url"])
        text = "".join(event["data"]["text"] for event in page["events"])
        begin = time.monotonic()
        # The function would be ended in 6.5 s: the page comes before, though more was asked for.
        empty = ask(made["events_url"], f"after={page['next']}&wait=25", deadline=6.5)
        assert empty["events"] == []
        assert time.monotonic() - begin < 6
        hand.say("three")
        hand.end("one two three")
        page = ask(made["events_url"], f"after={page['next']}&wait=5")
        while not page["done"]:
            text += "".join(event["data"]["text"] for event in page["events"])
            page = ask(made["events_url"], f"after={page['next']}&wait=5")
        text += "".join(event["data"]["text"] for event in page["events"] if event["type"] == "chunk")
        assert text == "one two three"
        assert page["events"][-1]["data"] == {"result": "one two three"}
        stranger = url_event("GET", made["url"], headers={"authorization": "Bearer guessed"})
        assert body_of(sandbox.invoke(stranger), 404)["code"] == "job_not_found"


# -- streaming ---------------------------------------------------------------------------------------------------------


class Viewer:
    """Reads an event stream that arrives in parts."""

    def __init__(self, invocation: Invocation) -> None:
        self._invocation = invocation
        head = invocation.part()
        assert head is not None
        self.head = json.loads(head.rstrip(b"\0"))
        self._rest = b""
        self.ended = False
        self.cursor = ""

    def next(self) -> tuple[str, Any]:
        """The next event: its kind and data; ("", None) at the end."""
        while b"\n\n" not in self._rest:
            part = self._invocation.part()
            if part is None:
                return "", None
            self._rest += part
        block, _, self._rest = self._rest.partition(b"\n\n")
        lines = [line.partition(": ") for line in block.decode().split("\n")]
        fields = {name: value for name, _, value in lines if name}
        self.cursor = fields.get("id", self.cursor)
        return fields["event"], json.loads(fields["data"])


def watch(sandbox: Sandbox, url: str, *, deadline: float, cursor: str = "") -> Viewer:
    headers = {**BEARER, "accept": "text/event-stream", **({"last-event-id": cursor} if cursor else {})}
    invocation = sandbox.start(url_event("GET", url, headers=headers), deadline=deadline)
    viewer = Viewer(invocation)
    assert invocation.mode == "streaming"
    assert invocation.content_type == "application/vnd.awslambda.http-integration-response"
    assert viewer.head["statusCode"] == 200
    assert viewer.head["headers"]["content-type"].startswith("text/event-stream")
    assert viewer.next()[0] == "state"
    return viewer


def test_h59_the_streaming_runtime_sends_events_as_they_come_and_asks_back_before_its_deadline(
    deploy: Deploy, hand: Hand
) -> None:
    with deploy("app.app", stream=True) as sandbox:
        create = url_event("POST", "/v1/jobs", body={"payload": {"prompt": "hello"}}, headers=BEARER)
        reply = sandbox.start(create)
        head, _, body = reply.rest().partition(bytes(8))
        assert json.loads(head)["statusCode"] == 202
        url = json.loads(body)["events_url"]
        hand.take(json.loads(body)["id"])
        heard = []
        begin = time.monotonic()
        viewer = watch(sandbox, url, deadline=7.0)
        for word in ("one ", "two ", "three "):
            hand.say(word)  # the next is said only when this one was heard: a buffered stream never gets past it
            kind, data = viewer.next()
            while kind == "state":
                kind, data = viewer.next()
            assert kind == "chunk"
            heard.append(data["text"])
        kind, data = viewer.next()
        assert (kind, data["reason"]) == ("reconnect", "max_duration")
        assert time.monotonic() - begin < 6, "it left well before the function is ended"
        assert viewer.next() == ("", None)
        sandbox.freeze()
        hand.say("four")
        hand.end("one two three four")
        sandbox.thaw()
        again = watch(sandbox, url, deadline=60, cursor=viewer.cursor)
        assert again.next() == ("chunk", {"text": "four"})
        assert again.next() == ("completed", {"result": "one two three four"})
        assert again.next() == ("", None)
        assert "".join(heard) == "one two three "


def test_the_streaming_runtime_reports_what_goes_wrong_and_goes_on(deploy: Deploy, tmp_path: Path) -> None:
    (tmp_path / "function" / "broken.py").write_text(
        "async def app(scope, receive, send):\n"
        "    if scope['path'] != '/early':\n"
        "        await send({'type': 'http.response.start', 'status': 200, 'headers': [(b'set-cookie', b'a=b')]})\n"
        "        await send({'type': 'http.response.body', 'body': b'some', 'more_body': True})\n"
        "    if scope['path'] != '/fine':\n"
        "        raise ValueError('boom')\n"
    )
    with deploy("broken.app", stream=True) as sandbox:
        early = sandbox.start(url_event("GET", "/early"))
        assert json.loads(early.rest()) == {"errorType": "ValueError", "errorMessage": "boom"}
        assert early.failed
        late = sandbox.start(url_event("GET", "/late"))
        head, _, body = late.rest().partition(bytes(8))
        assert (json.loads(head)["cookies"], body) == (["a=b"], b"some")
        assert late.trailers[0] == "Lambda-Runtime-Function-Error-Type: ValueError"
        assert sandbox.start(url_event("GET", "/fine")).rest().endswith(b"some")
