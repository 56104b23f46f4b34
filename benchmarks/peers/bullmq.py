"""bullmq for Python. Its cancel reaches only the worker that has the job, so there is none to time."""

from __future__ import annotations

from typing import Any

from bullmq import Queue, Worker

from benchmarks.contest import CONCURRENCY, Contestant, main


class Bullmq(Contestant):
    async def open(self) -> None:
        self.queue = Queue("benchmark", {"connection": self.url})

    async def enqueue(self, kind: str, number: float, text: str = "") -> Any:
        return await self.queue.add("run", {"kind": kind, "number": number, "text": text})

    async def start(self) -> None:
        async def run(job: Any, token: str) -> None:
            await self.handle(job.data["kind"], job.data["number"])

        self.worker = Worker("benchmark", run, {"connection": self.url, "concurrency": CONCURRENCY})


if __name__ == "__main__":
    main(Bullmq)
