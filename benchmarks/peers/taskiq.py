"""taskiq with taskiq-redis, its stream broker. It has no cancel."""

from __future__ import annotations

import asyncio
from typing import Any

from taskiq.api import run_receiver_task
from taskiq_redis import RedisStreamBroker

from benchmarks.contest import CONCURRENCY, Contestant, main


class Taskiq(Contestant):
    async def open(self) -> None:
        self.broker = RedisStreamBroker(self.url)

        @self.broker.task
        async def run(kind: str, number: float, text: str) -> None:
            await self.handle(kind, number)

        self.run = run
        await self.broker.startup()

    async def enqueue(self, kind: str, number: float, text: str = "") -> Any:
        return await self.run.kiq(kind, number, text)

    async def start(self) -> None:
        self.task = asyncio.create_task(
            run_receiver_task(self.broker, max_async_tasks=CONCURRENCY, max_prefetch=CONCURRENCY)
        )


if __name__ == "__main__":
    main(Taskiq)
