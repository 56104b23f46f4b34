"""The queues, known to the edge and the worker. lib/outlast.ts repeats what a producer needs of them."""

from typing import Any

from pydantic import BaseModel

from outlast import Queue


class Prompt(BaseModel):
    prompt: str


class Ask(BaseModel):
    messages: list[dict[str, Any]]


generate = Queue("generate", payload=Prompt, result=str)
chat = Queue("chat", payload=Ask, result=str)
