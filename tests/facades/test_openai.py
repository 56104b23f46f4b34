"""The official OpenAI SDK, unmodified, against jobs of our own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx2
import openai
import openresponses_types as schema
import pytest
from openai import OpenAI
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException

from outlast import Queue
from outlast_edge import Edge
from outlast_edge.facades.openai_chat import OpenAIChat
from outlast_edge.facades.openai_responses import OpenAIResponses

from .conftest import Hand, Site

TOKENS = ["Hel", "lo ", "wor", "ld"]
TEXT = "Hello world"

EVENTS: TypeAdapter[Any] = TypeAdapter(
    schema.ResponseCreatedStreamingEvent
    | schema.ResponseQueuedStreamingEvent
    | schema.ResponseInProgressStreamingEvent
    | schema.ResponseCompletedStreamingEvent
    | schema.ResponseFailedStreamingEvent
    | schema.ResponseIncompleteStreamingEvent
    | schema.ResponseOutputItemAddedStreamingEvent
    | schema.ResponseOutputItemDoneStreamingEvent
    | schema.ResponseContentPartAddedStreamingEvent
    | schema.ResponseContentPartDoneStreamingEvent
    | schema.ResponseOutputTextDeltaStreamingEvent
    | schema.ResponseOutputTextDoneStreamingEvent
    | schema.ResponseFunctionCallArgumentsDeltaStreamingEvent
    | schema.ResponseFunctionCallArgumentsDoneStreamingEvent
)


class Steps:
    """The worker's moves, each made when the reader has got an event; a start that shows nothing yet, with the next."""

    def __init__(self, site: Site, *moves: Callable[[], object]) -> None:
        self.moves = iter(moves)
        site.cuts.on_event = self.go

    def go(self) -> None:
        for move in self.moves:
            move()
            if getattr(move, "__name__", "") not in ("take", "again"):
                break


def until(condition: Callable[[], object]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come to be")


def once_asked(hand: Hand, *moves: Callable[[], object]) -> None:
    """Make the moves once a job is there."""

    def run() -> None:
        until(hand.jobs)
        for move in moves:
            move()

    threading.Thread(target=run).start()


def says(hand: Hand, tokens: list[str], result: Any = TEXT) -> list[Callable[[], object]]:
    return [*(lambda token=token: hand.say(token) for token in tokens), lambda: hand.end(result)]


@pytest.fixture
def site_(site: Callable[..., Site]) -> Site:
    return site(OpenAIResponses)


@pytest.fixture
def ai(site_: Site) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{site_.url}/v1", api_key="k", max_retries=0, timeout=20) as client:
        yield client


def ask(ai: OpenAI, **more: Any) -> Any:
    return ai.responses.create(model="any", input="Hi", background=True, **more)


# -- Responses -------------------------------------------------------------------------------------------------------


def test_background_is_polled_to_its_end(ai: OpenAI, hand: Hand) -> None:
    made = ask(ai)
    assert (made.status, made.output_text, made.model, made.background) == ("queued", "", "any", True)
    hand.take()
    assert ai.responses.retrieve(made.id).status == "in_progress"
    hand.say(*TOKENS)
    hand.end(TEXT)
    done = ai.responses.retrieve(made.id)
    assert (done.status, done.output_text) == ("completed", TEXT)
    assert done.completed_at is not None
    assert done.completed_at >= done.created_at


def test_every_response_and_event_is_as_the_open_responses_schema_has_it(ai: OpenAI, site_: Site, hand: Hand) -> None:
    Steps(site_, hand.take, *says(hand, TOKENS))
    with ai.responses.with_raw_response.create(model="any", input="Hi", stream=True).parse() as stream:
        events = [event.to_dict() for event in stream]
    for event in events:
        EVENTS.validate_python(event)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "created", "queued", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * 4,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    raw = site_.http.get(f"/v1/responses/{events[0]['response']['id']}").json()
    schema.ResponseResource.model_validate(raw)
    last: Any = events[-1]["response"]
    assert {**last, "output": raw["output"], "completed_at": raw["completed_at"]} == raw


@pytest.mark.parametrize("restart", [None, 0, 1, 3, 4])
def test_cut_after_every_event_and_resumed_by_the_sdk(ai: OpenAI, site_: Site, hand: Hand, restart: int | None) -> None:
    before = [] if restart is None else [*says(hand, TOKENS[:restart])[:-1], hand.again]
    Steps(site_, hand.take, *before, *says(hand, TOKENS))
    site_.cuts.streams = [1] * 40
    stream = ask(ai, stream=True)
    items: dict[str, str] = {}
    id, last, events, final = "", -1, 0, None
    while final is None:
        try:
            for event in stream:
                events += 1
                assert event.sequence_number > last
                last = event.sequence_number
                if event.type == "response.created":
                    id = event.response.id
                elif event.type == "response.output_item.added":
                    items[event.item.id] = ""
                elif event.type == "response.output_text.delta":
                    items[event.item_id] += event.delta
                elif event.type == "response.completed":
                    final = event.response
        except (openai.APIConnectionError, httpx2.RemoteProtocolError):
            pass
        if final is None:
            stream = ai.responses.retrieve(id, stream=True, starting_after=last)
    assert final.output_text == TEXT
    assert list(items.values())[-1] == TEXT
    assert len(site_.cuts.requests) >= events - 2


@pytest.mark.parametrize("restart", [None, 2])
def test_the_sdks_own_accumulator_resumes(ai: OpenAI, site_: Site, hand: Hand, restart: int | None) -> None:
    made = ask(ai)
    hand.take()
    if restart is not None:
        hand.say(*TOKENS[:restart])
        hand.again()
    hand.say(*TOKENS)
    hand.end(TEXT)
    with ai.responses.stream(response_id=made.id) as stream:
        numbers = [event.sequence_number for event in stream]
        assert stream.get_final_response().output_text == TEXT
    for number in numbers[:-1]:
        with ai.responses.stream(response_id=made.id, starting_after=number) as stream:
            first = next(iter(stream))
            assert first.sequence_number == numbers[numbers.index(number) + 1]
            assert stream.get_final_response().output_text == TEXT


def test_a_live_accumulator_sees_a_restart(ai: OpenAI, site_: Site, hand: Hand) -> None:
    Steps(site_, hand.take, lambda: hand.say("wrong"), hand.again, *says(hand, TOKENS))
    with ai.responses.stream(model="any", input="Hi", background=True) as stream:
        for event in stream:
            if event.type == "response.output_item.done" and event.item.status == "incomplete":
                assert event.output_index == 0
        final = stream.get_final_response()
    assert final.output_text == TEXT
    assert len(final.output) == 1


def test_cancel(ai: OpenAI, site_: Site, hand: Hand) -> None:
    waiting = ask(ai)
    for _ in range(2):
        assert ai.responses.cancel(waiting.id).status == "cancelled"
    running = ask(ai)
    hand.take()
    assert ai.responses.cancel(running.id).status == "cancelled", (
        "it will give no result, though its worker may not know"
    )
    Steps(site_, lambda: hand.end("", "cancelled"))
    events = list(ai.responses.retrieve(running.id, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.status == "cancelled"
    assert ai.responses.retrieve(running.id).status == "cancelled"


def test_a_failure(ai: OpenAI, hand: Hand) -> None:
    made = ask(ai)
    hand.take()
    hand.say("par")
    hand.end("KeyError: secret-host", "failed")
    done = ai.responses.retrieve(made.id)
    assert done.status == "failed"
    assert done.error is not None
    assert (done.error.code, done.error.message) == ("server_error", "The job failed.")
    events = list(ai.responses.retrieve(made.id, stream=True))
    assert events[-1].type == "response.failed"
    assert "secret" not in repr(events)


def test_without_background_the_answer_is_waited_for(ai: OpenAI, hand: Hand) -> None:
    once_asked(hand, hand.take, lambda: hand.end(TEXT))
    assert ai.responses.create(model="any", input="Hi").output_text == TEXT


def test_function_calls_and_usage_come_from_the_result(ai: OpenAI, hand: Hand) -> None:
    call = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "look", "arguments": '{"x":1}',
            "status": "completed"}  # fmt: skip
    said = {"type": "message", "id": "m", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "Look: ", "annotations": []}]}  # fmt: skip
    usage = {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7,
             "input_tokens_details": {"cached_tokens": 0},
             "output_tokens_details": {"reasoning_tokens": 0}}  # fmt: skip
    made = ask(ai)
    hand.take()
    hand.say("Look")
    hand.end({"output": [said, call], "usage": usage})
    done = ai.responses.retrieve(made.id)
    assert done.output_text == "Look: "
    with ai.responses.stream(response_id=made.id) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == [item.type for item in done.output] == ["message", "function_call"]
    assert final.output_text == "Look: "
    assert final.usage == done.usage
    assert done.usage is not None
    assert done.usage.total_tokens == 7
    [arguments] = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert arguments == '{"x":1}'
    assert [e.item.type for e in events if e.type == "response.output_item.done"] == ["message", "function_call"]


def test_errors_are_those_that_the_sdk_knows(
    site: Callable[..., Site], hand: Hand, queue_name: str, request: pytest.FixtureRequest
) -> None:
    def who(request: Any, action: str, job: Any) -> str | None:
        key = request.headers["authorization"].removeprefix("Bearer ")
        if key == "slow-down":
            raise HTTPException(429, "Not so fast.", headers={"Retry-After": "7"})
        return None if key == "nobody" else key

    served = site(
        OpenAIResponses,
        authorize=who,
        queues=[Queue(queue_name, payload=dict), Queue(f"{queue_name}-int", payload=int)],
    )

    opened = ExitStack()
    request.addfinalizer(opened.close)

    def client(key: str) -> OpenAI:
        return opened.enter_context(OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0))

    ann = client("ann")
    with pytest.raises(openai.NotFoundError, match="no such model"):
        ann.responses.create(model="other", input="Hi")
    with pytest.raises(openai.UnprocessableEntityError, match="payload"):
        ann.responses.create(model=f"{queue_name}-int", input="Hi")
    made = ann.responses.create(model=queue_name, input="Hi", background=True)
    assert ann.responses.retrieve(made.id).id == made.id
    for other in ("bob", "nobody"):
        for call in (client(other).responses.retrieve, client(other).responses.cancel):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
    for id in ("resp_x", f"resp_{queue_name}_unknown", "x"):
        with pytest.raises(openai.NotFoundError) as caught:
            ann.responses.retrieve(id)
        assert caught.value.code == "not_found"
    with pytest.raises(openai.AuthenticationError):
        client("nobody").responses.create(model=queue_name, input="Hi")
    with pytest.raises(openai.RateLimitError) as limited:
        client("slow-down").responses.create(model=queue_name, input="Hi")
    assert limited.value.response.headers["retry-after"] == "7"
    with pytest.raises(openai.BadRequestError):
        ann.responses.retrieve(made.id, stream=True, starting_after="x")  # type: ignore[call-overload]
    assert hand.jobs() == 1


# -- repeats ---------------------------------------------------------------------------------------------------------


def test_the_sdks_own_repeat_finds_the_job_of_the_first_request(site_: Site, hand: Hand) -> None:
    with OpenAI(base_url=f"{site_.url}/v1", api_key="k", max_retries=2) as ai:
        site_.cuts.answers = 2
        ask(ai)
        assert len(site_.cuts.requests) == 3
        assert hand.jobs() == 1
        ask(ai)
        assert hand.jobs() == 2, "the same question asked again is meant"


def test_a_first_request_that_never_arrived_is_made_by_its_repeat(site_: Site, hand: Hand) -> None:
    headers = {"x-stainless-retry-count": "1"}
    with OpenAI(base_url=f"{site_.url}/v1", api_key="k") as ai:
        first = ask(ai, extra_headers=headers)
        assert ask(ai, extra_headers=headers).id == first.id
    assert hand.jobs() == 1


def test_an_idempotency_key(ai: OpenAI, hand: Hand) -> None:
    key = {"Idempotency-Key": "k1"}
    first = ask(ai, extra_headers=key)
    assert ask(ai, extra_headers=key).id == first.id
    assert ask(ai).id != first.id
    with pytest.raises(openai.UnprocessableEntityError, match="another request"):
        ask(ai, extra_headers=key, metadata={"x": "y"})
    assert hand.jobs() == 2


def test_an_answer_that_takes_longer_than_a_request_may_is_asked_for_again(
    site: Callable[..., Site], hand: Hand
) -> None:
    served = site(OpenAIResponses, max_stream=0.3)

    def end() -> None:
        until(lambda: len(served.cuts.requests) > 1)
        hand.end(TEXT)

    once_asked(hand, hand.take, end)
    with OpenAI(base_url=f"{served.url}/v1", api_key="k", max_retries=20) as ai:
        assert ai.responses.create(model="any", input="Hi").output_text == TEXT
    assert hand.requests == 1
    assert hand.jobs() == 0


# -- Chat Completions ------------------------------------------------------------------------------------------------


@pytest.fixture
def chat_site(site: Callable[..., Site]) -> Site:
    return site(OpenAIChat)


@pytest.fixture
def chat(chat_site: Site) -> Iterator[Callable[..., Any]]:
    with OpenAI(base_url=f"{chat_site.url}/v1", api_key="k", max_retries=0) as ai:

        def create(**more: Any) -> Any:
            return ai.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hi"}], **more)

        yield create


def test_chat_plain(chat: Callable[..., Any], hand: Hand) -> None:
    once_asked(hand, hand.take, lambda: hand.say("x"), hand.again, lambda: hand.end(TEXT))
    done = chat()
    assert done.choices[0].message.content == TEXT
    assert done.choices[0].finish_reason == "stop"


def test_chat_streamed(chat: Callable[..., Any], chat_site: Site, hand: Hand) -> None:
    Steps(chat_site, hand.take, *says(hand, TOKENS))
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_tool_calls_and_usage_come_from_the_result(chat: Callable[..., Any], hand: Hand) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    result = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}], "usage": usage}
    once_asked(hand, hand.take, lambda: hand.end(result))
    plain = chat()
    assert plain.choices[0].message.tool_calls[0].function.name == "look"
    assert plain.usage.total_tokens == 3
    once_asked(hand, hand.take, lambda: hand.end(result))
    chunks = list(chat(stream=True, stream_options={"include_usage": True}, user="u"))
    [calls] = [c.choices[0].delta.tool_calls for c in chunks if c.choices and c.choices[0].delta.tool_calls]
    assert calls[0].function.name == "look"
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage.total_tokens == 3


@pytest.mark.parametrize("said", range(len(TOKENS) + 1))
def test_chat_survives_a_restart_that_says_the_same(
    chat: Callable[..., Any], chat_site: Site, hand: Hand, said: int
) -> None:
    Steps(chat_site, hand.take, *says(hand, TOKENS[:said])[:-1])
    stream = iter(chat(stream=True))
    text = "".join(next(stream).choices[0].delta.content or "" for _ in range(said + 1))
    until(lambda: hasattr(hand, "job") and hand.n == said)
    hand.again()
    hand.say(TEXT[:5], TEXT[5:])
    hand.end(TEXT)
    text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == TEXT


def test_chat_breaks_off_when_a_restart_says_something_else(
    chat: Callable[..., Any], chat_site: Site, hand: Hand
) -> None:
    Steps(chat_site, hand.take, lambda: hand.say("wrong"), hand.again, *says(hand, TOKENS))
    with pytest.raises(openai.APIError, match="started over"):
        list(chat(stream=True))


@pytest.mark.parametrize("stream", [False, True])
def test_chat_failure_and_cancel(chat: Callable[..., Any], hand: Hand, stream: bool) -> None:
    for status in ("failed", "cancelled"):
        once_asked(hand, hand.take, lambda status=status: hand.end("x", status))
        with pytest.raises(openai.APIError, match=r"failed|cancelled"):
            list(chat(stream=stream))


def test_a_model_names_a_queue(site: Callable[..., Site], queue_name: str, valkey_url: str, hand: Hand) -> None:
    small, large = Queue(queue_name), Queue(f"{queue_name}_large")
    served = site(lambda edge: OpenAIResponses(edge, default=small), queues=[small, large])
    with OpenAI(base_url=f"{served.url}/v1", api_key="k") as ai:
        made = [ai.responses.create(model=m, input="Hi", background=True) for m in (f"{queue_name}_large", "gpt-x")]
        assert made[0].id.startswith(f"resp_{queue_name}_large_")
        assert made[1].id.startswith(f"resp_{queue_name}_")
        assert [ai.responses.retrieve(each.id).id for each in made] == [each.id for each in made]
    assert hand.jobs() == 1


def test_both_facades_stand_side_by_side(site: Callable[..., Site], hand: Hand) -> None:
    from starlette.applications import Starlette

    def both(edge: Edge) -> Any:
        class Made:
            def app(self) -> Starlette:
                return Starlette(routes=[*OpenAIResponses(edge).routes, *OpenAIChat(edge).routes])

        return Made()

    served = site(both)
    once_asked(hand, hand.take, lambda: hand.end(TEXT))
    with OpenAI(base_url=f"{served.url}/v1", api_key="k") as ai:
        done = ai.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
        assert done.choices[0].message.content == TEXT
        assert ask(ai).status == "queued"
