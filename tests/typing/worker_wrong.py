"""Uses of the worker that both type checkers must refuse: on each line that says so, and on no other."""

from __future__ import annotations

from pydantic import BaseModel

from outlast import Queue
from outlast_worker import JobContext, SyncJobContext, Worker


class Prompt(BaseModel):
    prompt: str


typed = Queue("typed", payload=Prompt, result=str)
worker = Worker()
Worker(5)  # refused
Worker(retries=3)  # refused
Worker(lease="1m")  # refused
Worker(concurrency="many")  # refused
worker.handles("typed")  # refused
worker.handles(typed, 3)  # refused
worker.run(True)  # refused


async def wrong_payload(job: JobContext[int]) -> str:
    return ""


async def wrong_result(job: JobContext[Prompt]) -> int:
    return 1


async def no_result(job: JobContext[Prompt]) -> None:
    pass


def plain_with_async_context(job: JobContext[Prompt]) -> str:
    return ""


async def async_with_plain_context(job: SyncJobContext[Prompt]) -> str:
    return ""


def two(job: SyncJobContext[Prompt], more: int) -> str:
    return ""


worker.handles(typed)(wrong_payload)  # refused
worker.handles(typed)(wrong_result)  # refused
worker.handles(typed)(no_result)  # refused
worker.handles(typed)(plain_with_async_context)  # refused
worker.handles(typed)(async_with_plain_context)  # refused
worker.handles(typed)(two)  # refused


async def inside(job: JobContext[Prompt]) -> str:
    await job.progress("half")  # refused
    job.payload = Prompt(prompt="")
    print(job.payload.text)  # refused
    print(job.result)  # refused
    await job.step(3, wrong_payload, job)  # refused
    await job.step("a", wrong_payload)  # refused
    await job.step("a", wrong_payload, 5, timeout=3)  # refused
    return job.emit  # refused


def inside_plain(job: SyncJobContext[Prompt]) -> str:
    job.progress("half")  # refused
    job.signal.wait("1")  # refused
    return job.payload  # refused
