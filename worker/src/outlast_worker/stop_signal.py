"""How a handler learns that its job was stopped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Literal

__all__ = ["JobSignal", "StopReason"]

StopReason = Literal["cancelled", "lease_lost", "timeout", "shutdown"]
"""Why a running job is to stop: cancelled, or another worker may have it, or its time is up, or its worker stops."""

logger = logging.getLogger("outlast.worker")


class JobSignal:
    """Set once, when the job is stopped. For any thread.

    `reason` says why: ``cancelled`` (somebody cancelled the job), ``lease_lost`` (another worker may own it),
    ``timeout`` (this attempt ran too long), ``shutdown`` (the worker hands the job back), or None.
    """

    _lock = threading.Lock()
    """Of all signals: it is held for moments, and a job that nobody stops should not pay for one of its own."""

    def __init__(self) -> None:
        self._event: threading.Event | None = None
        self._callbacks: list[Callable[[], object]] = []
        self.reason: StopReason | None = None

    def is_set(self) -> bool:
        return self.reason is not None

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread until the job is stopped, or for `timeout` seconds. True: it was stopped.

        Not for coroutines: their task is cancelled, with nothing to wait for.
        """
        with self._lock:
            if self.reason is not None:
                return True
            event = self._event = self._event or threading.Event()
        return event.wait(timeout)

    def on_set(self, callback: Callable[[], object]) -> None:
        """Call `callback` once the job is stopped; at once if it was already.

        It runs on the worker's event loop, so it must be quick and safe to call from another thread, as
        ``response.close`` is. What it raises is logged.
        """
        with self._lock:
            if self.reason is None:
                self._callbacks.append(callback)
                return
        self._call(callback)

    def _set(self, reason: StopReason) -> bool:
        with self._lock:
            if self.reason is not None:
                return False
            self.reason = reason
            callbacks, self._callbacks = self._callbacks, []
        if self._event is not None:
            self._event.set()
        for callback in callbacks:
            self._call(callback)
        return True

    def _call(self, callback: Callable[[], object]) -> None:
        try:
            callback()
        except Exception:
            logger.exception("a callback of job.signal.on_set raised")
