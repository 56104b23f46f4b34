"""examples/frameworks: the handlers against a scripted provider on loopback, in the real worker."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from httpx_sse import connect_sse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from outlast import AsyncClient, Chunk, Job, Restarted

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
LEAVE = object()
"""In a stream: nothing more comes until the caller has gone."""
BREAK = object()
"""In a stream: the connection breaks."""


class Provider:
    """Answers each call with the next of its script."""

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.asked: list[Any] = []
        self.left = threading.Semaphore(0)
        routes = [Route(path, self.answer, methods=["POST"]) for path in ("/v1/chat/completions", "/v1/messages")]
        self.app = Starlette(routes=routes)

    async def answer(self, request: Request) -> Response:
        self.asked.append(await request.json())
        answer = self.script.pop(0)
        if isinstance(answer, list):
            return StreamingResponse(self.stream(answer), media_type="text/event-stream")
        status, body, *headers = answer
        return JSONResponse(body, status, dict(*headers))

    async def stream(self, events: list[Any]) -> AsyncIterator[str]:
        try:
            for event in events:
                if event is LEAVE:
                    await asyncio.sleep(60)
                if event is BREAK:
                    raise ConnectionAbortedError
                kind = event.get("type") if isinstance(event, dict) else None
                data = event if isinstance(event, str) else json.dumps(event)
                yield (f"event: {kind}\n" if kind else "") + f"data: {data}\n\n"
        except asyncio.CancelledError:
            self.left.release()
            raise


@pytest.fixture
def provider(serve: Callable[[Any], str], monkeypatch: pytest.MonkeyPatch, valkey_url: str) -> Provider:
    provider = Provider()
    url = serve(provider.app)
    for name, value in {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "the provider's key",
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "the provider's key",
        "ANTHROPIC_MODEL": "a-model",
        "REDIS_URL": valkey_url,
        "API_KEY": "a caller's key",
    }.items():
        monkeypatch.setenv(name, value)
    return provider


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, queue_name: str) -> Iterator[Callable[[str], Any]]:
    """An example as a module of its own, in a namespace of its own."""
    monkeypatch.setenv("OUTLAST_NAMESPACE", queue_name)
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(f"example_{name}_{queue_name}", EXAMPLES / f"{name}.py")
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    yield load
    sys.modules.pop("providers", None)


def delta(text: str | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text, **more}, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}


USED = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
USAGE = {**delta(), "choices": [], "usage": USED}
HELLO = [delta("Hel"), delta("lo"), delta(finish="stop"), USAGE, "[DONE]"]
ASK = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


async def outcome(module: Any, queue: Any, payload: Any, **options: Any) -> Job[Any, Any]:
    async with AsyncClient() as client, module.worker:
        jobs = client.queue(queue)
        job = await jobs.enqueue(payload, **options)
        async for _ in jobs.watch(job.id, timeout=30):
            pass
        found = await jobs.get(job.id)
        assert found
        return found


async def test_an_application_changes_its_address_only(
    provider: Provider, load: Callable[[str], Any], serve: Callable[[Any], str]
) -> None:
    example = load("openai_worker")
    url = serve(example.app)
    async with example.worker, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="a caller's key") as client:
        provider.script = [HELLO, HELLO]
        done = await client.chat.completions.create(**ASK, extra_body={"seed_of_another_vendor": 7})
        assert done.choices[0].message.content == "Hello"
        assert done.usage
        assert done.usage.total_tokens == 5
        assert provider.asked[0]["seed_of_another_vendor"] == 7
        stream = await client.chat.completions.create(**ASK, stream=True, user="another")
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").chat.completions.create(**ASK)


async def test_tool_calls_are_put_together(provider: Provider, load: Callable[[str], Any]) -> None:
    first = {"index": 0, "id": "t", "type": "function", "function": {"name": "look", "arguments": '{"a"'}}
    rest = {"index": 0, "function": {"arguments": ": 1}"}}
    provider.script = [[delta(tool_calls=[first]), delta(tool_calls=[rest]), delta(finish="tool_calls"), "[DONE]"]]
    example = load("openai_worker")
    job = await outcome(example, example.completions, ASK)
    [call] = job.result["choices"][0]["message"]["tool_calls"]
    assert call == {"id": "t", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}


def failure(status: int, kind: str, **headers: str) -> tuple[int, Any, dict[str, str]]:
    return status, {"error": {"message": "about the prompt", "type": kind, "code": None}}, headers


@pytest.mark.parametrize(
    ("answers", "status", "attempt", "starts"),
    [
        ([failure(500, "server_error", **{"retry-after": "0"}), HELLO], "completed", 2, 2),
        ([failure(408, "timeout", **{"retry-after": "0"}), HELLO], "completed", 2, 2),
        ([failure(429, "rate_limit_error", **{"retry-after-ms": "50"}), HELLO], "completed", 1, 2),
        ([failure(429, "insufficient_quota")], "failed", 1, 1),
        ([failure(400, "invalid_request_error")], "failed", 1, 1),
        ([failure(401, "authentication_error")], "failed", 1, 1),
    ],
    ids=["500", "408", "429", "quota", "400", "401"],
)
async def test_what_a_refusal_means(
    provider: Provider, load: Callable[[str], Any], answers: list[Any], status: str, attempt: int, starts: int
) -> None:
    provider.script = list(answers)
    example = load("openai_worker")
    job = await outcome(example, example.completions, ASK)
    assert (job.status, job.attempt, job.starts) == (status, attempt, starts)
    assert len(provider.asked) == len(answers), "the SDK itself repeats nothing"
    assert "about the prompt" not in (job.error or "")


@pytest.mark.parametrize("broken", [[delta("Hel")], [delta("Hel"), BREAK], [delta("Hel"), {"error": {"message": "x"}}]])
async def test_half_a_stream_is_no_answer(provider: Provider, load: Callable[[str], Any], broken: list[Any]) -> None:
    provider.script = [broken, HELLO]
    example = load("openai_worker")
    example.completions.backoff_ms = 0
    async with AsyncClient() as client, example.worker:
        jobs = client.queue(example.completions)
        job = await jobs.enqueue(ASK)
        events = [event async for event in jobs.watch(job.id, timeout=30)]
        assert any(isinstance(event, Restarted) for event in events)
        result = await jobs.wait(job.id)
    assert result["choices"][0]["message"]["content"] == "Hello"


@pytest.mark.parametrize("name", ["openai_worker", "anthropic_worker"])
async def test_a_cancel_closes_the_call(provider: Provider, load: Callable[[str], Any], name: str) -> None:
    example = load(name)
    if name == "openai_worker":
        provider.script, queue, payload = [[delta("Hel"), LEAVE]], example.completions, ASK
    else:
        provider.script, queue = [(200, message("1. Tea")), [*essay("Hel")[:-3], LEAVE]], example.essays
        payload = example.Topic(topic="tea")
    async with AsyncClient() as client, example.worker:
        jobs = client.queue(queue)
        job = await jobs.enqueue(payload)
        async for event in jobs.watch(job.id, timeout=30):
            if isinstance(event, Chunk):
                assert await jobs.cancel(job.id)
        found = await jobs.get(job.id)
        assert found
        assert found.status == "cancelled"
        assert await asyncio.to_thread(provider.left.acquire, timeout=10)
    assert not provider.left.acquire(blocking=False)


def message(text: str, stop: str | None = "end_turn") -> dict[str, Any]:
    return {
        "id": "m", "type": "message", "role": "assistant", "model": "m", "stop_reason": stop, "stop_sequence": None,
        "content": [{"type": "text", "text": text}] if text else [],
        "usage": {"input_tokens": 3, "output_tokens": 2},
    }  # fmt: skip


def essay(*texts: str) -> list[Any]:
    return [
        {"type": "message_start", "message": message("", None)},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": t}} for t in texts),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    ]


OVERLOADED = {"type": "error", "error": {"type": "overloaded_error", "message": "about the prompt"}}


@pytest.mark.parametrize("trouble", [[(529, OVERLOADED, {"retry-after": "0"})], [[*essay("Te")[:3], OVERLOADED]],
                                     [[*essay("Te")[:3], BREAK]], [essay("Te")[:3]], []],
                         ids=["529", "in the stream", "broken", "cut", "none"])  # fmt: skip
async def test_a_step_is_paid_for_once(provider: Provider, load: Callable[[str], Any], trouble: list[Any]) -> None:
    provider.script = [(200, message("1. Tea")), *trouble, essay("Tea ", "is good.")]
    example = load("anthropic_worker")
    example.essays.backoff_ms = 0
    job = await outcome(example, example.essays, example.Topic(topic="tea"))
    assert (job.status, job.result, job.attempt) == ("completed", "Tea is good.", 1 + len(trouble)), job.error
    prompts = [asked["messages"][0]["content"] for asked in provider.asked]
    assert sum(prompt.startswith("Outline") for prompt in prompts) == 1


async def test_anthropics_429_pauses_and_does_not_count(provider: Provider, load: Callable[[str], Any]) -> None:
    limited = {"type": "error", "error": {"type": "rate_limit_error", "message": "x"}}
    provider.script = [(429, limited, {"retry-after-ms": "50"}), (200, message("1. Tea")), essay("Tea.")]
    example = load("anthropic_worker")
    job = await outcome(example, example.essays, example.Topic(topic="tea"))
    assert (job.status, job.attempt, job.starts) == ("completed", 1, 2)


async def test_fastapi(provider: Provider, load: Callable[[str], Any], serve: Callable[[Any], str]) -> None:
    from outlast_worker import JobContext, Worker

    example = load("fastapi_app")
    worker = Worker()

    @worker.handles(example.stories)
    async def write(job: JobContext[Any]) -> Any:
        await job.emit("Once ")
        return example.Story(title=job.payload.prompt, text="Once upon a time.")

    ann = {"x-user": "ann", "idempotency-key": "k"}
    url = serve(example.app)

    def talk() -> None:
        with httpx.Client(base_url=url, headers=ann, timeout=20) as http:
            made = http.post("/stories", json={"prompt": "Rain"})
            assert made.status_code == 202
            assert http.post("/stories", json={"prompt": "Rain"}).json() == made.json()
            assert http.post("/stories", json={"prompt": "Sun"}).status_code == 422
            assert http.post("/stories", json={"prompt": ""}).status_code == 422, "the model is checked by FastAPI"
            story = f"/stories/{made.json()['id']}"
            assert http.get(story).json() == {"title": "Rain", "text": "Once upon a time."}
            assert http.get(story, headers={"x-user": "bob"}).status_code == 404
            with connect_sse(http, "GET", made.json()["events_url"]) as source:
                events = [event.event for event in source.iter_sse()]
            assert events == ["state", "chunk", "completed"]
            assert "/stories/{id}" in http.get("/openapi.json").json()["paths"]
        assert httpx.post(f"{url}/stories", json={"prompt": "x"}).status_code == 401

    async with worker:
        await asyncio.to_thread(talk)
