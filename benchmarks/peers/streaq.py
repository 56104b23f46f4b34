"""streaq."""

from __future__ import annotations

import asyncio
from typing import Any

from streaq import Worker

from benchmarks.contest import CONCURRENCY, Contestant, main


class Streaq(Contestant):
    async def open(self) -> None:
        _, self.run = self.make()
        await self.producer.__aenter__()

    def make(self) -> tuple[Any, Any]:
        self.producer: Any = Worker(redis_url=self.url, concurrency=CONCURRENCY, handle_signals=False)

        @self.producer.task()
        async def run(kind: str, number: float, text: str) -> None:
            await self.handle(kind, number)

        return self.producer, run

    async def enqueue(self, kind: str, number: float, text: str = "") -> Any:
        return await self.run.enqueue(kind, number, text)

    async def start(self) -> None:
        worker, _ = self.make()  # one that is entered as a producer cannot run
        self.task = asyncio.create_task(worker.run_async())

    async def cancel(self, handle: Any) -> None:
        await handle.abort()


if __name__ == "__main__":
    main(Streaq)
