"""Worker processes that tests kill, freeze and question."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


async def until(true: Callable[[], object | Awaitable[object]], what: str, seconds: float = 20) -> None:
    """Wait for a condition. Generous: the machine may be busy."""
    end = time.monotonic() + seconds
    while True:
        answer = true()
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer:
            return
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.01)


class Process:
    """A worker in a process of its own: `tests/worker/child.py`. It prints a JSON line for each thing it does."""

    def __init__(self, url: str, queue_name: str, handler: str, **options: Any) -> None:
        self.log: list[dict[str, Any]] = []
        command = [sys.executable, "-m", "tests.worker.child", url, queue_name, handler, json.dumps(options)]
        self.popen = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert self.popen.stdout is not None
        os.set_blocking(self.popen.stdout.fileno(), False)
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        """Everything said so far."""
        assert self.popen.stdout is not None
        with suppress(BlockingIOError):
            while data := os.read(self.popen.stdout.fileno(), 65536):
                *lines, self._rest = (self._rest + data).split(b"\n")
                self.log += [json.loads(line) for line in lines]
        return self.log

    def said(self, what: str) -> list[dict[str, Any]]:
        return [line for line in self.read() if line["what"] == what]

    async def wait_for(self, what: str, count: int = 1, seconds: float = 20) -> dict[str, Any]:
        await until(
            lambda: len(self.said(what)) >= count or self.popen.poll() is not None, f"{what} x {count}", seconds
        )
        found = self.said(what)
        if len(found) < count:
            raise AssertionError(f"the worker ended without saying {what!r}: {self.log} {self.errors()}")
        return found[count - 1]

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()

    async def exit_code(self, seconds: float = 20) -> int:
        await until(lambda: self.popen.poll() is not None, "the process ends", seconds)
        return int(self.popen.returncode)

    def errors(self) -> str:
        assert self.popen.stderr is not None
        return self.popen.stderr.read().decode()

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        assert self.popen.stderr is not None
        self.popen.stdout.close()
        self.popen.stderr.close()


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """SIGSTOP for as long as the block lasts: the kernel goes on accepting connections in the process's name."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
