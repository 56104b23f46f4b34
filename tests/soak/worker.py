"""A worker of the soak: ``python -m tests.soak.worker URL PROVIDER_PORT HOURS``. Its wall clock is HOURS off."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from typing import Any

from tests.soak.jobs import QUEUE, text_of

from outlast import Queue, RetryJobError, TerminalJobError
from outlast_worker import JobContext, Worker

if __name__ == "__main__":
    url, port, hours = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    clock = time.time
    time.time = lambda: clock() + 3600 * hours
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    worker = Worker(url, emit_interval=0.02)

    @worker.handles(Queue(**QUEUE), concurrency=16)
    async def run(job: JobContext[Any]) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        # The time is the caller's: the provider lives in a busy process, and may read it much later.
        at = int(clock() * 1000)
        call = {"job": job.id, "start": job.starts, "pid": os.getpid(), "at": at, "words": job.payload["words"]}
        text = ""
        try:
            writer.write(json.dumps(call).encode() + b"\n")
            while word := (await reader.readline()).decode().rstrip("\n"):
                text += word
                if not job.payload["silent"]:
                    await job.emit(word)
        finally:
            writer.close()
        if text != text_of(job.starts, job.payload["words"]):
            raise ConnectionError("the provider hung up")
        if job.payload["end"] == "fail":
            raise TerminalJobError("as told")
        if job.payload["end"] == "retry" and job.attempt == 1:
            raise RetryJobError("as told", retry_after=0.05)
        return text

    worker.run()
