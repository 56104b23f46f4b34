"""Agent jobs as people run them: the command, real workers, a real database."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.agent.conftest import REQUEST
from tests.agent.provider import Provider, calls, text
from tests.faults.processes import until

from outlast import AsyncClient, JobFailedError, Queue
from outlast_worker import Worker
from outlast_worker.agent import Agent, ChatModel

ROOT = Path(__file__).parents[2]
TURNS = [
    calls(("list_streams", '{"account": "one"}'), ("list_streams", '{"account": "two"}'), usage=(700, 0, 20)),
    text("ORDERS and PAYMENTS have no consumers.", usage=(908, 663, 31)),
]


def list_streams(account: str) -> list[str]:
    """The streams of an account."""
    return ["ORDERS"]


@pytest.fixture
async def client(valkey_url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(redis_url=valkey_url) as client:
        yield client


@pytest.fixture
def agent(queue_name: str, model: ChatModel) -> Agent:
    return Agent(queue=Queue(queue_name, lease=0.6, backoff=0.02, max_backoff=0.05), tools=[list_streams], model=model)


def worker_of(url: str, agent: Agent, **options: Any) -> Worker:
    worker = Worker(url, **options)
    worker.handles(agent.queue, concurrency=4)(agent.run)
    return worker


async def command(url: str, *words: str) -> str:
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outlast_worker", *words, "--redis-url", url, cwd=ROOT, stdout=PIPE, stderr=PIPE
    )
    out, err = await run.communicate()
    assert run.returncode == 0, err.decode()
    return out.decode()


async def test_the_command_shows_question_and_answer_as_in_the_document(
    valkey_url: str, queue_name: str, provider: Provider, agent: Agent, tmp_path: Path
) -> None:
    """Seed 001: enqueue a request from a file, hold no connection, read the answer off the record."""
    provider.script = [calls(("list_streams", '{"account": "one"}'), usage=(700, 0, 20)), TURNS[1]]
    file = tmp_path / "request.json"
    file.write_text(json.dumps(REQUEST))
    id = (await command(valkey_url, "enqueue", queue_name, "--payload-file", str(file))).strip()
    async with worker_of(valkey_url, agent):
        record: dict[str, Any] = {}

        async def ended() -> bool:
            record.update(json.loads(await command(valkey_url, "get", queue_name, id, "--json")))
            return bool(record["status"] == "completed")

        await until(ended, "it ends")
    assert record["payload"] == REQUEST
    example = {
        "protocol": "io.choria.fisk-ai.v1.result",
        "request": "2fT8kMxQ1aBcDeFgHiJkLmNoPqR",
        "sender": {"name": "worker"},
        "recipient": {"name": "ops-console"},
        "stop_reason": "end_turn",
        "text": "ORDERS and PAYMENTS have no consumers.",
        "usage": {
            "input_tokens": 1608,
            "cache_read_tokens": 663,
            "output_tokens": 51,
            "llm_calls": 2,
            "tool_calls": 1,
        },
    }
    assert {name: record["result"][name] for name in example} == example
    assert list(record["result"]["usage"]) == list(example["usage"])  # type: ignore[call-overload]


async def test_the_record_has_the_usage_and_watchers_the_text(
    valkey_url: str, client: AsyncClient, agent: Agent, provider: Provider
) -> None:
    provider.script = list(TURNS)
    jobs: Any = client.queue(agent.queue)
    async with worker_of(valkey_url, agent):
        made = await jobs.enqueue(REQUEST)
        events = [event async for event in jobs.watch(made.id)]
    assert "".join(event.data for event in events if event.type == "chunk") == TURNS[1]["content"]
    tools = [event.value for event in events if event.type == "data"]
    assert [next(iter(value)) for value in tools] == ["tool_call", "tool_result"] * 2
    job = await jobs.get(made.id)
    assert job.usage == {
        "input_tokens": 1608,
        "cache_read_tokens": 663,
        "output_tokens": 51,
        "llm_calls": 2,
        "tool_calls": 2,
    }


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ({**REQUEST, "prompt": ""}, "prompt: must not be empty"),
        ({**REQUEST, "prompt": "x" * 600_000}, "too large"),
        ({**REQUEST, "protocol": "io.choria.fisk-ai.v1.cancel"}, "protocol"),
        ("Which streams have no consumers?", "no v1 prompt request"),
    ],
    ids=["empty", "oversized", "wrong kind", "malformed"],
)
async def test_what_cannot_run_is_refused_for_good_with_the_reason(
    valkey_url: str, client: AsyncClient, queue_name: str, agent: Agent, provider: Provider, payload: Any, reason: str
) -> None:
    jobs: Any = client.queue(Queue(queue_name))  # a producer that does not know the agent's rules
    async with worker_of(valkey_url, agent):
        made = await jobs.enqueue(payload)
        with pytest.raises(JobFailedError) as failed:
            await jobs.wait(made.id, timeout=20)
    assert reason in failed.value.error
    assert "x" * 50 not in failed.value.error
    job = await jobs.get(made.id)
    assert (job.attempt, job.starts) == (1, 1)
    assert provider.requests == []


async def test_a_failed_run_is_a_completed_job(
    valkey_url: str, client: AsyncClient, agent: Agent, provider: Provider
) -> None:
    provider.script = [text("No.", finish="content_filter")]
    jobs: Any = client.queue(agent.queue)
    async with worker_of(valkey_url, agent):
        result = await jobs.wait((await jobs.enqueue(REQUEST)).id, timeout=20)
    assert (result["protocol"], result["stop_reason"]) == ("io.choria.fisk-ai.v1.error", "refusal")
    assert len(provider.requests) == 1


async def test_trouble_that_does_not_pass_ends_as_an_answer_too(
    valkey_url: str, client: AsyncClient, agent: Agent, provider: Provider
) -> None:
    provider.script = [503, 503, 503]
    jobs: Any = client.queue(agent.queue)
    async with worker_of(valkey_url, agent):
        made = await jobs.enqueue(REQUEST)
        result = await jobs.wait(made.id, timeout=20)
    assert result["stop_reason"] == "error"
    assert len(provider.requests) == 3
    assert (await jobs.get(made.id)).attempt == 3


DEEP = '{"account": ' + "[" * 600 + "]" * 600 + "}"


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        (calls(("list_streams", '{"account": NaN}')), "Done."),
        (calls(("list_streams", DEEP)), "Done."),
        (calls(("half_a_pair", "{}")), "Done."),
        (text("half \ud83d"), "half \ufffd"),
    ],
    ids=["no JSON", "deep", "half a pair of a tool", "half a pair of the model"],
)
async def test_odd_output_of_models_and_tools_ends_no_run(
    valkey_url: str, client: AsyncClient, queue_name: str, model: ChatModel, provider: Provider, turn: Any, says: str
) -> None:
    def half_a_pair() -> str:
        return "\ud83d"

    agent = Agent(queue=queue_name, tools=[list_streams, half_a_pair], model=model)
    provider.script = [turn, text("Done.")]
    jobs: Any = client.queue(agent.queue)
    async with worker_of(valkey_url, agent):
        made = await jobs.enqueue(REQUEST)
        assert (await jobs.wait(made.id, timeout=20))["text"] == says
    assert (await jobs.get(made.id)).attempt == 1


async def test_a_rate_limit_uses_no_attempt(
    valkey_url: str, client: AsyncClient, agent: Agent, provider: Provider
) -> None:
    provider.script = [(429, {"retry-after": "0.01"}, {}), text("Now.")]
    jobs: Any = client.queue(agent.queue)
    async with worker_of(valkey_url, agent):
        made = await jobs.enqueue(REQUEST)
        assert (await jobs.wait(made.id, timeout=20))["text"] == "Now."
    job = await jobs.get(made.id)
    assert (job.attempt, job.starts) == (1, 2)


async def test_a_cancel_closes_the_call_of_the_model(
    valkey_url: str, client: AsyncClient, agent: Agent, provider: Provider
) -> None:
    provider.script = ["hang"]
    jobs: Any = client.queue(agent.queue)
    async with worker_of(valkey_url, agent):
        made = await jobs.enqueue(REQUEST)
        await asyncio.wait_for(provider.hanging.wait(), 20)
        await jobs.cancel(made.id)

        async def closed() -> bool:
            return provider.closed == 1

        await until(closed, "closed")
    assert (await jobs.get(made.id)).status == "cancelled"


@pytest.mark.parametrize("id", ["-x", ":a:b:", "--json", "a b/ü", "gen"])
async def test_every_id_that_the_queue_takes_works(
    valkey_url: str, client: AsyncClient, agent: Agent, provider: Provider, id: str
) -> None:
    jobs: Any = client.queue(agent.queue)
    async with worker_of(valkey_url, agent):
        await jobs.enqueue(REQUEST, id=id)
        assert (await jobs.wait(id, timeout=20))["stop_reason"] == "end_turn"


async def test_other_queues_are_left_alone_and_stats_shows_that_nobody_handles_them(
    valkey_url: str, client: AsyncClient, queue_name: str, agent: Agent
) -> None:
    """Queues are the task types."""
    other: Any = client.queue(Queue(queue_name + "-other"))
    made = await other.enqueue(REQUEST)
    jobs: Any = client.queue(agent.queue)
    async with worker_of(valkey_url, agent):
        await jobs.wait((await jobs.enqueue(REQUEST)).id, timeout=20)
        assert (await other.get(made.id)).status == "waiting"
        stats = json.loads(await command(valkey_url, "stats", "--json"))["queues"]
    rows = {row["queue"]: row["unattended"] for row in stats}
    assert rows[queue_name + "-other"] is True
    assert rows[queue_name] is False


# -- deaths ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def process(url: str, queue: str, provider: Provider, dies: str = "") -> AsyncIterator[Process]:
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.agent.child", url, queue, provider.url, dies, cwd=ROOT, stdout=PIPE
    )
    try:
        yield run
    finally:
        if run.returncode is None:
            run.send_signal(signal.SIGKILL)
        await run.wait()


async def said(run: Process) -> list[str]:
    assert run.stdout is not None
    return (await run.stdout.read()).decode().split("\n")


@pytest.mark.parametrize(("dies", "tools"), [("in-tool", ["one", "two", "two"]), ("after-answer", ["one", "two"])])
async def test_a_killed_worker_costs_at_most_the_call_that_was_under_way(
    valkey_url: str, client: AsyncClient, queue_name: str, provider: Provider, dies: str, tools: list[str]
) -> None:
    """kill -9 in a tool: that tool runs again, the model is not asked again. After the answer: nothing runs again."""
    provider.script = list(TURNS)
    jobs: Any = client.queue(Queue(queue_name))
    made = await jobs.enqueue(REQUEST)
    async with process(valkey_url, queue_name, provider, dies) as first:
        ran = await said(first)  # until it is dead
        assert await first.wait() == -signal.SIGKILL
    async with process(valkey_url, queue_name, provider) as second:
        result = await jobs.wait(made.id, timeout=30)
        second.terminate()
        ran += await said(second)
    assert [line for line in ran if line.startswith("tool")] == [f"tool {account}" for account in tools]
    assert len(provider.requests) == 2
    assert result["text"] == TURNS[1]["content"]
    assert result["usage"]["llm_calls"] == 2
    assert result["usage"]["tool_calls"] == 2
    job = await jobs.get(made.id)
    assert (job.status, job.attempt) == ("completed", 2)


async def test_without_any_setting_the_small_model_answers(
    valkey_url: str, client: AsyncClient, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real one of `outlast dev`, in this process."""
    assert find_spec("xllamacpp"), "the group `model` is not installed"
    for name in ("OPENAI_BASE_URL", "OPENAI_MODEL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    agent = Agent(queue=queue_name, max_output_tokens=24)
    jobs: Any = client.queue(agent.queue)
    try:
        async with worker_of(valkey_url, agent):
            made = await jobs.enqueue({**REQUEST, "prompt": "What is the capital of France?"})
            events = [event async for event in jobs.watch(made.id, timeout=60)]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    result = events[-1].result
    if result["protocol"].endswith(".result"):
        assert "".join(event.data for event in events if event.type == "chunk") == result["text"]
        assert result["usage"]["output_tokens"] > 0
        assert result["usage"]["input_tokens"] > 10
    else:  # it had more to say than 24 tokens hold
        assert result["stop_reason"] == "max_tokens"
