"""Every block of the README is run as a reader would run it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

import outlast
from outlast import errors

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(?:<!-- (?P<label>[^>]+) -->\n)?```(?P<kind>\w+)\n(?P<body>.*?)```", re.DOTALL)
BLOCKS = [(match["label"] or "", match["kind"], match["body"]) for match in BLOCK.finditer(README)]


def files() -> dict[str, str]:
    return {label.removeprefix("file: "): body for label, _, body in BLOCKS if label.startswith("file: ")}


def test_every_block_is_covered_by_a_test_here() -> None:
    for label, kind, body in BLOCKS:
        known = (
            label.startswith("file: ")
            or label == "run in the background: dev"
            or (kind == "sh" and "pip install" in body)  # the two commands: test_the_two_commands below
            or (kind == "text" and ("outlast dev" in body or "enqueue ──▶" in body))
        )
        assert known, f"no test runs this block: {body[:60]!r}"


def test_the_two_commands_name_what_exists() -> None:
    """Their effect is tried on a clean copy by .ci/run; here: the command and the options are real."""
    first, second = [body.strip() for _, kind, body in BLOCKS if kind == "sh" and "pip install" in body]
    assert first.endswith("uv run outlast dev")
    assert second.endswith("uv run pytest -n 2")


def test_the_loop_as_written(tmp_path: Path) -> None:
    for name, body in files().items():
        (tmp_path / name).write_text(body, encoding="utf-8")
    [command] = [body.split() for label, _, body in BLOCKS if label.startswith("run in the background")]
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("OUTLAST_", "UPSTASH_", "KV_"))
    }
    binary = shutil.which(command[0], path=os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"])
    assert binary is not None
    dev = subprocess.Popen(
        [binary, *command[1:], "--port", "0", "--json"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert dev.stdout is not None
        ready = json.loads(dev.stdout.readline())
        produced = subprocess.run(
            [sys.executable, "produce.py"],
            cwd=tmp_path,
            env={
                **environment,
                "UPSTASH_REDIS_REST_URL": ready["rest_url"],
                "UPSTASH_REDIS_REST_TOKEN": ready["rest_token"],
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert produced.returncode == 0, produced.stderr
        assert produced.stdout == "You said: hello there \nYou said: hello there \n"

        page = ready["page"].rstrip("/")
        made = httpx.post(f"{page}/v1/jobs", json={"payload": {"prompt": "from the web"}}, headers={"x-user": "ann"})
        assert made.status_code == 202, made.text
        got = httpx.get(page + f"/v1/jobs/{made.json()['id']}?wait=20", headers={"x-user": "ann"}, timeout=30)
        assert got.json()["result"] == "You said: from the web "
        assert httpx.get(page + f"/v1/jobs/{made.json()['id']}", headers={"x-user": "bob"}).status_code == 404
    finally:
        dev.send_signal(signal.SIGTERM)
        dev.communicate(timeout=30)


def test_the_command_summary_is_true() -> None:
    from outlast_worker.cli import app

    [summary] = [body for _, kind, body in BLOCKS if kind == "text" and "outlast dev" in body]
    runner = CliRunner()
    for line in summary.splitlines():
        command = line.split()[1]
        options = re.findall(r"--[a-z-]+", line)
        shown = runner.invoke(app, [command, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0, command
        for option in options:
            assert option in shown.output, f"outlast {command} has no {option}"
    for command in ("get", "watch", "wait", "cancel", "dead", "retry-dead", "stats", "workers"):
        assert runner.invoke(app, [command, "--help"]).exit_code == 0, command


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(\w+Error)`", README))))
def test_errors_that_are_named_exist(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.OutlastError)
    assert name in outlast.__all__
