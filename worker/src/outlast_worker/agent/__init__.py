"""Agent jobs: a queue of v1 prompt requests, each answered by a model with tools.

::

    agent = Agent(tools=[list_streams])              # queue `agent`; the model of OPENAI_BASE_URL and OPENAI_MODEL
    worker = Worker()
    worker.handles(agent.queue, concurrency=4)(agent.run)

Every turn of the model and every result of a tool is kept as a step before the run goes on: a worker that dies costs
at most the call that was under way. Whoever may enqueue runs the model with every tool, so guard the queue.
"""

from .loop import Agent
from .messages import PromptRequest
from .model import ChatModel
from .tools import Tool

__all__ = ["Agent", "ChatModel", "PromptRequest", "Tool"]
