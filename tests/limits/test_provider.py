"""What a provider's answer means: 408, 5xx and time-outs are tried again, 429 pauses, other 4xx end the job."""

from __future__ import annotations

import io
import urllib.error
from datetime import UTC, datetime, timedelta
from email.message import Message
from email.utils import format_datetime
from typing import Any

import httpx
import pytest

from outlast import AsyncClient, Queue, RateLimitedError, RetryJobError, TerminalJobError
from outlast_worker import JobContext, Worker, provider_error


def of_httpx(status: int, headers: dict[str, str] | None = None, text: str = "") -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://api.example/v1")
    response = httpx.Response(status, headers=headers, text=text, request=request)
    return httpx.HTTPStatusError(f"{status} {text}", request=request, response=response)


class OfSdk(Exception):
    """As the SDKs of OpenAI, Anthropic (status_code), aiohttp (status) and Google (code) have it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__("refused")
        self.__dict__.update(attributes)


def of_urllib(status: int, after: str) -> urllib.error.HTTPError:
    headers = Message()
    headers["Retry-After"] = after
    return urllib.error.HTTPError("https://api.example", status, "no", headers, io.BytesIO())


@pytest.mark.parametrize("status", [408, 500, 502, 503, 504, 529])
def test_408_and_5xx_are_tried_again(status: int) -> None:
    for error in (of_httpx(status), OfSdk(status_code=status), OfSdk(status=status), OfSdk(code=status)):
        answer = provider_error(error)
        assert type(answer) is RetryJobError
        assert answer.retry_after is None
    assert provider_error(of_httpx(status, {"Retry-After": "7"})).retry_after == 7  # type: ignore[union-attr]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422])
def test_other_4xx_end_the_job(status: int) -> None:
    for error in (of_httpx(status), OfSdk(status_code=status), OfSdk(code=status, headers={})):
        assert type(provider_error(error)) is TerminalJobError


@pytest.mark.parametrize(
    "error",
    [TimeoutError(), ConnectionResetError(), httpx.ReadTimeout(""), httpx.ConnectError("x"), OfSdk(code="timeout")],
)
def test_what_has_no_status_is_tried_again(error: BaseException) -> None:
    assert type(provider_error(error)) is RetryJobError


def test_429_pauses_for_as_long_as_it_says() -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    for headers, seconds in (
        ({"retry-after": "12"}, 12),
        ({"Retry-After": "1.5"}, 1.5),
        ({"retry-after-ms": "250", "retry-after": "1"}, 0.25),
        ({"Retry-After": soon}, 90),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 1),  # no attempt is used: no pause would be a loop
        ({"retry-after": "0"}, 1),
        ({"Retry-After": "soon"}, 30),
        ({"Retry-After": "-1"}, 30),
        ({}, 30),
    ):
        for error in (of_httpx(429, headers), OfSdk(status_code=429, response=of_httpx(429, headers).response)):
            answer = provider_error(error)
            assert isinstance(answer, RateLimitedError)
            assert answer.retry_after == pytest.approx(seconds, abs=2 if headers.get("Retry-After") == soon else 0)
    assert provider_error(of_urllib(429, "3")).retry_after == 3  # type: ignore[union-attr]
    assert provider_error(OfSdk(status=429), pause=5).retry_after == 5  # type: ignore[union-attr]
    assert type(provider_error(of_httpx(429, text="insufficient_quota"))) is TerminalJobError


async def test_a_429_costs_a_start_and_a_400_one_attempt(
    valkey_url: str, queue: Queue[Any, Any], aclient: AsyncClient
) -> None:
    worker = Worker(valkey_url)

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> str:
        try:
            if job.starts == 1:
                raise of_httpx(job.payload, {"Retry-After": "0.2"}, "why not")
        except httpx.HTTPError as error:
            raise provider_error(error) from error
        return "done"

    jobs = aclient.queue(queue)
    async with worker:
        for status, attempt, starts, ended in (
            (429, 1, 2, "completed"),
            (503, 2, 2, "completed"),
            (400, 1, 1, "failed"),
        ):
            job = await jobs.enqueue(status)
            async for _ in jobs.watch(job.id, timeout=10):
                pass
            record = await jobs.get(job.id)
            assert record is not None
            assert (record.status, record.attempt, record.starts) == (ended, attempt, starts)
            assert record.error is not None
            assert f"HTTPStatusError: {status} why not" in record.error
