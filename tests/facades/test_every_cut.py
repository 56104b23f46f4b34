"""Cut after every n, restart at every n: what a reader has put together at the end equals the result.

Pure: the projections over a real `Tail`, and readers that keep what the protocols' clients keep. The clients
themselves run through real connections in the other files and in tests/runtimes/facades.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from outlast import Queue
from outlast_edge._frames import project
from outlast_edge.facades.ai_sdk import Chunks, _ChunkStream
from outlast_edge.facades.durable_streams import _cursor, _offset
from outlast_edge.facades.openai_chat import Deltas
from outlast_edge.facades.openai_responses import Events, Resource

from .history import GEN, Life

TOKENS = ["Every ", "answer ", "outlasts ", "its ", "request."]
TEXT = "".join(TOKENS)
TOOL = {"type": "tool-input-available", "toolCallId": "c", "toolName": "t", "input": {}}


def lives() -> Iterator[tuple[str, Life]]:
    yield "plain", Life([TOKENS], TEXT)
    for n in range(len(TOKENS) + 1):
        yield f"restart after {n}", Life([TOKENS[:n], TOKENS], TEXT)
        yield f"restart after {n} and 2", Life([TOKENS[:n], TOKENS[:2], TOKENS], TEXT)
    yield "restart into another answer", Life([["Nay, "], TOKENS], TEXT)
    yield "a restart whose marker was lost", Life([TOKENS[:2], TOKENS], TEXT, markers=False)
    yield "tools", Life([["Let ", TOOL, "me "], ["Let ", TOOL, "me ", {"x": 1}, "see"]], "Let me see")
    yield "only a result", Life([[]], TEXT)
    yield "a result that goes on", Life([TOKENS[:2]], TEXT)
    yield "a result that differs", Life([["draft"]], TEXT)
    yield "trimmed at the front", Life([TOKENS * 3], TEXT * 3, max_len=4)


LIVES = dict(lives())
everywhere = pytest.mark.parametrize("life", LIVES.values(), ids=LIVES)


def cut_everywhere(life: Life) -> Iterator[tuple[int, int]]:
    """After how many events of the first connection it breaks, and how many steps pass before the reader is back."""
    most = sum(1 for _ in life.read(0)) * 4 + 8
    for cut in range(most):
        for away in (0, 1, 6):
            yield cut, away


# -- AI SDK ----------------------------------------------------------------------------------------------------------


def shown(chunks: list[dict[str, Any]]) -> str:
    """What a page shows that follows the render rule. It also checks the framing as the SDK does."""
    text, open_ = "", set[str]()
    assert chunks[0]["type"] == "start"
    for chunk in chunks:
        match chunk["type"]:
            case "text-start":
                assert chunk["id"] not in open_
                open_.add(chunk["id"])
            case "text-delta":
                assert chunk["id"] in open_, "a delta of no part"
                text += chunk["delta"]
            case "text-end":
                assert chunk["id"] in open_
                open_.remove(chunk["id"])
            case "data-outlast-restarted" | "reset-step":
                text, open_ = "", set()
            case _:
                pass
    assert chunks[-1]["type"] == "finish"
    assert not open_
    return text


def ai_frames(life: Life, since: int, *, reset: bool, start: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """A connection as the route makes it: chunks with the step after which they came."""
    stream: Any = object.__new__(_ChunkStream)
    stream._chunks = Chunks("m", reset=reset, failure_text=str)
    stream._skip = start
    stream._reader = SimpleNamespace(tail=SimpleNamespace(done=False))
    for frame in parse(stream._open()):
        yield since, frame
    for step, event in life.read(since):
        for frame in parse(stream._encode([event])):
            yield step, frame


def parse(frames: bytes) -> list[dict[str, Any]]:
    return [json.loads(frame[5:]) for frame in frames.split(b"\n\n") if frame]


@everywhere
@pytest.mark.parametrize("reset", [False, True], ids=["data", "reset-step"])
def test_ai_sdk_counting_client(life: Life, reset: bool) -> None:
    """WorkflowChatTransport: comes back with the number of chunks it has."""
    for cut, away in cut_everywhere(life):
        chunks: list[dict[str, Any]] = []
        step = 0
        for n in range(50):
            connection = list(ai_frames(life, step, reset=reset, start=len(chunks)))
            # What was trimmed away makes the answer start over at each return, so one connection has to last.
            kept = connection if "trimmed" in _name(life) and n else connection[: max(1, cut)]
            chunks += [chunk for _, chunk in kept]
            if kept:
                step = min(kept[-1][0] + away, len(life.states) - 1)
            if chunks[-1]["type"] == "finish":
                break
        assert shown(chunks) == life.result, (cut, away)


@everywhere
@pytest.mark.parametrize("reset", [False, True], ids=["data", "reset-step"])
def test_ai_sdk_replaying_client(life: Life, reset: bool) -> None:
    """DefaultChatTransport: comes back for everything, at any time."""
    for since in range(len(life.states)):
        assert shown([chunk for _, chunk in ai_frames(life, since, reset=reset)]) == life.result


def test_ai_sdk_gives_no_entry_more_than_two_chunks() -> None:
    """Or the count at a restart could be above what it is padded to."""
    for life in LIVES.values():
        chunks = Chunks("m", reset=False, failure_text=str)
        list(chunks.open())
        for _, event in life.read(0):
            before = chunks.count
            list(chunks.take(event))
            if event.type in ("chunk", "data", "progress"):
                assert chunks.count - before <= 2


# -- OpenAI ----------------------------------------------------------------------------------------------------------


def openai_events(life: Life, since: int, after: int) -> Iterator[tuple[int, dict[str, Any]]]:
    resource: Any = object.__new__(Resource)
    resource.id, resource.job_id, resource.created_ms = "resp", "job", GEN
    resource._fields, resource._finished = {"id": "resp"}, None
    events = Events(resource, after=after, failure_text=str)
    made = [(since, event) for event in events.open()]
    made += [(step, out) for step, event in life.read(since) for out in events.take(event)]
    return ((step, event) for step, event in made if event["sequence_number"] > after)


class Responses:
    """A consumer of raw events: by item, as they come."""

    def __init__(self) -> None:
        self.last = -1
        self.items: dict[int, tuple[str, str]] = {}
        self.final: dict[str, Any] | None = None
        self.now = -1

    def take(self, event: dict[str, Any]) -> None:
        assert event["sequence_number"] > self.last, "numbers only rise"
        self.last = event["sequence_number"]
        index = event.get("output_index", -1)
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert index not in self.items, "an output index is used once"
                self.items[index] = event["item"]["id"], ""
            case "output_text.delta":
                id, text = self.items[index]
                assert id == event["item_id"]
                self.items[index] = id, text + event["delta"]
            case "output_text.done":
                # A message that was cut short may have lost some of its end before it was closed.
                assert self.items[index][1].endswith(event["text"]) or index != max(self.items)
            case "completed":
                self.final = event["response"]
            case _:
                pass

    @property
    def text(self) -> str:
        return self.items[max(self.items)][1]


ONE_RESTART = {name: life for name, life in LIVES.items() if not name.endswith("and 2")}


@pytest.mark.parametrize("life", ONE_RESTART.values(), ids=ONE_RESTART)
def test_openai_raw_consumer(life: Life) -> None:
    """responses.retrieve(stream=True, starting_after=N)."""
    for cut, away in cut_everywhere(life):
        consumer = Responses()
        step = 0
        for n in range(60):
            connection = list(openai_events(life, step, consumer.last))
            kept = connection if "trimmed" in _name(life) and n else connection[: max(1, cut)]
            for _, event in kept:
                consumer.take(event)
            if kept:
                step = min(kept[-1][0] + away, len(life.states) - 1)
            if consumer.final:
                break
        assert consumer.final is not None
        assert consumer.final["output"][-1]["content"][0]["text"] == life.result
        assert consumer.text == life.result, (cut, away)
        if "trimmed" in _name(life):
            assert all(text in life.result for _, text in consumer.items.values()), "no item has a hole in it"


@everywhere
def test_openai_replaying_consumer(life: Life) -> None:
    """responses.stream(response_id=…, starting_after=N): the SDK asks for everything and filters by itself."""
    for since in range(len(life.states)):
        consumer = Responses()
        for _, event in openai_events(life, since, -1):
            consumer.take(event)
        assert consumer.text == life.result
        assert list(consumer.items) == list(range(len(consumer.items))), "older SDKs take the index for a position"


WHOLE = {name: life for name, life in LIVES.items() if "trimmed" not in name}


@pytest.mark.parametrize("life", WHOLE.values(), ids=WHOLE)
def test_openai_numbers_are_the_same_on_every_connection(life: Life) -> None:
    live = {e["sequence_number"]: e["type"] for _, e in openai_events(life, 0, -1)}
    late = {e["sequence_number"]: e["type"] for _, e in openai_events(life, len(life.states) - 1, -1)}
    for number in live.keys() & late.keys():
        assert live[number] == late[number]
    assert max(live) == max(late)
    assert max(live) < 2**53, "as far as JavaScript counts"


@everywhere
def test_chat_says_the_result_or_breaks_off(life: Life) -> None:
    shape = {"id": "x"}
    deltas = Deltas(shape, usage=False, failure_text=str)
    text, finished = "", False
    for chunk in (c for part in [deltas.open(), *(deltas.take(e) for _, e in life.read(0))] for c in part):
        assert not deltas.over or "error" in chunk
        if "error" not in chunk:
            choice = chunk["choices"][0]
            text += choice["delta"].get("content", "")
            finished = finished or choice["finish_reason"] is not None
    assert finished != deltas.over
    if finished:
        assert text == life.result


def test_chat_goes_on_silently_when_an_attempt_repeats_itself() -> None:
    for n in range(len(TOKENS) + 1):
        for m in range(len(TOKENS) + 1):
            life = Life([TOKENS[:n], TOKENS[:m], [TEXT[:9], TEXT[9:]]], TEXT)
            deltas = Deltas({"id": "x"}, usage=False, failure_text=str)
            out = [c["choices"][0]["delta"].get("content", "") for _, e in life.read(0) for c in deltas.take(e)]
            assert "".join(out) == TEXT


# -- Durable Streams -------------------------------------------------------------------------------------------------


@everywhere
def test_durable_streams_reader(life: Life) -> None:
    offsets: list[str] = []
    for cut, away in cut_everywhere(life):
        offset, text, step, done, seen = "-1", "", 0, False, list[str]()
        for _ in range(60):
            connection = list(life.read(step, None if offset == "-1" else _cursor(offset)))[: max(2, cut)]
            for at, event in connection:
                kind, data = project(event, str)
                text = "" if kind in ("restarted", "gap") else text + (data["text"] if kind == "chunk" else "")
                done = done or kind == "completed"
                offset, step = _offset(event.id), at
                seen.append(offset)
            step = min(step + away, len(life.states) - 1)
            if done:
                break
        assert done
        assert seen == sorted(seen), "offsets sort as text"
        offsets += seen
        # Who comes back with an offset cannot tell a restart that nothing in the stream tells.
        if life.result == TEXT and "result" not in _name(life) and "lost" not in _name(life):
            assert text == life.result, (cut, away)
    assert all("," not in offset and "/" not in offset for offset in offsets)


def _name(life: Life) -> str:
    return next(name for name, each in LIVES.items() if each is life)


def test_an_offset_holds_an_id_of_any_size() -> None:
    queue: Queue[Any, Any] = Queue("q")
    assert queue.name == "q"
    for id in ("0-0", f"{GEN}-17", f"{2**64 - 1}-{2**64 - 1}"):
        assert _cursor(_offset(id)) == id
