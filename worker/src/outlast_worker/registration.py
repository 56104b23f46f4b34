"""A handler and its queue, and what `@worker.handles(queue)` accepts."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload

from outlast._checks import Duration, to_ms
from outlast.errors import InvalidArgumentError
from outlast.protocol import Keys
from outlast.queue import Queue

from .context import JobContext, SyncJobContext

__all__ = ["PROMPT", "THRIFTY", "Handles", "Pace", "Registration", "check_heartbeat"]

P = TypeVar("P")
R = TypeVar("R")

AsyncHandler = Callable[[JobContext[P]], Awaitable[R]]
PlainHandler = Callable[[SyncJobContext[P]], R]


@dataclass(frozen=True)
class Pace:
    """What a worker does again and again, in seconds: promptness against billed commands. A worker's own options win.

    `economy` shows streamed text up to 0.3 s late instead of 0.05 s, finds a job whose doorbell was lost after 45 s
    instead of 30 s, and hears of a cancel by another implementation's client after 20 s instead of 15 s (by ours at
    once, as ever). It loses nothing and recovers no later from a crash.
    """

    emit_interval: float
    block: float
    """The longest wait for a doorbell."""
    share: float
    """Of the lease, which a wait may last at most: each lease has to be looked at once before it runs out for good."""
    beat: float
    """Between renewals of a long lease: how late a cancel by a foreign client is noticed, at worst."""
    beats: int
    """Renewals within a lease."""
    seen: float
    """Between signs of life in the list of workers, which calls a worker dead after 150 s."""


PROMPT = Pace(emit_interval=0.05, block=30.0, share=0.5, beat=15.0, beats=4, seen=60.0)
THRIFTY = Pace(emit_interval=0.3, block=60.0, share=0.75, beat=30.0, beats=3, seen=120.0)


class Handles(Protocol[P, R]):
    """The decorator: a coroutine function of a `JobContext`, or a plain function of a `SyncJobContext`."""

    @overload
    def __call__(self, handler: AsyncHandler[P, R], /) -> AsyncHandler[P, R]: ...
    @overload
    def __call__(self, handler: PlainHandler[P, R], /) -> PlainHandler[P, R]: ...


class Registration:
    """One queue of a worker."""

    def __init__(
        self,
        queue: Queue[Any, Any],
        handler: Callable[[Any], Any],
        *,
        concurrency: int | None,
        lease: Duration | None,
        heartbeat: Duration | None,
    ) -> None:
        self.queue = queue
        self.handler = handler
        self.is_async = _is_async(handler)
        self.concurrency = concurrency
        self.slots = concurrency or 1
        self.lease_ms = queue.lease_ms if lease is None else to_ms(lease, "lease", least=0.1, most=86_400)
        self._heartbeat = (
            None
            if heartbeat is None
            else check_heartbeat(heartbeat, self.lease_ms, f"the lease of queue {queue.name!r}")
        )

    def beat(self, lease_ms: int, pace: Pace) -> float:
        """Seconds between renewals of a lease: its own, or that of a rule of the queue."""
        if self._heartbeat is not None and self._heartbeat * 2000 <= lease_ms:
            return self._heartbeat
        return min(lease_ms / 1000 / pace.beats, pace.beat)

    def keys(self, prefix: str) -> Keys:
        return Keys(prefix + self.queue.name)


def check_heartbeat(heartbeat: Duration, lease_ms: int, what: str) -> float:
    """Seconds. Refuses what could lose a healthy job."""
    beat_ms = to_ms(heartbeat, "heartbeat", least=0.01)
    if beat_ms * 2 > lease_ms:
        raise InvalidArgumentError(
            f"heartbeat={heartbeat!r} is more than half of {what} ({lease_ms / 1000:g} s): one late renewal would lose "
            "the job; give a quarter or less"
        )
    return beat_ms / 1000


def _is_async(handler: object) -> bool:
    """Whether it is a coroutine function. Raises InvalidArgumentError for what cannot be a handler."""
    if not callable(handler) or isinstance(handler, type):
        raise InvalidArgumentError(f"a handler is a function, not {handler!r}")
    call: Any = handler if inspect.isroutine(handler) or hasattr(handler, "func") else type(handler).__call__
    name = getattr(handler, "__qualname__", repr(handler))
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise InvalidArgumentError(
            f"handler {name} is a generator; emit(...) what it would yield, and return the result"
        )
    is_async = inspect.iscoroutinefunction(call)
    try:
        parameters = list(inspect.signature(handler).parameters.values())
    except (TypeError, ValueError):
        return is_async
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    if not positional or len(required) > 1:
        raise InvalidArgumentError(f"handler {name} must take one argument, the job; it takes {len(required)}")
    annotation = positional[0].annotation
    wanted = annotation if isinstance(annotation, str) else repr(annotation)
    if is_async and "SyncJobContext" in wanted:
        raise InvalidArgumentError(f"handler {name} is async, so its job is a JobContext, not a SyncJobContext")
    if not is_async and "JobContext" in wanted and "SyncJobContext" not in wanted:
        raise InvalidArgumentError(
            f"handler {name} is a plain function, so its job is a SyncJobContext; or make it async def"
        )
    return is_async
