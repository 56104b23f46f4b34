"""The documents: they build without a warning, every block of code runs, every command that they show exists."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
from benchmarks.scale import billed

import outlast
import outlast_edge
import outlast_worker
from outlast_worker.cli import app
from outlast_worker.costs import DOLLARS

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(
    r"(?:<!-- (?P<label>[^>]+) -->\n)?^```(?P<kind>\w+)[^\n]*\n(?P<body>.*?)^```", re.DOTALL | re.MULTILINE
)
COMMAND = typer.main.get_command(app)


def blocks(page: Path, kind: str) -> list[tuple[str, str]]:
    return [(m["label"] or "", m["body"]) for m in BLOCK.finditer(page.read_text()) if m["kind"] == kind]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT / "docs"))


RUN_BY_THEIR_OWN_TESTS = {"quickstart.md", "guides/webhooks.md", "testing.md", "facades.md"}
"""By test_quickstart, by the testing kit's, and by tests/facades, which run other people's clients."""


@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p, "python") and name(p) not in RUN_BY_THEIR_OWN_TESTS], ids=name
)
def test_the_python_of_a_page_runs(page: Path, valkey_url: str, tmp_path: Path) -> None:
    """All blocks of a page, one after the other, as one program."""
    program = tmp_path / "page.py"
    program.write_text("\n".join(body for _, body in blocks(page, "python")))
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OUTLAST_", "UPSTASH_", "KV_"))}
    environment = {**clean, "OUTLAST_REDIS_URL": valkey_url, "OUTLAST_NAMESPACE": f"docs-{os.getpid()}-{page.stem}:"}
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "bash")], ids=name)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    for _, body in blocks(page, "bash"):
        for line in body.splitlines():
            words = shlex.split(line, comments=True)
            while words and "=" in words[0]:
                words.pop(0)
            if words[:1] == ["outlast"]:
                check(words[1:], line)


def check(words: list[str], line: str) -> None:
    at: Any = COMMAND
    while hasattr(at, "commands") and words:
        found = at.commands.get(words.pop(0))
        assert found is not None, f"there is no such command: {line}"
        at = found
    options = {flag for parameter in at.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in {*options, "--help"}, f"there is no {word}: {line}"


def test_the_page_on_scale_has_the_costs_that_the_estimate_has() -> None:
    text = (ROOT / "docs" / "scale.md").read_text()
    assert f"about {10_000 / billed():,.0f} such generations a second" in text
    for interval in (0.05, 0.25, 1):
        assert f" ${billed(economy=False, emit_interval=interval) * 1000 * DOLLARS:.2f} |" in text


def test_the_page_of_the_architecture_is_that_of_the_code() -> None:
    path = str(ROOT / "scripts" / "architecture")
    spec = importlib.util.spec_from_loader("architecture", importlib.machinery.SourceFileLoader("architecture", path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    assert (ROOT / "docs" / "architecture.md").read_text() == module.text(), "run scripts/architecture"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reference = (tmp_path / "site" / "reference" / "index.html").read_text()
    entries = re.findall(r' id="(outlast[\w.]*)"', reference)
    assert {"outlast.AsyncJobs.enqueue", "outlast_worker.Worker.handles", "outlast_worker.JobContext.step"} <= {
        *entries
    }
    documented = {entry.rpartition(".")[2] for entry in entries}
    for package in (outlast, outlast_edge, outlast_worker):
        assert not {*package.__all__} - documented, package.__name__
