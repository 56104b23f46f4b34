"""An essay in two calls of Anthropic's API: python anthropic_worker.py, with ANTHROPIC_API_KEY and ANTHROPIC_MODEL set.

The outline is a step: once it is there, no retry pays for it again. The essay is streamed, so each attempt of it starts
over, and viewers are told.
"""

import os

import anthropic
from providers import provider
from pydantic import BaseModel

from outlast import Queue, RetryJobError
from outlast_worker import JobContext, Worker


class Topic(BaseModel):
    topic: str


essays = Queue("essays", payload=Topic, result=str)
worker = Worker()


@worker.handles(essays, concurrency=8)
async def write(job: JobContext[Topic]) -> str:
    model = os.environ["ANTHROPIC_MODEL"]
    async with anthropic.AsyncAnthropic(max_retries=0, timeout=120) as client:

        async def outline() -> str:
            prompt = f"Outline a short essay about this topic, in five lines: {job.payload.topic}"
            with provider(anthropic.APIError):
                answer = await client.messages.create(
                    model=model, max_tokens=300, messages=[{"role": "user", "content": prompt}]
                )
            job.usage(input_tokens=answer.usage.input_tokens, output_tokens=answer.usage.output_tokens)
            return "".join(block.text for block in answer.content if block.type == "text")

        plan = await job.step("outline", outline)
        await job.progress(0.2)
        prompt = f"Write the essay that this outline describes:\n{plan}"
        with provider(anthropic.APIError):
            async with client.messages.stream(
                model=model, max_tokens=2000, messages=[{"role": "user", "content": prompt}]
            ) as stream:
                async for text in stream.text_stream:
                    await job.emit(text)
                message = await stream.get_final_message()
    if message.stop_reason is None:
        raise RetryJobError("the provider's stream ended before the message did")
    job.usage(input_tokens=message.usage.input_tokens, output_tokens=message.usage.output_tokens)
    return "".join(block.text for block in message.content if block.type == "text")


if __name__ == "__main__":
    worker.run()
