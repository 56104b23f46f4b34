"""Handlers that use the async client in the ways that break others on Lambda: one client for many event loops."""

import asyncio
import threading
import warnings
from typing import Any

from outlast import AsyncClient, Queue

warnings.simplefilter("error")
jobs = AsyncClient().queue(Queue("generate"))


def loop_each(event: Any, context: Any) -> list[str]:
    """As many enqueues as asked, each in an event loop of its own that ends with it."""

    async def one(n: int) -> str:
        return (await jobs.enqueue({"n": n})).id

    return [asyncio.run(one(n)) for n in range(event["count"])]


def threads(event: Any, context: Any) -> list[str]:
    """The same from several threads at once, each with its own loops."""
    made: list[str] = []
    workers = [threading.Thread(target=lambda: made.extend(loop_each(event, context))) for _ in range(event["threads"])]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return made


_loop = asyncio.new_event_loop()


def loop_kept(event: Any, context: Any) -> str:
    """One loop for the instance's life, as Mangum keeps it."""

    async def one() -> str:
        return (await jobs.enqueue(event)).id

    return _loop.run_until_complete(one())
