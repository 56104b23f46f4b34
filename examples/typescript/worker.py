"""Gives the answers: python worker.py."""

import asyncio

from jobs import Ask, Prompt, chat, generate

from outlast_worker import JobContext, Worker

worker = Worker()


@worker.handles(generate, concurrency=8)
async def run(job: JobContext[Prompt]) -> str:
    return await say(job, job.payload.prompt)


@worker.handles(chat, concurrency=8)
async def answer(job: JobContext[Ask]) -> str:
    return await say(job, job.payload.messages[-1]["parts"][0]["text"])


async def say(job: JobContext[Prompt] | JobContext[Ask], prompt: str) -> str:
    """Stands for a model: it repeats the prompt, word by word."""
    words = [word + " " for word in prompt.split()]
    for word in words:
        await job.emit(word)
        await asyncio.sleep(0.05)
    return "".join(words)


if __name__ == "__main__":
    worker.run()
