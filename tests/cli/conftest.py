"""Real processes of the command and of the embedded server; whatever a test leaves running is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "outlast_worker"]


def until(true: Callable[[], object], what: str, seconds: float = 30) -> None:
    """Wait for a condition; the limit is generous because the machine may be busy."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Whether a process has ended. A zombie that nobody has reaped yet has."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return False


class Running:
    """One `outlast …` that stays. `said` is what it has written to stderr so far."""

    def __init__(self, arguments: tuple[str, ...], cwd: Path, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=cwd,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said = ""
        self._family: set[int] = set()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line

    def line(self) -> str:
        """The next line of stdout."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def json(self) -> Any:
        line = self.line()
        assert line, self.said
        return json.loads(line)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 30) -> int:
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    def children(self) -> dict[int, str]:
        """Process id to command line of the processes below this one."""
        listing = subprocess.run(
            ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
        )
        rows = [line.split(None, 2) for line in listing.stdout.splitlines()]
        family, found = {self.process.pid}, {}
        for pid, parent, *command in sorted(rows, key=lambda row: int(row[0])):
            if int(parent) in family:
                family.add(int(pid))
                found[int(pid)] = command[0] if command else ""
        self._family |= set(found)
        return found

    def end(self) -> None:
        """Kill it and all that it started, and close the pipes."""
        self.children()
        for pid in (self.process.pid, *self._family):  # also those that outlived their parent, as they never should
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(10)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ``outlast …`` in the test's folder."""
    running: list[Running] = []

    def begin(*arguments: str, **env: str) -> Running:
        running.append(Running(arguments, tmp_path, env))
        return running[-1]

    yield begin
    for one in running:
        one.end()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No address of the developer's own reaches a test."""
    for name in list(os.environ):
        if name.startswith(("OUTLAST_", "UPSTASH_", "KV_REST_", "OPENAI_")) or name == "REDIS_URL":
            monkeypatch.delenv(name)
