"""Which payloads are prompt requests, and what an answer looks like."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from outlast import InvalidArgumentError, Queue, ReplyShapeError
from outlast_worker.agent import Agent
from outlast_worker.agent.messages import Party, PromptRequest, reply

from .conftest import REQUEST

agents = Agent(max_payload=2000)


def refusal(payload: Any) -> str:
    text = payload if isinstance(payload, str) else json.dumps(payload)
    with pytest.raises(ReplyShapeError) as caught:
        agents.queue.decode_payload(text)
    assert "Which streams" not in str(caught.value)
    return str(caught.value)


def test_the_request_of_the_document_is_read() -> None:
    request = agents.queue.decode_payload(json.dumps(REQUEST))
    assert request.prompt == "Which streams have no consumers?"
    assert request.sender.name == "ops-console"


def test_optional_fields_of_v1_are_read() -> None:
    request = agents.queue.decode_payload(
        json.dumps(
            {
                **REQUEST,
                "sender": {"name": "ops-console", "instance": "eu_1"},
                "recipient": {"name": "worker"},
                "parent": "an-earlier-request",
                "must_understand": True,
                "context": "NATS 2.12",
                "tool_hints": ["list_streams"],
                "budget": {"max_tokens": 100, "max_iterations": 2, "call_timeout": "1m30.5s"},
                "stream": False,
                "time": "2026-08-15T11:30:00.123456789+02:00",
            }
        )
    )
    assert request.budget.call_seconds == pytest.approx(90.5)


def test_an_oversized_payload_is_refused_before_anything_decodes_it() -> None:
    assert refusal("{" * 2001).endswith("too large: 2001 bytes, max_payload is 2000")
    assert "too large: 2004 bytes" in refusal("é" * 1002)  # bytes, not characters


def test_the_default_limit_is_524288_bytes() -> None:
    padded = json.dumps(REQUEST)
    padded += " " * (524_288 - len(padded))
    queue = Agent().queue
    assert queue.decode_payload(padded).prompt == REQUEST["prompt"]
    with pytest.raises(ReplyShapeError, match="max_payload is 524288"):
        queue.decode_payload(padded + " ")


@pytest.mark.parametrize("text", ["", "null", "[]", "42", '"prompt"', "{", '{"prompt": NaN}', "[" * 900])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    assert "no v1 prompt request" in refusal(text)


@pytest.mark.parametrize("kind", ["request.status", "request", "cancel", "result", "event", ""])
def test_another_kind_of_message_is_refused(kind: str) -> None:
    assert "protocol" in refusal({**REQUEST, "protocol": f"io.choria.fisk-ai.v1.{kind}"})


@pytest.mark.parametrize("prompt", ["", " \n\t"])
def test_an_empty_prompt_is_refused(prompt: str) -> None:
    assert "prompt: must not be empty" in refusal({**REQUEST, "prompt": prompt})


@pytest.mark.parametrize("name", list(REQUEST))
def test_a_missing_header_is_refused(name: str) -> None:
    assert f"{name}: Field required" in refusal({key: value for key, value in REQUEST.items() if key != name})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"surprise": 1}, "surprise"),
        ({"id": "other"}, "must hold the same value"),
        ({"request": "other"}, "must hold the same value"),
        ({"conversation": "other"}, "must hold the same value"),
        ({"sequence": -1}, "sequence"),
        ({"sequence": "0"}, "sequence"),
        ({"sequence": True}, "sequence"),
        ({"time": "yesterday"}, "RFC 3339"),
        ({"time": "2026-08-15 11:30:00Z"}, "RFC 3339"),
        ({"time": "2026-08-15T11:30:00"}, "RFC 3339"),
        ({"time": "2026-02-30T11:30:00Z"}, "no day"),
        ({"sender": {"name": "a b"}}, "sender.name"),
        ({"sender": {"name": "ops\n"}}, "sender.name"),
        ({"sender": {}}, "sender.name"),
        ({"sender": {"name": "a", "role": "b"}}, "sender.role"),
        ({"prompt": 5}, "prompt"),
        ({"budget": {"max_tokens": -1}}, "budget.max_tokens"),
        ({"budget": {"call_timeout": "soon"}}, "budget.call_timeout"),
        ({"budget": {"call_timeout": 60}}, "budget.call_timeout"),
        ({"budget": {"dollars": 1}}, "budget.dollars"),
        ({"tool_hints": "all"}, "tool_hints"),
    ],
)
def test_a_malformed_request_is_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    assert reason in refusal({**REQUEST, **change})


def test_a_producer_with_the_agents_own_queue_is_told_before_anything_is_sent() -> None:
    assert json.loads(agents.queue.encode_payload(PromptRequest(**REQUEST))) == REQUEST
    with pytest.raises(ValueError, match="must not be empty"):
        agents.queue.encode_payload({**REQUEST, "prompt": ""})  # type: ignore[arg-type]


def test_a_reply_echoes_the_request_and_names_who_asked() -> None:
    request = PromptRequest(**REQUEST)
    sent = [reply(request, Party(name="worker"), "result", stop_reason="end_turn", text="…") for _ in range(2)]
    first = sent[0]
    assert first["protocol"] == "io.choria.fisk-ai.v1.result"
    assert first["request"] == first["conversation"] == REQUEST["id"]
    assert (first["sender"], first["recipient"]) == ({"name": "worker"}, {"name": "ops-console"})
    assert first["sequence"] == 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", first["time"])
    assert all(re.fullmatch(r"[0-9a-f]{32}", message["id"]) for message in sent)
    assert sent[0]["id"] != sent[1]["id"]


def test_every_setting_has_a_default() -> None:
    agent = Agent()
    assert agent.queue.name == "agent"
    assert agent.queue.max_payload == 524_288


@pytest.mark.parametrize("setting", [{"name": "my worker"}, {"instance": ""}, {"max_output_tokens": 0}])
def test_a_setting_that_no_answer_could_carry_is_refused_by_name(setting: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{next(iter(setting))}="):
        Agent(**setting)


@pytest.mark.parametrize(
    ("text", "seconds"), [("60s", 60), (".5s", 0.5), ("1.s", 1), ("1h1m1s1ms", 3661.001), ("7µs", 7e-6), ("7μs", 7e-6)]
)
def test_durations_are_those_of_go(text: str, seconds: float) -> None:
    request = agents.queue.decode_payload(json.dumps({**REQUEST, "budget": {"call_timeout": text}}))
    assert request.budget.call_seconds == pytest.approx(seconds)


def test_a_queue_of_ones_own_keeps_its_rules() -> None:
    mine: Queue[Any, Any] = Queue("research", timeout=600, max_attempts=5)
    agent = Agent(queue=mine)
    assert (agent.queue.name, agent.queue.timeout_ms, agent.queue.max_attempts) == ("research", 600_000, 5)
    assert mine.max_payload == 1024 * 1024
