"""Real processes of the command and of the embedded server; whatever a test leaves running is ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest


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


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No address of the developer's own reaches a test."""
    for name in list(os.environ):
        if name.startswith(("OUTLAST_", "UPSTASH_", "KV_REST_", "OPENAI_")) or name == "REDIS_URL":
            monkeypatch.delenv(name)
