"""saq, its Redis queue."""

from __future__ import annotations

import asyncio
from typing import Any

from saq import Queue, Worker

from benchmarks.contest import CONCURRENCY, Contestant, main


class Saq(Contestant):
    async def open(self) -> None:
        self.queue = Queue.from_url(self.url)
        await self.queue.connect()

    async def enqueue(self, kind: str, number: float, text: str = "") -> Any:
        return await self.queue.enqueue("run", kind=kind, number=number, text=text)

    async def start(self) -> None:
        async def run(ctx: Any, *, kind: str, number: float, text: str) -> None:
            await self.handle(kind, number)

        self.worker = Worker(self.queue, functions=[("run", run)], concurrency=CONCURRENCY)
        self.task = asyncio.create_task(self.worker.start())

    async def cancel(self, handle: Any) -> None:
        await handle.abort("benchmark")


if __name__ == "__main__":
    main(Saq)
