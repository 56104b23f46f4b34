"""Gives the answers: python worker.py."""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

from jobs import Ask, chat

from outlast_worker import JobContext, Worker

worker = Worker(lease=float(os.environ.get("LEASE", "10")))
PACE = float(os.environ.get("PACE", "0.08"))


@worker.handles(chat, concurrency=16)
async def answer(job: JobContext[Ask]) -> str:
    text = ""
    async for words in model(job.payload.messages):
        await job.emit(words)
        text += words
    return text


async def model(messages: list[dict[str, Any]]) -> AsyncIterator[str]:
    """Stands for a model. See ../frameworks for handlers that call OpenAI and Anthropic."""
    said = [part["text"] for part in messages[-1]["parts"] if part["type"] == "text"]
    yield f"You said: “{' '.join(said)}”. "
    for number in range(1, 31):
        await asyncio.sleep(PACE)
        yield f"word{number} "
    yield "Done."


if __name__ == "__main__":
    worker.run()
