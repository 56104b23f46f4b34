"""Calls through a caller's own `upstash_redis` client, for apps that have one already.

The client's formatting is undone, its one kind of error sorted. What it does by itself stays: it has no time-out, and
with its default ``rest_retries=1`` it sends any call again 3 s after any failure, so give it ``rest_retries=0``.
Every call of this library can be repeated, so a resend costs time but changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import iscoroutinefunction
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ._checks import is_dict
from .errors import ConfigurationError, OutlastError, TransportError
from .protocol import Call
from .rest import TOTAL, backoff
from .transport import TRANSIENT, server_error

if TYPE_CHECKING:
    from upstash_redis import Redis
    from upstash_redis.asyncio import Redis as AsyncRedis

__all__ = ["AsyncUpstashTransport", "UpstashTransport"]

T = TypeVar("T")


class _Attempt:
    """A call, or a pipeline of reads, until it is answered or refused for good."""

    def __init__(self, *calls: Call[Any]) -> None:
        self._calls = calls
        self._source = False
        self._repeats = 0
        self._deadline = monotonic() + TOTAL

    def commands(self) -> list[list[str]]:
        return [list(call.command(source=self._source)) for call in self._calls]

    def failed(self, cause: Exception) -> float:
        """The seconds until the next try. Raises what the failure stands for."""
        if type(cause).__name__ != "UpstashError":
            # httpx errors, a body that is not JSON, a reply without result: the client lets each through as it is.
            raise TransportError(
                f"upstash_redis failed: {type(cause).__name__}; whether the call took effect is unknown"
            ) from cause
        error = server_error(str(cause)[:300])
        if error.code == "NOSCRIPT" and self._calls[0].script and not self._source:
            self._source = True
            return 0.0
        pause = backoff(self._repeats)
        if error.code not in TRANSIENT or monotonic() + pause >= self._deadline:
            raise error from cause
        self._repeats += 1
        return pause

    def answered(self, *replies: Any) -> list[Any]:
        return [call.decode(_raw(reply)) for call, reply in zip(self._calls, replies, strict=True)]


class UpstashTransport:
    """Calls through an `upstash_redis.Redis`. Closing it stays the caller's business."""

    blocking = False
    sync_token = None

    def __init__(self, redis: Redis) -> None:
        self._redis: Any = _of_kind(redis, waits=False)

    def send(self, call: Call[T], *, block: float | None = None) -> T:
        """Send one call. HTTP cannot wait on the server, so `block` means nothing here."""
        attempt = _Attempt(call)
        while True:
            try:
                reply = self._redis.execute(attempt.commands()[0])
            except Exception as error:
                pause = attempt.failed(error)
            else:
                return cast("T", attempt.answered(reply)[0])
            sleep(pause)

    def send_many(self, calls: Sequence[Call[Any]], *, outcomes: bool = False) -> list[Any]:
        """Send independent calls: reads in one request, scripts one by one.

        This client's pipelines throw every answer away when one is refused, which only reads can bear.
        """
        if any(call.script for call in calls):
            answers: list[Any] = []
            for call in calls:
                try:
                    answers.append(self.send(call))
                except OutlastError as error:
                    if not outcomes or isinstance(error, TransportError):
                        raise
                    answers.append(error)
            return answers
        attempt = _Attempt(*calls)
        while True:
            pipeline = self._redis.pipeline()
            for command in attempt.commands():
                pipeline.execute(command)
            try:
                replies = pipeline.exec()
            except Exception as error:
                pause = attempt.failed(error)
            else:
                return attempt.answered(*replies)
            sleep(pause)

    def close(self) -> None:
        """Nothing: the client is the caller's."""


class AsyncUpstashTransport:
    """Calls through an `upstash_redis.asyncio.Redis`, which belongs to one event loop."""

    blocking = False
    sync_token = None

    def __init__(self, redis: AsyncRedis) -> None:
        self._redis: Any = _of_kind(redis, waits=True)

    async def send(self, call: Call[T], *, block: float | None = None) -> T:
        """Send one call. HTTP cannot wait on the server, so `block` means nothing here."""
        from asyncio import sleep  # imported late: it loads ssl, which a plain client has no use for

        attempt = _Attempt(call)
        while True:
            try:
                reply = await self._redis.execute(attempt.commands()[0])
            except Exception as error:
                pause = attempt.failed(error)
            else:
                return cast("T", attempt.answered(reply)[0])
            await sleep(pause)

    async def send_many(self, calls: Sequence[Call[Any]], *, outcomes: bool = False) -> list[Any]:
        """Send independent calls: reads in one request, scripts one by one.

        This client's pipelines throw every answer away when one is refused, which only reads can bear.
        """
        if any(call.script for call in calls):
            answers: list[Any] = []
            for call in calls:
                try:
                    answers.append(await self.send(call))
                except OutlastError as error:
                    if not outcomes or isinstance(error, TransportError):
                        raise
                    answers.append(error)
            return answers
        from asyncio import sleep

        attempt = _Attempt(*calls)
        while True:
            pipeline = self._redis.pipeline()
            for command in attempt.commands():
                pipeline.execute(command)
            try:
                replies = await pipeline.exec()
            except Exception as error:
                pause = attempt.failed(error)
            else:
                return attempt.answered(*replies)
            await sleep(pause)

    async def aclose(self) -> None:
        """Nothing: the client is the caller's."""


def _raw(reply: Any) -> Any:
    """A formatted reply in the flat shape of RESP2, which is what Calls read."""
    if is_dict(reply):
        return [part for pair in reply.items() for part in pair]
    return reply


def _of_kind(redis: Any, *, waits: bool) -> Any:
    """The two classes share their name, and the wrong one would fail only when a reply is read."""
    if iscoroutinefunction(redis.execute) is not waits:
        kind, use = ("plain", "Client") if waits else ("async", "AsyncClient")
        raise ConfigurationError(f"upstash is the {kind} upstash_redis client; use it with {use}")
    return redis
