"""Uses of the worker that both type checkers must accept, with the types that they must find."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, assert_type

from pydantic import BaseModel

from outlast import Queue
from outlast_worker import JobContext, JobSignal, StopReason, SyncJobContext, Worker


class Prompt(BaseModel):
    prompt: str


typed = Queue("typed", payload=Prompt, result=str)
untyped = Queue("untyped")
worker = Worker()


async def chunk(n: int) -> Prompt:
    return Prompt(prompt=str(n))


def length(text: str) -> int:
    return len(text)


@worker.handles(typed)
async def coroutine(job: JobContext[Prompt]) -> str:
    assert_type(job.payload, Prompt)
    assert_type(job.attempt, int)
    assert_type(job.queue, str)
    assert_type(job.signal, JobSignal)
    assert_type(job.signal.reason, StopReason | None)
    await job.emit("text")
    await job.emit({"any": ["json", 1]})
    await job.emit(Prompt(prompt="model"))
    await job.progress(0.5)
    await job.progress(1)
    await job.flush()
    await job.heartbeat()
    assert_type(await job.step("a", chunk, 1), Prompt)
    assert_type(await job.step("b", length, text="x"), int)
    assert_type(await job.step("c", anything, job, type=Prompt), Prompt)
    return job.payload.prompt


@worker.handles(typed, concurrency=4)
def plain(job: SyncJobContext[Prompt]) -> str:
    job.emit("text")
    job.progress(0.5)
    job.flush()
    job.heartbeat()
    assert_type(job.step("b", length, "x"), int)
    assert_type(job.step("c", length, "x", type=float), float)
    job.signal.on_set(lambda: None)
    assert_type(job.signal.wait(1.0), bool)
    return job.payload.prompt


assert_type(coroutine, Callable[[JobContext[Prompt]], Awaitable[str]])
assert_type(plain, Callable[[SyncJobContext[Prompt]], str])


@worker.handles(untyped)
async def anything(job: JobContext[Any]) -> object:
    return job.payload["any"]


@worker.handles(untyped)
def anything_plain(job: SyncJobContext[Any]) -> dict[str, int]:
    return {"n": 1}


def on_error(error: BaseException, job: JobContext[Any] | SyncJobContext[Any] | None) -> None:
    print(error, job.id if job else None)


Worker(
    "redis://localhost",
    concurrency=3,
    lease=60,
    heartbeat=timedelta(seconds=15),
    poll=1.0,
    block=30,
    grace=None,
    is_retryable=lambda error: isinstance(error, OSError),
    on_error=on_error,
    emit_interval=0.5,
    namespace="preview",
    name="vm-1",
)


async def embed() -> None:
    async with Worker() as running:
        assert_type(running, Worker)
    await worker.serve(burst=True)
    worker.stop(now=True)


def main() -> None:
    worker.run(burst=True)
    asyncio.run(embed())
