"""outlast-worker: runs the jobs of an outlast queue on a machine that stays up.

`Worker` declares and runs handlers; `JobContext` and `SyncJobContext` are what they are given; `provider_error` says
what a provider's refusal means for the job; `outlast_worker.tcp` has the transports that also carry clients over TCP.
Each is loaded on first use: the command `outlast` shows its help, and a client finds its transport, without a worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .context import JobContext, SyncJobContext
    from .provider import provider_error
    from .stop_signal import JobSignal, StopReason
    from .worker import Worker

__all__ = ["JobContext", "JobSignal", "StopReason", "SyncJobContext", "Worker", "provider_error"]

_HOME = {
    "JobContext": "context",
    "JobSignal": "stop_signal",
    "StopReason": "stop_signal",
    "SyncJobContext": "context",
    "Worker": "worker",
    "provider_error": "provider",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'outlast_worker' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
