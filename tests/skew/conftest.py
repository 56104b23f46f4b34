"""The build that closed "The whole loop", out of git's history, beside the present one."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.faults.processes import ROOT, Process

BEFORE = "7c386760865646aad1a6cef40ceab86a46698ac8"
"""The last before steps, limits, usage and webhooks that runs as it stands: what a first release would have been."""

Build = Literal["old", "new"]


@pytest.fixture(scope="session")
def old_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    command = ["git", "archive", "--format=tar", BEFORE, "client/src", "worker/src"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True)
    said = done.stderr.decode().strip()
    assert done.returncode == 0, f"these tests need commit {BEFORE[:10]}; run: git fetch --unshallow ({said})"
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


class Actor(Process):
    """A process of one of the two builds."""

    def __init__(self, root: Path, build: Build, role: str, url: str, queue: str, argument: Any = None) -> None:
        self.build = build
        self.log, self._rest = [], b""
        sources = os.pathsep.join(str(root / part / "src") for part in ("client", "worker"))
        self.popen = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("actor.py")), role, url, queue, json.dumps(argument)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": sources},
        )
        assert self.popen.stdout is not None
        os.set_blocking(self.popen.stdout.fileno(), False)


@pytest.fixture
def act(old_build: Path, valkey_url: str, queue_name: str) -> Iterator[Callable[..., Actor]]:
    """act(build, role, argument) starts a process."""
    running: list[Actor] = []

    def start(build: Build, role: str, argument: Any = None) -> Actor:
        root = old_build if build == "old" else ROOT
        running.append(Actor(root, build, role, valkey_url, queue_name, argument))
        return running[-1]

    yield start
    for actor in running:
        actor.close()
