"""streaq."""

from __future__ import annotations

import asyncio
from typing import Any

from streaq import Worker

from benchmarks.contest import CONCURRENCY, Contestant, main


class Streaq(Contestant):
    async def open(self) -> None:
        self.worker: Any = Worker(redis_url=self.url, concurrency=CONCURRENCY, handle_signals=False)

        @self.worker.task()
        async def run(kind: str, number: float, text: str) -> None:
            await self.handle(kind, number)

        self.run = run
        await self.worker.__aenter__()

    async def enqueue(self, kind: str, number: float, text: str = "") -> Any:
        return await self.run.enqueue(kind, number, text)

    async def start(self) -> None:
        self.task = asyncio.create_task(self.worker.run_async())

    async def cancel(self, handle: Any) -> None:
        await handle.abort()


if __name__ == "__main__":
    main(Streaq)
