"""The loop against a scripted endpoint on loopback, its steps in a dict."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from outlast import InvalidArgumentError, RateLimitedError, RetryJobError, TerminalJobError
from outlast_worker.agent import Agent, ChatModel, Tool

from .conftest import REQUEST, Attempt, Died, answer
from .provider import Provider, calls, text


class Filter(BaseModel):
    prefix: str = ""


class Point(BaseModel):
    x: int


def test_the_schema_of_a_tool_comes_from_its_types() -> None:
    def list_streams(
        kind: Literal["push", "pull"], limit: Annotated[int, Field(ge=1, le=50)] = 10, filter: Filter | None = None
    ):  # type: ignore[no-untyped-def]
        """Name the streams.

        Only those of this account.
        """

    function = Tool(list_streams).definition["function"]
    assert function["name"] == "list_streams"  # type: ignore[index]
    assert function["description"] == "Name the streams.\n\nOnly those of this account."  # type: ignore[index]
    schema = function["parameters"]  # type: ignore[index]
    assert schema["properties"]["kind"]["enum"] == ["push", "pull"]
    assert schema["properties"]["limit"]["maximum"] == 50
    assert schema["required"] == ["kind"]
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Filter"]["properties"]["prefix"]["type"] == "string"


def test_what_a_model_cannot_call_is_refused_when_the_agent_is_made() -> None:
    def untyped(value): ...  # type: ignore[no-untyped-def]

    def star(*values: int) -> None: ...

    for tool in (untyped, star, lambda: None, 5):
        with pytest.raises(InvalidArgumentError):
            Agent(tools=[tool])  # type: ignore[list-item]

    def twice(value: int) -> None: ...

    with pytest.raises(InvalidArgumentError, match="same name"):
        Agent(tools=[twice, twice])


async def test_a_tool_gets_validated_arguments_and_answers_in_text() -> None:
    def add(a: int, b: int = 2, *, schema: str = "") -> int:
        return a + b

    async def move(point: Point, json: list[Point]) -> list[Point]:
        return [Point(x=point.x + 1), *json]

    assert await Tool(add)('{"a": 1}') == ("3", False)
    assert await Tool(move)('{"point": {"x": 1}, "json": [{"x": 7}]}') == ('[{"x":2},{"x":7}]', False)
    assert await Tool(add)('{"a": "one"}') != ("3", False)
    for bad in ('{"a": "one"}', '{"a": 1, "c": 2}', "{}", "[]", "{"):
        output, is_error = await Tool(add)(bad)
        assert is_error, output


async def test_what_a_tool_raises_is_for_the_model_but_outlasts_own_errors_are_for_the_job() -> None:
    def broken() -> str:
        raise LookupError("no such stream")

    def limited() -> str:
        raise RateLimitedError("slow down", retry_after=1)

    assert await Tool(broken)("{}") == ("LookupError: no such stream", True)
    with pytest.raises(RateLimitedError):
        await Tool(limited)("{}")


# -- a run -------------------------------------------------------------------------------------------------------------


def list_streams(account: str = "main") -> list[dict[str, Any]]:
    """The streams and how many consumers each has."""
    return [{"name": "ORDERS", "consumers": 0}, {"name": "EVENTS", "consumers": 2}]


async def test_an_answer_without_tools(provider: Provider, model: ChatModel) -> None:
    provider.script = [text("Hello there.", usage=(12, 4, 3))]
    agent = Agent(model=model)
    attempt: Any = Attempt(agent, REQUEST, {})
    result = await agent.run(attempt)
    assert result["protocol"] == "io.choria.fisk-ai.v1.result"
    assert (result["stop_reason"], result["text"]) == ("end_turn", "Hello there.")
    # Zero counters are left out, as in Go.
    assert result["usage"] == {"input_tokens": 12, "cache_read_tokens": 4, "output_tokens": 3, "llm_calls": 1}
    assert "".join(attempt.emitted) == "Hello there."
    [sent] = provider.requests
    assert sent["model"] == "scripted"
    assert sent["stream"] is True
    assert "tools" not in sent
    assert [message["role"] for message in sent["messages"]] == ["system", "user"]
    assert provider.headers[0]["authorization"] == "Bearer sk-test"
    assert provider.headers[0][":path"] == "/v1/chat/completions"


async def test_the_answer_of_the_document(provider: Provider, model: ChatModel) -> None:
    """Seed 001: two model calls, one tool call; input_tokens counts every token, the cached ones are a part of it."""
    provider.script = [
        calls(("list_streams", '{"account": "main"}'), usage=(700, 0, 20)),
        text("ORDERS and PAYMENTS have no consumers.", usage=(908, 663, 31)),
    ]
    agent = Agent(tools=[list_streams], model=model)
    attempt: Any = Attempt(agent, REQUEST, {})
    result = await agent.run(attempt)
    told = {key: result[key] for key in ("protocol", "request", "sender", "recipient", "stop_reason", "text", "usage")}
    assert told == {
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
    assert attempt.used == {**told["usage"], "cache_create_tokens": 0}  # the record's totals are the same
    assert list(attempt.journal) == ["turn-1", "tool-1-0", "turn-2", "answer"]
    *_, asked, found = provider.requests[1]["messages"]
    assert asked["tool_calls"][0]["function"] == {"name": "list_streams", "arguments": '{"account": "main"}'}
    assert found["tool_call_id"] == asked["tool_calls"][0]["id"]
    assert json.loads(found["content"])[0] == {"name": "ORDERS", "consumers": 0}
    assert {"tool_call": {"id": "call_0", "name": "list_streams", "input": {"account": "main"}}} in attempt.emitted


async def test_several_tool_calls_of_one_turn_run_in_order(provider: Provider, model: ChatModel) -> None:
    ran: list[int] = []

    def note(number: int) -> str:
        ran.append(number)
        return "noted"

    provider.script = [
        calls(("note", '{"number": 1}'), ("note", '{"number": 2}'), ("note", '{"number": 3}')),
        text("ok"),
    ]
    result = await answer(Agent(tools=[note], model=model))
    assert ran == [1, 2, 3]
    assert result["usage"]["tool_calls"] == 3


async def test_a_tool_that_fails_or_is_unknown_is_told_to_the_model(provider: Provider, model: ChatModel) -> None:
    def broken() -> str:
        raise LookupError("no such stream")

    provider.script = [calls(("broken", ""), ("invented", "{}"), ("broken", "{half")), text("I could not find out.")]
    result = await answer(Agent(tools=[broken], model=model))
    assert result["text"] == "I could not find out."
    outputs = [message["content"] for message in provider.requests[1]["messages"] if message["role"] == "tool"]
    assert outputs[0] == "Error: LookupError: no such stream"
    assert "no tool 'invented'" in outputs[1]
    assert outputs[2].startswith("Error: ")
    for call in provider.requests[1]["messages"][2]["tool_calls"]:
        assert isinstance(json.loads(call["function"]["arguments"]), dict)  # endpoints read them again


async def test_a_long_output_is_cut_for_the_model(provider: Provider, model: ChatModel) -> None:
    def dump() -> str:
        return "x" * 100_000

    provider.script = [calls(("dump", "{}")), text("long")]
    await answer(Agent(tools=[dump], model=model))
    output = provider.requests[1]["messages"][-1]["content"]
    assert len(output) < 66_000
    assert "34464 more characters" in output


async def test_context_and_hints(provider: Provider, model: ChatModel) -> None:
    def delete_streams() -> None: ...

    agent = Agent(tools=[list_streams, delete_streams], model=model)
    await answer(agent, {**REQUEST, "context": "NATS 2.12", "tool_hints": ["list_streams", "unknown"]})
    [sent] = provider.requests
    assert sent["messages"][1]["content"] == "NATS 2.12\n\nWhich streams have no consumers?"
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["list_streams"]


async def test_a_request_may_ask_for_silence(provider: Provider, model: ChatModel) -> None:
    agent = Agent(model=model)
    attempt: Any = Attempt(agent, {**REQUEST, "stream": False}, {})
    await agent.run(attempt)
    assert attempt.emitted == []


async def test_an_endpoint_that_does_not_stream(provider: Provider, model: ChatModel) -> None:
    message = {"role": "assistant", "content": "All at once."}
    details = {"cached_tokens": 3, "cache_write_tokens": 2}  # parts of the five, not beside them
    usage = {"prompt_tokens": 5, "completion_tokens": 4, "prompt_tokens_details": details}
    provider.script = [(200, {}, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})]
    result = await answer(Agent(model=model))
    assert (result["text"], result["usage"]) == (
        "All at once.",
        {"input_tokens": 5, "cache_read_tokens": 3, "cache_create_tokens": 2, "output_tokens": 4, "llm_calls": 1},
    )


@pytest.mark.parametrize("usage", ["much", {"prompt_tokens": -1, "completion_tokens": 1.5, "prompt_tokens_details": 1}])
async def test_an_answer_that_was_paid_for_is_kept_whatever_its_endpoint_counts(
    provider: Provider, model: ChatModel, usage: Any
) -> None:
    whole = {"choices": [{"message": {"content": "Yes."}, "finish_reason": "stop"}], "usage": usage}
    provider.script = [(200, {}, whole)]
    result = await answer(Agent(model=model))
    assert (result["text"], result["usage"]) == ("Yes.", {"llm_calls": 1})


async def test_options_reach_the_endpoint(provider: Provider) -> None:
    model = ChatModel("m", base_url=provider.url, options={"temperature": 0, "stream_options": None})
    await answer(Agent(model=model, max_output_tokens=99))
    [sent] = provider.requests
    assert (sent["temperature"], sent["max_tokens"]) == (0, 99)
    assert "stream_options" not in sent
    assert "authorization" not in provider.headers[0]


# -- runs that fail are answers ----------------------------------------------------------------------------------------


async def test_a_refusal_is_an_answer(provider: Provider, model: ChatModel) -> None:
    provider.script = [text("I will not.", finish="content_filter")]
    result = await answer(Agent(model=model))
    assert result["protocol"] == "io.choria.fisk-ai.v1.error"
    assert result["stop_reason"] == "refusal"
    assert result["error"]
    assert result["recipient"] == {"name": "ops-console"}
    assert "text" not in result
    assert "usage" not in result  # the schema of an error has no such field


async def test_a_reply_that_was_cut_off_is_an_error_and_its_tools_do_not_run(
    provider: Provider, model: ChatModel
) -> None:
    def never() -> None:
        raise AssertionError

    provider.script = [calls(("never", "{}"), finish="length")]
    result = await answer(Agent(tools=[never], model=model))
    assert (result["stop_reason"], len(provider.requests)) == ("max_tokens", 1)


async def test_a_spent_budget_is_an_answer_and_the_turns_tools_do_not_run(provider: Provider, model: ChatModel) -> None:
    def never() -> None:
        raise AssertionError

    provider.script = [calls(("never", "{}"), usage=(70, 50, 30))]
    result = await answer(Agent(tools=[never], model=model, max_tokens=100))
    assert (result["stop_reason"], len(provider.requests)) == ("budget_exhausted", 1)


async def test_an_answer_is_delivered_even_over_budget(provider: Provider, model: ChatModel) -> None:
    provider.script = [text("Here.", usage=(500, 0, 500))]
    assert (await answer(Agent(model=model, max_tokens=100)))["text"] == "Here."


async def test_iterations_end(provider: Provider, model: ChatModel) -> None:
    ran = 0

    def again() -> str:
        nonlocal ran
        ran += 1
        return "again"

    provider.script = [calls(("again", "{}")) for _ in range(9)]
    result = await answer(Agent(tools=[again], model=model, max_iterations=3))
    assert (result["stop_reason"], len(provider.requests), ran) == ("max_iterations", 3, 2)


@pytest.mark.parametrize(
    ("budget", "reason", "made"),
    [
        ({"max_tokens": 20}, "budget_exhausted", 2),
        ({"max_iterations": 1}, "max_iterations", 1),
        # Above what is configured, or zero: ignored.
        ({"max_tokens": 10**9, "max_iterations": 10**6, "call_timeout": "9h"}, "max_iterations", 4),
        ({"max_tokens": 0, "max_iterations": 0, "call_timeout": "0"}, "max_iterations", 4),
    ],
)
async def test_a_request_may_only_lower_the_budget(
    provider: Provider, model: ChatModel, budget: dict[str, Any], reason: str, made: int
) -> None:
    provider.script = [calls(("list_streams", "{}")) for _ in range(9)]
    agent = Agent(tools=[list_streams], model=model, max_tokens=1000, max_iterations=4)
    result = await answer(agent, {**REQUEST, "budget": budget})
    assert (result["stop_reason"], len(provider.requests)) == (reason, made)


async def test_a_request_cannot_raise_a_limit(provider: Provider, model: ChatModel) -> None:
    """Each of the three by itself: one that holds must not hide another that does not."""
    greedy = {**REQUEST, "budget": {"max_tokens": 10**9, "max_iterations": 10**6, "call_timeout": "9h"}}
    provider.script = [calls(("list_streams", "{}"), usage=(70, 0, 50))]
    result = await answer(Agent(tools=[list_streams], model=model, max_tokens=100), greedy)
    assert result["stop_reason"] == "budget_exhausted"
    provider.script = ["hang"]
    with pytest.raises(RetryJobError, match=r"within 0\.2 s"):
        await answer(Agent(model=model, call_timeout=0.2), greedy)


async def test_the_time_of_a_call_is_limited_and_lowered(provider: Provider, model: ChatModel) -> None:
    provider.script = ["hang"]
    agent = Agent(model=model)
    with pytest.raises(RetryJobError, match=r"within 0\.2 s"):
        await answer(agent, {**REQUEST, "budget": {"call_timeout": "200ms"}})
    await asyncio.sleep(0.05)
    assert provider.closed == 1


# -- the provider's trouble --------------------------------------------------------------------------------------------


PARTS = {"choices": [{"message": {"content": [{"type": "text", "text": "Yes."}]}, "finish_reason": "stop"}]}


@pytest.mark.parametrize("trouble", [408, 500, 503, "cut", (200, {}, {"choices": "what"}), (200, {}, PARTS)])
async def test_trouble_that_passes_is_tried_again_and_told_after_the_last_attempt(
    provider: Provider, model: ChatModel, trouble: Any
) -> None:
    provider.script = [trouble, trouble]
    agent = Agent(model=model)
    with pytest.raises(RetryJobError):
        await answer(agent, attempt=1)
    result = await answer(agent, attempt=3)
    assert (result["protocol"], result["stop_reason"]) == ("io.choria.fisk-ai.v1.error", "error")


async def test_a_refused_connection_is_tried_again() -> None:
    with pytest.raises(RetryJobError, match="ConnectError"):
        await answer(Agent(model=ChatModel("m", base_url="http://127.0.0.1:1")))


async def test_a_rate_limit_pauses_the_queue(provider: Provider, model: ChatModel) -> None:
    for said, pause in (("7", 7), ("0", 1)):
        provider.script = [(429, {"retry-after": said}, {"error": {"message": "slow"}})]
        with pytest.raises(RateLimitedError) as caught:
            await answer(Agent(model=model), attempt=3)
        assert caught.value.retry_after == pause


@pytest.mark.parametrize("trouble", [400, 401, 404, (429, {}, {"error": {"code": "insufficient_quota"}})])
async def test_a_final_refusal_is_an_answer_at_once(provider: Provider, model: ChatModel, trouble: Any) -> None:
    provider.script = [trouble]
    result = await answer(Agent(model=model))
    assert (result["stop_reason"], len(provider.requests)) == ("error", 1)
    assert "sk-test" not in json.dumps(result)


async def test_a_tool_may_end_the_run(provider: Provider, model: ChatModel) -> None:
    def stop() -> None:
        raise TerminalJobError("this account is closed")

    provider.script = [calls(("stop", "{}"))]
    result = await answer(Agent(tools=[stop], model=model))
    assert result["error"] == "this account is closed"


# -- the journal -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dies_at", "again"),
    [("turn-1", (3, 2)), ("tool-1-0", (2, 3)), ("tool-1-1", (2, 3)), ("turn-2", (3, 2)), ("answer", (2, 2))],
)
async def test_a_death_repeats_at_most_the_step_under_way(
    provider: Provider, model: ChatModel, dies_at: str, again: tuple[int, int]
) -> None:
    ran: list[int] = []

    def note(number: int) -> str:
        ran.append(number)
        return f"noted {number}"

    turns = [calls(("note", '{"number": 1}'), ("note", '{"number": 2}')), text("Both noted.")]
    provider.script = turns if dies_at != "turn-1" else [turns[0], *turns]
    if dies_at == "turn-2":
        provider.script = [*turns, turns[1]]
    agent = Agent(tools=[note], model=model)
    journal: dict[str, str] = {}
    with pytest.raises(Died):
        await answer(agent, journal=journal, dies_at=dies_at)
    second: Any = Attempt(agent, REQUEST, journal, attempt=2)
    result = await agent.run(second)
    assert result["text"] == "Both noted."
    assert result["usage"]["llm_calls"] == 2  # of the journal, however often the worker died
    assert result["usage"]["tool_calls"] == 2
    assert (len(provider.requests), len(ran)) == again
    assert "Both noted." in "".join(part for part in second.emitted if isinstance(part, str))


async def test_a_complete_journal_answers_without_the_model(provider: Provider, model: ChatModel) -> None:
    journal: dict[str, str] = {}
    agent = Agent(model=model)
    first = await answer(agent, journal=journal)
    assert await answer(agent, journal=journal, attempt=2) == first
    assert len(provider.requests) == 1


async def test_a_budget_counts_over_all_attempts(provider: Provider, model: ChatModel) -> None:
    provider.script = [calls(("list_streams", "{}"), usage=(60, 0, 0)), calls(("list_streams", "{}"), usage=(60, 0, 0))]
    agent = Agent(tools=[list_streams], model=model, max_tokens=100)
    journal: dict[str, str] = {}
    with pytest.raises(Died):
        await answer(agent, journal=journal, dies_at="tool-1-0")
    result = await answer(agent, journal=journal, attempt=2)
    assert (result["stop_reason"], len(provider.requests)) == ("budget_exhausted", 2)


async def test_the_endpoint_may_be_named_by_the_environment(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", provider.url)
    monkeypatch.setenv("OPENAI_MODEL", "from-the-environment")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-environment")
    await answer(Agent())
    assert provider.requests[0]["model"] == "from-the-environment"
    assert provider.headers[0]["authorization"] == "Bearer sk-environment"
