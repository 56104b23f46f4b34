"""A worker process for tests, ``python -m tests.worker.child URL QUEUE HANDLER OPTIONS``; says what happens in JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from typing import Any

from outlast import JobLeaseLostError, Queue
from outlast_worker import JobContext, Worker

url, queue_name, handler_name = sys.argv[1:4]
options: dict[str, Any] = json.loads(sys.argv[4])
clock = time.time
time.time = lambda: clock() + options.get("clock", 0)


def say(what: str, **more: Any) -> None:
    os.write(1, json.dumps({"what": what, "at": clock(), **more}).encode() + b"\n")


async def count_up(job: JobContext[Any]) -> str:
    """Emits a, b, c, … with a pause after each."""
    say("start", id=job.id, attempt=job.attempt, starts=job.starts)
    text = ""
    for letter in options.get("letters", "ab"):
        text += letter
        await job.emit(letter)
        await job.flush()
        say("emitted", letter=letter)
        await asyncio.sleep(options.get("pause", 0.01))
    await asyncio.sleep(options.get("hang", 0))
    say("end", id=job.id)
    return text


async def sleep(job: JobContext[Any]) -> str:
    say("start", id=job.id, attempt=job.attempt, starts=job.starts)
    try:
        await asyncio.sleep(options.get("seconds", 0.0) if job.payload is None else job.payload)
    except asyncio.CancelledError:
        say("cancelled", id=job.id, reason=job.signal.reason)
        raise
    say("end", id=job.id)
    return "slept"


async def stubborn(job: JobContext[Any]) -> str:
    """Was frozen, and goes on as if nothing had happened."""
    say("start", id=job.id, attempt=job.attempt)
    await job.emit(options["first"])
    await job.flush()
    say("emitted")
    time.sleep(options["freeze"])  # noqa: ASYNC251  # SIGSTOP lands in here
    for _ in range(2):
        try:
            await job.emit("old2")
            say("emitted old2")
        except JobLeaseLostError:
            say("lost", by="emit")
        except asyncio.CancelledError:
            say("interrupted")
    try:
        await job.progress(0.9)
    except JobLeaseLostError:
        say("lost", by="progress")
    say("end")
    return "OLD"


async def poison(job: JobContext[Any]) -> str:
    say("start", id=job.id, attempt=job.attempt)
    if job.payload == "poison":
        os._exit(137)
    return "fine"


logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
worker = Worker(url, **options.get("worker", {}))
worker.handles(
    Queue(queue_name, **{"lease": 1.0, "backoff": 0.02, "max_backoff": 0.1, **options.get("queue", {})}),
    concurrency=options.get("concurrency", 1),
)(globals()[handler_name])
say("up", pid=os.getpid())
try:
    worker.run(burst=options.get("burst", False))
finally:
    say("down")
