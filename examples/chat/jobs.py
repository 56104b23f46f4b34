"""The queue of the chat: what the web server and the worker agree on."""

from typing import Any

from pydantic import BaseModel

from outlast import Queue


class Ask(BaseModel):
    """What useChat posts, as far as the worker needs it."""

    messages: list[dict[str, Any]]


# A worker that dies is noticed within its lease: ten seconds are short enough for somebody who waits for an answer.
chat = Queue("chat", payload=Ask, result=str, lease=10, timeout=300)
