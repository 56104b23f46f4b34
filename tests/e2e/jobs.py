"""What the processes of these tests share: one queue, a worker that streams from a provider, a web front."""

from __future__ import annotations

import os

import httpx
from pydantic import BaseModel

from outlast import AsyncClient, Queue
from outlast_edge import Edge
from outlast_worker import JobContext, Worker


class Prompt(BaseModel):
    prompt: str


generate = Queue("generate", payload=Prompt, result=str, lease=1.5)

worker = Worker()


@worker.handles(generate, concurrency=4)
async def run(job: JobContext[Prompt]) -> str:
    text = ""
    provider = os.environ["PROVIDER_URL"]
    body = {"prompt": job.payload.prompt, "job": job.id, "attempt": job.attempt}
    async with (
        httpx.AsyncClient(timeout=30) as http,
        http.stream("POST", provider, json=body) as response,
    ):
        async for token in response.aiter_text():
            text += token
            await job.emit(token)
    return text


def web() -> object:
    return Edge(AsyncClient(), queues=[generate], authorize=lambda request, action, job: "somebody").app()
