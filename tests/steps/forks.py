"""Worker processes that start fast: one process imports everything and forks for each line ``URL QUEUE POINT``.

Forked workers run ten steps and say so before each; the parent says their process ids. One JSON line for each.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

from outlast import Queue
from outlast_worker import JobContext, Worker

STEPS = 10


def say(**what: Any) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def work(url: str, name: str, point: str) -> None:
    worker = Worker(url, block=0.2)

    async def costs(n: int) -> int:
        say(point=point, step=n)
        await asyncio.sleep(0.002)
        return n * n

    @worker.handles(Queue(name, lease=1.0, result=int))
    async def run(job: JobContext[Any]) -> int:
        return sum([await job.step(f"step-{n}", costs, n) for n in range(STEPS)])

    worker.run()


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        url, name, point = line.split()
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                work(url, name, point)
            finally:
                os._exit(0)
        say(point=point, pid=pid)
