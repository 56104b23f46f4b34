"""Chat endpoints that speak OpenAI's protocol: how to call one, and what goes wrong."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

import httpx

from outlast.errors import OutlastError, RetryJobError
from outlast.rest import _retry_after

from .provider import meaning

__all__ = ["completion"]

PAUSE = 10.0
"""Seconds for which a 429 without Retry-After pauses the queue."""


async def completion(
    base_url: str, key: str | None, body: dict[str, Any], patience: float
) -> AsyncGenerator[dict[str, Any]]:
    """The parts of one streamed chat completion. Closing the generator closes the connection, and so the bill.

    `patience`: seconds of silence. Whatever goes wrong becomes the error that it means for the job.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    # A connection of its own for each call: nothing is shared that a cancel could leave in the middle of a reply.
    limits = httpx.Timeout(patience, connect=10)
    finished = False
    try:
        async with (
            httpx.AsyncClient(timeout=limits, headers=headers) as http,
            http.stream("POST", f"{base_url.rstrip('/')}/chat/completions", json=body) as response,
        ):
            if response.status_code != 200:
                await response.aread()
                raise _refused(response)
            async with aclosing(_events(response)) as events:
                async for data in events:
                    if data == b"[DONE]":
                        break
                    part: dict[str, Any] = json.loads(data)
                    if part.get("error"):
                        raise RetryJobError("the provider broke the answer off with an error")
                    choices: list[dict[str, Any]] = part.get("choices") or []
                    finished = finished or any(choice.get("finish_reason") is not None for choice in choices)
                    yield part
    except httpx.TimeoutException as error:
        raise RetryJobError(f"the provider did not answer in time ({type(error).__name__})") from error
    except httpx.TransportError as error:
        raise RetryJobError(f"the connection to the provider broke ({type(error).__name__})") from error
    except (ValueError, AttributeError, TypeError) as error:
        raise RetryJobError("the provider sent something that is no chat completion") from error
    if not finished:
        raise RetryJobError("the provider's stream ended before the answer did")


async def _events(response: httpx.Response) -> AsyncGenerator[bytes]:
    """The data of each server-sent event; of an endpoint that does not stream, its whole answer.

    Lines end at \\n only: JSON may hold the other ends that Python knows.
    """
    if "json" in response.headers.get("content-type", ""):
        yield await response.aread()
        return
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _refused(response: httpx.Response) -> OutlastError:
    """What a refusal means for the job. The provider's own text is not repeated: it may quote a key or the prompt."""
    status, code = response.status_code, ""
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        problem = response.json()["error"]
        code = str(problem.get("code") or problem.get("type") or "")[:60]
    said = f"the provider answered {status}" + (f" ({code})" if code else "")
    return meaning(status, said, wait=_retry_after(response), pause=PAUSE)
