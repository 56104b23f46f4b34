"""The real clients, unmodified, against all facades and a real worker: npm's ai 5, 6 and 7, openai 6 and 7, the public
suite of Durable Streams, and PyPI's openai 1, 2 and 3."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..conftest import BASE_PYTHON, NODE, NPM, Packages, cached, run

HERE = Path(__file__).parent
SELECTED = (
    "Read Operations|Long-Poll|HTTP Protocol|Browser Security|HEAD Metadata|Offset Validation|Protocol Edge|Caching"
    "|SSE Mode|JSON Mode|Stream Closure|Read-Your"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts, beside the packages that package.json names."""
    wanted = HERE / "package.json"

    def build(built: Path) -> None:
        shutil.copy(wanted, built)
        quiet = ("--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
        run(NODE / "bin" / "node", NPM, "install", *quiet, folder=built)

    installed = cached("facades", [wanted.read_text(encoding="utf-8")], build)
    folder = tmp_path_factory.mktemp("facades")
    (folder / "node_modules").symlink_to(installed / "node_modules")
    for script in (*HERE.glob("*.mjs"), *HERE.glob("*.ts")):
        shutil.copy(script, folder)
    return folder


@pytest.fixture(scope="module")
def url(valkey_url: str) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, HERE / "server.py"],
        env={**os.environ, "REDIS_URL": valkey_url, "OUTLAST_NAMESPACE": "facades"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def node(folder: Path, script: str, url: str, **environment: str) -> None:
    options = ("--test", "--test-reporter=spec", "--test-timeout=60000")
    output = run(NODE / "bin" / "node", *options, script, folder=folder, URL=url, **environment)
    assert "pass 0" not in output


@pytest.mark.parametrize("version", ["ai5", "ai6", "ai7"])
def test_ai_sdk(folder: Path, url: str, version: str) -> None:
    node(folder, "ai.test.mjs", url, AI=version)


def test_workflow_chat_transport(folder: Path, url: str) -> None:
    node(folder, "workflow.test.mjs", url)


@pytest.mark.parametrize("version", ["openai6", "openai7"])
def test_openai_of_npm(folder: Path, url: str, version: str) -> None:
    node(folder, "openai.test.mjs", url, OPENAI=version)


def test_the_ai_sdks_provider_for_openai(folder: Path, url: str) -> None:
    node(folder, "provider.test.mjs", url)


@pytest.mark.parametrize("version", ["1", "2", "3"])
def test_openai_of_pypi(packages: Packages, url: str, version: str) -> None:
    found = packages.install("openai", [f"openai=={version}.*"])
    run(BASE_PYTHON, "-S", HERE / "openai_client.py", folder=HERE, URL=url, PYTHONPATH=str(found))


def test_conformance_of_durable_streams(folder: Path, url: str) -> None:
    suite = folder / "node_modules" / "@durable-streams" / "server-conformance-tests"
    nested = suite / "node_modules" / "vitest" / "vitest.mjs"
    vitest = nested if nested.exists() else folder / "node_modules" / "vitest" / "vitest.mjs"
    report = folder / "report.json"
    options = ("run", "conformance.test.ts", "--reporter=json", f"--outputFile={report}", "-t", SELECTED)
    subprocess.run(
        [NODE / "bin" / "node", vitest, *options], cwd=folder, env={**os.environ, "URL": url}, timeout=150, check=False
    )
    results = json.loads(report.read_text(encoding="utf-8"))["testResults"]
    cases = [case for file in results for case in file["assertionResults"]]
    failed = {case["fullName"]: case["failureMessages"][0][:500] for case in cases if case["status"] == "failed"}
    lines = (HERE / "out_of_scope.txt").read_text(encoding="utf-8").splitlines()
    expected = {line for line in lines if not line.startswith("#")}
    assert {name: text for name, text in failed.items() if name not in expected} == {}
    assert expected - set(failed) == set(), "these pass now: take them off the list"
    assert sum(case["status"] == "passed" for case in cases) >= 149
