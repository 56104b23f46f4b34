"""examples/summaries as it stands: its web server and its worker as processes, against a scripted provider.

The promises are those of the article that the example answers (seed 003).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse
from tests.agent.provider import Provider, scripted_provider
from tests.cli.conftest import until
from tests.servers import free_port
from tests.webhooks.receiver import Receiver, receiver

from outlast import Client, Job, Queue
from outlast_worker.webhooks import new_secret

FOLDER = Path(__file__).parents[2] / "examples" / "summaries"
SECRET = new_secret()
TEXT = "".join(f"Sentence number {number:04}. " for number in range(800))[:15_000]
"""Three chunks."""


@contextmanager
def in_thread(make: Any) -> Iterator[Any]:
    """An async context in a loop of its own: it serves several tests."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    context = make()
    try:
        yield asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(10)
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def process(*words: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "OUTLAST_"))}
    running = subprocess.Popen([sys.executable, "-m", *words], cwd=FOLDER, env={**clean, **env})
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


class Stack:
    """The example, running."""

    def __init__(self, url: str, provider: Provider, hooked: Receiver, client: Client) -> None:
        self.url, self.provider, self.hooked = url, provider, hooked
        self.jobs = client.queue(Queue("summaries"))
        self.http = httpx.Client(base_url=url, timeout=30)

    def submit(self, key: str, text: str = TEXT, user: str = "alice", **more: Any) -> httpx.Response:
        headers = {"x-user": user, "idempotency-key": key}
        return self.http.post("/v1/jobs", headers=headers, json={"payload": {"text": text}, **more})

    def made(self, key: str, *script: Any, **options: Any) -> str:
        """A job of which the provider does what the script says."""
        self.provider.script[:] = script
        self.provider.requests.clear()
        self.provider.closed = 0
        self.provider.hanging.clear()
        answer = self.submit(key, **options)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def get(self, id: str, user: str = "alice", **query: Any) -> Any:
        answer = self.http.get(f"/v1/jobs/{id}", headers={"x-user": user}, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ended(self, id: str) -> Any:
        found: dict[str, Any] = {}

        def over() -> bool:
            found.update(self.get(id, wait=5))
            return found["status"] in ("completed", "failed", "cancelled")

        until(over, "the end of the job", 60)
        return found

    def record(self, id: str) -> Job[Any, Any]:
        job = self.jobs.get(id)
        assert job is not None
        return job


@pytest.fixture(scope="module")
def stack(valkey_url: str) -> Iterator[Stack]:
    with ExitStack() as running:
        provider = running.enter_context(in_thread(scripted_provider))
        hooked = running.enter_context(in_thread(receiver))
        port = free_port()
        running.enter_context(
            process("uvicorn", "web:app", "--port", str(port), "--log-level", "warning", REDIS_URL=valkey_url)
        )
        running.enter_context(
            process(
                "outlast_worker",
                "worker",
                "worker:worker",
                REDIS_URL=valkey_url,
                OPENAI_BASE_URL=provider.url,
                OPENAI_MODEL="scripted",
                CALL_TIMEOUT="4",
                WEBHOOK_SECRET=SECRET,
                WEBHOOK_ALLOW="127.0.0.0/8",
            )
        )
        client = running.enter_context(Client(redis_url=valkey_url))
        made = Stack(f"http://127.0.0.1:{port}", provider, hooked, client)
        running.callback(made.http.close)

        def answers() -> bool:
            try:
                return made.http.get("/v1/jobs/none", headers={"x-user": "x"}).status_code == 404
            except httpx.TransportError:
                return False

        until(answers, "the web server answers")
        yield made


def test_a_document_is_summarised_chunk_by_chunk(stack: Stack) -> None:
    job = stack.ended(stack.made("plain-0001"))
    assert job["status"] == "completed"
    assert job["result"] == {"summary": "summary(6000)\nsummary(6000)\nsummary(3000)", "chunks": 3}
    assert job["progress"] == 1
    assert len(stack.provider.requests) == 3
    assert stack.record(job["id"]).usage == {"input_tokens": 30, "output_tokens": 9}


def test_the_same_user_and_key_make_one_job(stack: Stack) -> None:
    first = stack.made("twice-0001", text="short")
    again = stack.submit("twice-0001", text="short")
    assert (again.status_code, again.json()["id"]) == (200, first)
    assert stack.submit("twice-0001", text="other").status_code == 422
    assert stack.submit("twice-0001", text="short", user="bob").json()["id"] != first
    stack.ended(first)
    assert stack.submit("twice-0001", text="short").json()["id"] == first  # also when it has ended


def test_what_cannot_be_a_job_is_refused_at_the_door(stack: Stack) -> None:
    without_key = stack.http.post("/v1/jobs", headers={"x-user": "alice"}, json={"payload": {"text": "x"}})
    assert without_key.status_code == 400
    assert stack.submit("bad-0001", text="").status_code == 422
    assert stack.submit("bad-0002", text="x" * 500_001).status_code == 422
    assert stack.submit("bad-0003", webhook="http://example.com/").status_code == 422
    assert stack.http.post("/v1/jobs", json={"payload": {"text": "x"}}).status_code == 401


def test_retries_repeat_no_finished_chunk(stack: Stack) -> None:
    """Chunk 1 fails twice: five model calls, three attempts."""
    job = stack.ended(stack.made("retry-0001", "echo", 503, 503))
    assert job["status"] == "completed"
    assert job["attempt"] == 3  # two that failed, and the one that did not
    assert len(stack.provider.requests) == 5  # chunk 0, chunk 1 three times, chunk 2
    asked = [request["messages"][1]["content"] for request in stack.provider.requests]
    assert asked == [TEXT[:6000], *[TEXT[6000:12_000]] * 3, TEXT[12_000:]]


def test_a_429_pauses_the_queue_and_uses_no_attempt(stack: Stack) -> None:
    began = time.monotonic()
    id = stack.made("limit-0001", (429, {"retry-after": "1"}, {"error": {"message": "slow down"}}), text="short")
    stack.ended(id)
    job = stack.record(id)
    assert (job.status, job.starts, job.attempt) == ("completed", 2, 1)
    assert time.monotonic() - began > 1


def test_a_400_fails_at_once_and_the_public_error_is_generic(stack: Stack) -> None:
    job = stack.ended(stack.made("input-0001", (400, {}, {"error": {"message": "secret details", "code": "too_long"}})))
    assert (job["status"], job["attempt"], job["error"]) == ("failed", 1, "The job failed.")
    assert len(stack.provider.requests) == 1
    inside = stack.record(job["id"]).error
    assert inside == "TerminalJobError: the provider answered 400 (too_long)"


def test_each_call_has_a_time_limit(stack: Stack) -> None:
    id = stack.made("slow-0001", "hang", text="short")
    job = stack.ended(id)
    assert (job["status"], job["attempt"]) == ("completed", 2)
    assert stack.provider.closed == 1
    assert stack.record(id).error == "RetryJobError: the model did not answer in full within 4 s"


def test_cancel_closes_the_providers_call_once(stack: Stack) -> None:
    """From the web server's process, in the worker's."""
    id = stack.made("cancel-0001", "echo", "hang")
    until(stack.provider.hanging.is_set, "the second call hangs")
    answer = stack.http.post(f"/v1/jobs/{id}/cancel", headers={"x-user": "alice"})
    assert answer.json()["cancelled"] is True
    job = stack.ended(id)
    assert (job["status"], job["attempt"]) == ("cancelled", 1)
    until(lambda: stack.provider.closed, "the call is closed")
    assert (stack.provider.closed, len(stack.provider.requests)) == (1, 2)


def test_other_users_get_404(stack: Stack) -> None:
    id = stack.made("mine-0001", text="short")
    stack.ended(id)
    strangers = {"x-user": "bob"}
    for answer in (
        stack.http.get(f"/v1/jobs/{id}", headers=strangers),
        stack.http.get(f"/v1/jobs/{id}/events", headers=strangers),
        stack.http.post(f"/v1/jobs/{id}/cancel", headers=strangers),
    ):
        assert answer.status_code == 404
        assert answer.json() == stack.http.get("/v1/jobs/unknown", headers=strangers).json()


def test_browsers_follow_by_server_sent_events(stack: Stack) -> None:
    id = stack.made("events-0001")
    with connect_sse(stack.http, "GET", f"/v1/jobs/{id}/events", headers={"x-user": "alice"}) as source:
        events = [(event.event, json.loads(event.data)) for event in source.iter_sse()]
    assert events[0][0] == "state"
    assert [data["value"] for kind, data in events if kind == "progress"][-1] == 1
    assert events[-1][0] == "completed"
    assert events[-1][1]["result"]["chunks"] == 3


def test_a_webhook_tells_who_is_not_online(stack: Stack) -> None:
    stack.hooked.got.clear()
    done = stack.made("hook-0001", text="short", webhook=stack.hooked.url)
    stack.ended(done)
    until(lambda: stack.hooked.got, "told")
    failed = stack.made("hook-0002", 400, text="short", webhook=stack.hooked.url)
    stack.ended(failed)
    until(lambda: len(stack.hooked.got) == 2, "told")
    first, second = [message.verified(SECRET) for message in stack.hooked.got]
    assert (first["type"], first["data"]["id"]) == ("job.completed", done)
    assert first["data"]["result"] == {"summary": "summary(5)", "chunks": 1}
    assert (second["type"], second["data"]["id"]) == ("job.failed", failed)


def test_the_same_with_a_real_model(stack: Stack, valkey_url: str) -> None:
    """Without a provider in the environment: the small model of `outlast dev`, in the worker's process."""
    port = free_port()
    env = {"REDIS_URL": valkey_url, "OUTLAST_NAMESPACE": "real"}
    text = "Paris is the capital of France. It has two million inhabitants and lies on the river Seine. " * 3
    with (
        process("uvicorn", "web:app", "--port", str(port), "--log-level", "warning", **env),
        process("outlast_worker", "worker", "worker:worker", **env) as worker,
        Client(redis_url=valkey_url, namespace="real") as client,
    ):
        real = Stack(f"http://127.0.0.1:{port}", stack.provider, stack.hooked, client)
        with real.http:

            def submitted() -> bool:
                try:
                    return real.submit("real-0001", text).status_code in (200, 202)
                except httpx.TransportError:
                    return False

            until(submitted, "the web server takes it")
            id = real.submit("real-0001", text).json()["id"]
            job = real.ended(id)
            assert job["status"] == "completed"
            assert job["result"]["chunks"] == 1
            assert len(job["result"]["summary"]) > 20
            assert real.record(id).usage["input_tokens"] > 60
            worker.terminate()  # the model's server has its own idea of signals
            assert worker.wait(20) == 0
