"""A worker, a producer or a watcher of whichever build PYTHONPATH names: ``python actor.py ROLE URL QUEUE [ARGUMENT]``.

It uses only what the older build has, and says what happens in JSON, a line each.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from typing import Any

from outlast import Client, Queue, TerminalJobError
from outlast.protocol.digests import DIGESTS
from outlast_worker import JobContext, Worker

role, url, name = sys.argv[1:4]
argument = json.loads(sys.argv[4]) if len(sys.argv) > 4 else None
queue: Queue[Any, Any] = Queue(name, lease=1.5, backoff=0.05, max_backoff=0.1, max_attempts=6)


def say(what: str, **more: Any) -> None:
    os.write(1, json.dumps({"what": what, **more}).encode() + b"\n")


async def handler(job: JobContext[Any]) -> Any:
    say("start", id=job.id, attempt=job.attempt, starts=job.starts)
    do = job.payload["do"]
    await job.emit(f"{job.id}:")
    if do == "fail once" and job.attempt == 1:
        await job.emit("to be dropped")
        raise RuntimeError("once")
    if do == "never":
        raise TerminalJobError("never")
    await asyncio.sleep(60 if do == "hang" else job.payload.get("seconds", 0.02))
    for letter in "abc":
        await job.emit(letter)
    await job.progress(1)
    say("end", id=job.id)
    return {"id": job.id, "ü": [1, 2.5, None]}


def work() -> None:
    worker = Worker(url, block=1.0, grace=0)
    worker.handles(queue, concurrency=3)(handler)
    say("up", settle=DIGESTS["settle"])
    worker.run()
    say("down")


def produce() -> None:
    kinds = ["text", "fail once", "never", "slow", "hang", "text", "delayed", "urgent", "keyed", "cancelled"]
    with Client(url) as client:
        jobs = client.queue(queue)
        made: dict[str, str] = {}
        for n in range(3 * len(kinds)):
            do = kinds[n % len(kinds)]
            options: dict[str, Any] = {
                "slow": {"priority": 5},
                "delayed": {"delay": 0.5},
                "urgent": {"priority": 9},
                "keyed": {"idempotency_key": f"{argument}-{n}"},
                "cancelled": {"delay": 30},
            }.get(do, {})
            if n % 4 == 0:
                options["id"] = f"{argument}-{n}"
            payload = {"do": do, **({"seconds": 0.7} if do == "slow" else {})}
            made[jobs.enqueue(payload, owner="somebody", **options).id] = do
            if do == "keyed":
                assert jobs.enqueue(payload, owner="somebody", **options).deduplicated
        say("made", jobs=made)
        for id, do in made.items():
            if do == "cancelled":
                assert jobs.cancel(id)
        hanging = {id for id, do in made.items() if do == "hang"}
        end = time.monotonic() + 40
        while hanging and time.monotonic() < end:
            for id in [*hanging]:
                job = jobs.get(id)
                if job is not None and job.status == "active":
                    assert jobs.cancel(id)
                    hanging.discard(id)
            time.sleep(0.05)
        say("cancelled all", left=sorted(hanging))


def watch() -> None:
    seen: dict[str, Any] = {}

    def follow(id: str) -> None:
        text = ""
        for event in jobs.watch(id, timeout=60):
            match event.type:
                case "chunk":
                    text += event.data
                case "restarted" | "gap":
                    text = ""
                case "completed":
                    seen[id] = ["completed", text, event.result]
                case "failed":
                    seen[id] = ["failed", event.error]
                case "cancelled":
                    seen[id] = ["cancelled"]

    with Client(url) as client:
        jobs = client.queue(queue)
        threads = [threading.Thread(target=follow, args=(id,)) for id in argument]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    say("seen", jobs=seen)


{"work": work, "produce": produce, "watch": watch}[role]()
