"""outlast-worker: runs the jobs of an outlast queue on a machine that stays up.

`Worker` declares and runs handlers; `JobContext` and `SyncJobContext` are what they are given; `outlast_worker.tcp` has
the transports that also carry clients over TCP.
"""

from __future__ import annotations

from .context import JobContext, SyncJobContext
from .stop_signal import JobSignal, StopReason
from .worker import Worker

__all__ = ["JobContext", "JobSignal", "StopReason", "SyncJobContext", "Worker"]
