"""examples/typescript: checked by tsc, and run on Node against the Python edge and worker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..conftest import NODE, NPM, ROOT, Upstream, cached, run

HERE = Path(__file__).parent
EXAMPLE = ROOT / "examples" / "typescript"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with its packages, and those of the tests."""
    wanted = (EXAMPLE / "package.json").read_text(encoding="utf-8")
    extra = ("ai7@npm:ai@^7", "zod@^4", "eventsource@^5")

    def build(built: Path) -> None:
        (built / "package.json").write_text(wanted, encoding="utf-8")
        quiet = ("--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
        run(NODE / "bin" / "node", NPM, "install", *quiet, *extra, folder=built)

    installed = cached("typescript", [wanted, *extra], build)
    folder = tmp_path_factory.mktemp("typescript") / "example"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("node_modules", "__pycache__"))
    (folder / "node_modules").symlink_to(installed / "node_modules")
    shutil.copy(HERE / "typescript.test.mjs", folder)
    return folder


@pytest.fixture
def edge(example: Path, upstream: Upstream) -> Iterator[str]:
    """The edge over REST with short streams, and a worker."""
    environment = {**os.environ, **upstream.environment, "OUTLAST_EDGE_SECRET": "a-secret-of-the-two"}
    for name in ("REDIS_URL", "OUTLAST_REDIS_URL"):
        environment.pop(name, None)
    starting = (
        "import uvicorn, edge; edge.edge._max_stream = 1.0; "
        "uvicorn.run(edge.app, port=0, log_level='info', access_log=False)"
    )
    web = subprocess.Popen(
        [sys.executable, "-c", starting], cwd=example, env=environment, stderr=subprocess.PIPE, text=True
    )
    worker = subprocess.Popen(
        [sys.executable, "worker.py"], cwd=example, env={**environment, "REDIS_URL": upstream.redis_url}
    )
    try:
        assert web.stderr
        line = next(line for line in web.stderr if "running on" in line)
        yield line.partition("running on ")[2].split()[0]
    finally:
        for process in (web, worker):
            process.kill()
            process.wait()
        web.stderr.close()


def test_types(example: Path) -> None:
    run(NODE / "bin" / "node", "node_modules/typescript/bin/tsc", "--noEmit", folder=example)


def test_on_node(example: Path, edge: str, upstream: Upstream) -> None:
    environment = {
        **upstream.environment,
        "OUTLAST_EDGE_URL": edge,
        "OUTLAST_EDGE_SECRET": "a-secret-of-the-two",
        "UPSTASH_DISABLE_TELEMETRY": "1",
        "EXAMPLE": str(example),
    }
    options = ("--test", "--test-reporter=spec", "--test-timeout=60000", "--disable-warning=ExperimentalWarning")
    output = run(NODE / "bin" / "node", *options, "typescript.test.mjs", folder=example, **environment)
    assert "pass 0" not in output
