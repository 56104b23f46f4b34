"""How telemetry hears of jobs. Nothing here imports any: see `outlast.telemetry` and `outlast_worker.metrics`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, TypeVarTuple, Unpack

if TYPE_CHECKING:
    from .records import Enqueued

__all__ = [
    "Attempt",
    "Enqueuing",
    "Observer",
    "Outcome",
    "Taken",
    "enqueuing",
    "observe",
    "observed",
    "taken",
    "unobserve",
]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

logger = logging.getLogger("outlast")

Outcome = Literal["completed", "failed", "cancelled", "retried", "handed_back", "rate_limited", "lost"]
"""How an attempt ended. `failed`: for good; `handed_back`: the worker stops; `lost`: another may own the job."""


class Enqueuing:
    """One enqueue. `trace`: the W3C traceparent that goes onto the record."""

    trace: str | None = None

    def answered(self, answer: Enqueued) -> None:
        """The job is there. Not called when the enqueue raised."""


class Taken(NamedTuple):
    """What is known of an attempt as it starts. `waited`: seconds since the enqueue, on a job's first start only."""

    queue: str
    id: str
    attempt: int
    starts: int
    waited: float | None
    trace: str | None
    worker: str


class Attempt:
    """One attempt. Called on the worker's event loop, in the task that runs the attempt."""

    def settling(self, outcome: Outcome) -> None:
        """The handler has ended, and its outcome is on its way to the database."""

    def ended(self, outcome: Outcome, error: BaseException | None, usage: Mapping[str, float]) -> None:
        """It is there, or lost. `error`: what the handler raised. `usage`: this attempt's share of each counter."""


class Observer:
    """Hears of every enqueue and every attempt of this process. Override what you need.

    Methods must not block. What they raise is logged and disturbs no job.
    """

    def enqueue(self, queue: str, /) -> AbstractContextManager[Enqueuing]:
        """Around an enqueue; entered and left in the caller's task."""
        return nullcontext(Enqueuing())

    def attempt(self, taken: Taken, /) -> Attempt:
        """An attempt starts. The handler runs in a copy of the contextvars that are set here."""
        return Attempt()


_observers: list[Observer] = []
_UNSEEN = nullcontext(Enqueuing())


def observe(observer: Observer) -> None:
    """Have `observer` hear of everything from now on, in this process."""
    if observer not in _observers:
        _observers.append(observer)


def unobserve(observer: Observer) -> None:
    """Undo `observe`."""
    if observer in _observers:
        _observers.remove(observer)


def observed() -> bool:
    """Whether anybody listens."""
    return bool(_observers)


def enqueuing(queue: str) -> AbstractContextManager[Enqueuing]:
    """For the clients: what is around an enqueue."""
    return _enqueuing(queue) if _observers else _UNSEEN


@contextmanager
def _enqueuing(queue: str) -> Generator[Enqueuing]:
    with ExitStack() as stack:

        def enter(observer: Observer) -> Enqueuing:
            return stack.enter_context(_Shielded(observer.enqueue(queue)))

        entered = [_safely(enter, observer) for observer in _observers]
        parts = [part for part in entered if part is not None]
        everybody = _Enqueuings(parts)
        everybody.trace = next((part.trace for part in parts if part.trace is not None), None)
        yield everybody


def taken(what: Taken) -> Attempt:
    """For the worker: an attempt starts."""
    begun = [_safely(observer.attempt, what) for observer in _observers]
    return _Attempts([part for part in begun if part is not None])


class _Enqueuings(Enqueuing):
    def __init__(self, parts: list[Enqueuing]) -> None:
        self._parts = parts

    def answered(self, answer: Enqueued) -> None:
        for part in self._parts:
            _safely(part.answered, answer)


class _Attempts(Attempt):
    def __init__(self, parts: list[Attempt]) -> None:
        self._parts = parts

    def settling(self, outcome: Outcome) -> None:
        for part in self._parts:
            _safely(part.settling, outcome)

    def ended(self, outcome: Outcome, error: BaseException | None, usage: Mapping[str, float]) -> None:
        for part in reversed(self._parts):
            _safely(part.ended, outcome, error, usage)


class _Shielded(AbstractContextManager[T]):
    """A context whose exit disturbs nobody, and swallows no error of the body."""

    def __init__(self, inner: AbstractContextManager[T]) -> None:
        self._inner = inner

    def __enter__(self) -> T:
        return self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._inner.__exit__(kind, error, trace)
        except Exception as raised:
            if raised is not error:  # a generator's context raises the body's error again
                logger.exception(RAISED)


RAISED = "an observer raised; the job goes on"


def _safely(call: Callable[[Unpack[Ts]], T], *arguments: *Ts) -> T | None:
    try:
        return call(*arguments)
    except Exception:
        logger.exception(RAISED)
        return None
