"""An agent's worker in a process of its own: ``python -m tests.agent.child URL QUEUE PROVIDER [DIES]``.

`DIES` names the moment at which it kills itself: in the second call of the tool, or between the answer and its settle.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from outlast import Queue
from outlast_worker import JobContext, Worker
from outlast_worker.agent import Agent, ChatModel

url, queue_name, provider, dies = sys.argv[1:5]
count = 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def list_streams(account: str) -> list[dict[str, Any]]:
    """The streams of an account and how many consumers each has."""
    global count
    count += 1
    os.write(1, f"tool {account}\n".encode())
    if dies == "in-tool" and count == 2:
        die()
    return [{"name": "ORDERS", "consumers": 0}]


agent = Agent(
    queue=Queue(queue_name, lease=0.6, backoff=0.02, max_backoff=0.05),
    tools=[list_streams],
    model=ChatModel("scripted", base_url=provider),
)
worker = Worker(url)


@worker.handles(agent.queue)
async def run(job: JobContext[Any]) -> Any:
    answer = await agent.run(job)
    if dies == "after-answer":
        die()
    return answer


os.write(1, b"ready\n")
worker.run()
