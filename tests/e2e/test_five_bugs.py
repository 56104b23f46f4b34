"""The five bugs that every Generate button has, each with real processes: server, gateway, web front, workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from httpx_sse import ServerSentEvent, connect_sse
from tests.cli.conftest import until
from tests.servers import free_port, start_valkey

ROOT = Path(__file__).parents[2]
WORDS = [f"word{n} " for n in range(40)]
TEXT = "".join(WORDS)


@dataclass
class Provider:
    """A model on loopback: streams a word each 40 ms and writes down who called and when the caller left."""

    url: str
    calls: list[str] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    answered: int = 0


@pytest.fixture(scope="module")
def model() -> Iterator[Provider]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            state.calls.append(body["prompt"])
            self.send_response(200)
            self.send_header("content-type", "text/plain; charset=utf-8")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.connection.settimeout(0.04)
            for word in WORDS:
                try:
                    data = word.encode()
                    self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                    # The caller sends nothing more, so a readable socket is one that was closed.
                    if self.connection.recv(1) == b"":
                        raise ConnectionResetError
                except TimeoutError:
                    continue
                except OSError:
                    state.left.append(time.monotonic())
                    self.close_connection = True
                    return
            self.wfile.write(b"0\r\n\r\n")
            state.answered += 1

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state = Provider(f"http://127.0.0.1:{server.server_port}/")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


class Stack:
    """The processes of one test. All are killed at its end, whatever happened."""

    def __init__(self, redis_url: str, provider: Provider) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.workers: list[subprocess.Popen[bytes]] = []
        gateway = free_port()
        token = "t" * 32
        self.environment = {
            **os.environ,
            "PROVIDER_URL": provider.url,
            "OUTLAST_REDIS_URL": redis_url,
            "OUTLAST_REST_URL": f"http://127.0.0.1:{gateway}",
            "OUTLAST_REST_TOKEN": token,
        }
        self.start(
            "-m", "outlast_worker", "gateway", "--redis-url", redis_url, "--port", str(gateway), "--token", token
        )
        front = free_port()
        self.start("-m", "uvicorn", "tests.e2e.jobs:web", "--factory", "--port", str(front), "--log-level", "warning")
        self.web = httpx.Client(base_url=f"http://127.0.0.1:{front}", timeout=30)
        until(self._up, "web front and gateway answer")

    def _up(self) -> bool:
        try:
            return self.web.get("/v1/jobs/unknown").status_code == 404
        except httpx.TransportError:
            return False

    def rest(self) -> None:
        """End the workers of a test; server, gateway and web front stay for the next."""
        for process in self.workers:
            process.kill()
            process.wait()
        self.workers.clear()

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=self.environment)
        self.processes.append(process)
        return process

    def worker(self, *options: str) -> subprocess.Popen[bytes]:
        process = self.start("-m", "outlast_worker", "worker", "tests.e2e.jobs:worker", *options)
        self.workers.append(process)
        return process

    def enqueue(self, prompt: str) -> str:
        reply = self.web.post("/v1/jobs", json={"payload": {"prompt": prompt}})
        assert reply.status_code == 202, reply.text
        id: str = reply.json()["id"]
        return id

    def job(self, id: str) -> dict[str, object]:
        record: dict[str, object] = self.web.get(f"/v1/jobs/{id}").json()
        return record

    def events(self, id: str, after: str | None = None) -> Iterator[ServerSentEvent]:
        headers = {"last-event-id": after} if after else {}
        with connect_sse(self.web, "GET", f"/v1/jobs/{id}/events", headers=headers) as source:
            yield from source.iter_sse()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.web.close()


@pytest.fixture(scope="module")
def processes(model: Provider) -> Iterator[Stack]:
    with start_valkey() as server:
        running = Stack(f"redis://{server.host}:{server.port}", model)
        yield running
        running.close()


@pytest.fixture
def stack(processes: Stack) -> Iterator[Stack]:
    yield processes
    processes.rest()


@pytest.fixture
def provider(model: Provider, stack: Stack) -> Provider:
    """The model, with nothing written down yet."""
    model.calls.clear()
    model.left.clear()
    model.answered = 0
    return model


def test_request_gone_answer_still_there(stack: Stack) -> None:
    stack.worker()
    # The browser's whole process goes away right after it asked.
    script = (
        "import httpx, sys; print(httpx.post(sys.argv[1] + '/v1/jobs', json={'payload': {'prompt': 'x'}}).json()['id'])"
    )
    asked = subprocess.run(
        [sys.executable, "-c", script, str(stack.web.base_url).rstrip("/")], capture_output=True, text=True, check=True
    )
    id = asked.stdout.strip()
    until(lambda: stack.job(id)["status"] == "completed", "the job completes without a viewer")
    assert stack.job(id)["result"] == TEXT


def test_refresh_mid_stream_resumes_without_loss_or_repeat(stack: Stack) -> None:
    stack.worker()
    id = stack.enqueue("x")
    text, cursor, connections = "", None, 0
    end = None
    while end is None:
        connections += 1
        seen = 0
        for event in stack.events(id, cursor):
            cursor = event.id or cursor
            if event.event == "chunk":
                text += event.json()["text"]
                seen += 1
            if event.event in ("completed", "failed", "cancelled"):
                end = event
            if seen == 3:
                break  # the page is refreshed
    assert end.event == "completed"
    assert connections > 2
    assert text == TEXT == end.json()["result"]


def test_worker_killed_mid_stream_another_finishes_and_the_watcher_clears_once(
    stack: Stack, provider: Provider
) -> None:
    first = stack.worker()
    id = stack.enqueue("x")
    text, restarts, second = "", 0, None
    for event in stack.events(id):
        if event.event == "chunk":
            text += event.json()["text"]
            if second is None and len(text) > 20:
                first.send_signal(signal.SIGKILL)
                second = stack.worker()
        elif event.event == "restarted":
            restarts += 1
            text = ""
        elif event.event == "completed":
            assert event.json()["result"] == TEXT
            break
        else:
            assert event.event in ("state", "progress"), event
    assert restarts == 1
    assert text == TEXT
    assert len(provider.calls) == 2


def test_deploy_lets_the_running_job_finish_and_loses_none(stack: Stack, provider: Provider) -> None:
    old = stack.worker()
    id = stack.enqueue("x")
    until(lambda: provider.calls, "the first job runs")
    old.send_signal(signal.SIGTERM)
    waiting = stack.enqueue("y")
    assert old.wait(30) == 0
    assert stack.job(id)["status"] == "completed"
    assert stack.job(waiting)["status"] == "waiting"
    stack.worker()
    until(lambda: stack.job(waiting)["status"] == "completed", "the new release takes the rest")
    assert provider.calls == ["x", "y"]


def test_stop_closes_the_provider_within_a_second_and_the_job_is_cancelled(stack: Stack, provider: Provider) -> None:
    stack.worker()
    id = stack.enqueue("x")
    until(lambda: provider.calls, "the provider is called")
    stopped = time.monotonic()
    assert stack.web.post(f"/v1/jobs/{id}/cancel").status_code == 200
    until(lambda: provider.left, "the provider sees its caller leave", 5)
    assert provider.left[0] - stopped < 1.0
    until(lambda: stack.job(id)["status"] == "cancelled", "the job settles", 5)
    assert [event.event for event in stack.events(id)][-1] == "cancelled"
    assert provider.answered == 0


def test_twenty_identical_clicks_run_the_model_once(stack: Stack, provider: Provider) -> None:
    stack.worker()

    def click(_: int) -> httpx.Response:
        return stack.web.post(
            "/v1/jobs", json={"payload": {"prompt": "x"}}, headers={"idempotency-key": "one-submission"}
        )

    with ThreadPoolExecutor(20) as pool:
        replies = list(pool.map(click, range(20)))
    assert sorted(reply.status_code for reply in replies) == [200] * 19 + [202]
    [id] = {reply.json()["id"] for reply in replies}
    until(lambda: stack.job(id)["status"] == "completed", "the job completes")
    late = click(0)
    assert late.json()["id"] == id
    assert late.json()["deduplicated"] is True
    assert provider.calls == ["x"]
