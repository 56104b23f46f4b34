"""arq. Aborting is off by default there; `poll_delay` is left at its default."""

from __future__ import annotations

import asyncio
from typing import Any

from arq import Worker, create_pool, func
from arq.connections import RedisSettings

from benchmarks.contest import CONCURRENCY, Contestant, main


class Arq(Contestant):
    async def open(self) -> None:
        self.settings = RedisSettings.from_dsn(self.url)
        self.pool = await create_pool(self.settings)

    async def enqueue(self, kind: str, number: float, text: str = "") -> Any:
        return await self.pool.enqueue_job("run", kind, number, text)

    async def start(self) -> None:
        async def run(ctx: Any, kind: str, number: float, text: str) -> None:
            await self.handle(kind, number)

        self.worker = Worker(
            functions=[func(run, name="run")],
            redis_settings=self.settings,
            max_jobs=CONCURRENCY,
            handle_signals=False,
            allow_abort_jobs=True,
        )
        self.task = asyncio.create_task(self.worker.async_run())

    async def cancel(self, handle: Any) -> None:
        await handle.abort(timeout=5)


if __name__ == "__main__":
    main(Arq)
