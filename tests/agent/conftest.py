from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.agent.provider import Provider, scripted_provider

from outlast_worker.agent import Agent, ChatModel

REQUEST: dict[str, Any] = {
    "protocol": "io.choria.fisk-ai.v1.request.prompt",
    "id": "2fT8kMxQ1aBcDeFgHiJkLmNoPqR",
    "request": "2fT8kMxQ1aBcDeFgHiJkLmNoPqR",
    "conversation": "2fT8kMxQ1aBcDeFgHiJkLmNoPqR",
    "sequence": 0,
    "time": "2026-08-15T11:30:00Z",
    "sender": {"name": "ops-console"},
    "prompt": "Which streams have no consumers?",
}


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    async with scripted_provider() as provider:
        yield provider


@pytest.fixture
def model(provider: Provider) -> ChatModel:
    return ChatModel("scripted", base_url=provider.url, api_key="sk-test")


class Died(BaseException):
    """The worker is gone: nothing after this point happened."""


class Attempt:
    """What the loop needs of a JobContext, with the steps in a dict. `dies_at`: the step whose save never happens."""

    def __init__(
        self, agent: Agent, payload: Any, journal: dict[str, str], *, attempt: int = 1, dies_at: str = ""
    ) -> None:
        self.id, self.attempt, self.max_attempts = "job", attempt, 3
        self.payload = agent.queue.decode_payload(json.dumps(payload))
        self.journal = journal
        self.dies_at = dies_at
        self.emitted: list[Any] = []
        self.used: Counter[str] = Counter()

    async def step(self, name: str, function: Any, *args: Any) -> Any:
        if name not in self.journal:
            value = await function(*args)
            if name == self.dies_at:
                raise Died
            self.journal[name] = json.dumps(value)
        return json.loads(self.journal[name])

    async def emit(self, value: Any) -> None:
        self.emitted.append(value)

    def usage(self, **counters: int) -> None:
        self.used.update(counters)


async def answer(agent: Agent, payload: Any = REQUEST, journal: dict[str, str] | None = None, **options: Any) -> Any:
    attempt: Any = Attempt(agent, payload, {} if journal is None else journal, **options)
    return await agent.run(attempt)
