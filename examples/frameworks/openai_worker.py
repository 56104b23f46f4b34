"""Chat Completions that survive deploys: ``uvicorn openai_worker:app`` and ``python openai_worker.py``.

An application only changes its address: ``OpenAI(base_url="http://…/v1", api_key=…)``. The web server makes a job of
each request and streams it; the worker has the provider's key and makes the call.
"""

import hmac
import os
from typing import Any

import openai
from providers import provider
from starlette.requests import Request

from outlast import AsyncClient, Queue, RetryJobError
from outlast_edge import Edge
from outlast_edge.facades.openai_chat import OpenAIChat
from outlast_worker import JobContext, Worker

completions = Queue("completions", payload=dict[str, Any], result=dict[str, Any])
worker = Worker()


@worker.handles(completions, concurrency=32)
async def complete(job: JobContext[dict[str, Any]]) -> dict[str, Any]:
    """The request as it came, streamed; the whole completion is the result."""
    request = {**job.payload, "stream": True, "stream_options": {"include_usage": True}}
    model, messages = request.get("model", ""), request.get("messages", [])
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: dict[int, dict[str, Any]] = {}
    finish_reason, usage = None, None
    async with openai.AsyncOpenAI(max_retries=0, timeout=120) as client:
        with provider(openai.APIError):
            # As extra_body, so that fields which this SDK does not know go through as well.
            made = await client.chat.completions.create(model=model, messages=messages, stream=True, extra_body=request)
            async with made as stream:
                async for chunk in stream:
                    if chunk.usage is not None:
                        usage = chunk.usage.to_dict()
                    for choice in chunk.choices[:1]:
                        finish_reason = choice.finish_reason or finish_reason
                        if choice.delta.content:
                            message["content"] = (message["content"] or "") + choice.delta.content
                            await job.emit(choice.delta.content)
                        for part in choice.delta.tool_calls or ():
                            merge(calls.setdefault(part.index, {}), part.to_dict())
    if finish_reason is None:
        raise RetryJobError("the provider's stream ended before the completion did")
    if usage is not None:
        job.usage(input_tokens=usage["prompt_tokens"], output_tokens=usage["completion_tokens"])
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}], "usage": usage}


def merge(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Put a piece of a tool call onto what is there of it."""
    part.pop("index", None)
    function, more = whole.setdefault("function", {"name": "", "arguments": ""}), part.pop("function", {})
    for name in function:
        function[name] += more.get(name) or ""
    whole.update({name: value for name, value in part.items() if value})


def who(request: Request, action: str, job: Any) -> str | None:
    """Your users' keys go here; this knows a single one."""
    expected = f"Bearer {os.environ['API_KEY']}"
    known = hmac.compare_digest(request.headers.get("authorization", "").encode(), expected.encode())
    return "the caller" if known else None


app = OpenAIChat(Edge(AsyncClient(), queues=[completions], authorize=who)).app()

if __name__ == "__main__":
    worker.run()
