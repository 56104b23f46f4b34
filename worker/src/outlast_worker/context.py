"""What a handler is given: `JobContext` for coroutines, `SyncJobContext` for plain functions in threads."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from outlast.errors import InvalidArgumentError, JobLeaseLostError, JobStopped

from .output import event_of, progress_text
from .steps import Step, is_coroutine_function

if TYPE_CHECKING:
    from typing_extensions import TypeForm

    from outlast.queue import Queue

    from .output import Output
    from .steps import Steps
    from .stop_signal import JobSignal
    from .usage import Usage

__all__ = ["JobContext", "SyncJobContext"]

P = TypeVar("P")
T = TypeVar("T")
A = ParamSpec("A")

AHEAD = 200
"""Emits that a thread may be ahead of the event loop, which does the writing."""


def _lost(id: str) -> JobLeaseLostError:
    return JobLeaseLostError(f"job {id!r}: the lease is gone, another worker may own the job; stop working on it", id)


class _Context(Generic[P]):
    id: str
    queue: str
    """The queue's name, without namespace."""
    payload: P
    attempt: int
    """1 for the first; an attempt that was given back (429, hand-back) does not count."""
    starts: int
    """Times that the job was taken, this one included."""
    max_attempts: int
    signal: JobSignal

    def __init__(
        self,
        *,
        id: str,
        queue: Queue[Any, Any],
        payload: P,
        attempt: int,
        starts: int,
        max_attempts: int,
        signal: JobSignal,
        output: Output,
        steps: Callable[[], Steps],
        usage: Callable[[], Usage],
    ) -> None:
        self.id = id
        self.queue = queue.name
        self.payload = payload
        self.attempt = attempt
        self.starts = starts
        self.max_attempts = max_attempts
        self.signal = signal
        self._declared = queue
        self._output = output
        self._steps = steps
        self._usage = usage

    def __repr__(self) -> str:
        return f"{type(self).__name__}(queue={self.queue!r}, id={self.id!r}, attempt={self.attempt})"

    def usage(
        self, *, input_tokens: int = 0, output_tokens: int = 0, cost: float = 0.0, **counters: float
    ) -> dict[str, float]:
        """Add to what this job has used, over all its attempts; the answer is the sum. For any thread.

        It is kept on the record (`Job.usage`) and in the queue's totals of the day. `counters`: any more of your own.
        Raises BudgetExceededError once the job has used more than its budget allows, which ends it for good, and
        InvalidArgumentError for amounts below 0, and for more than 50 counters.
        """
        return self._usage().add(
            {"input_tokens": input_tokens, "output_tokens": output_tokens, "cost": cost, **counters}
        )

    async def _keep(self, name: str, text: str) -> None:
        # What the step has used goes first: a crash in between counts it twice, as it is paid twice.
        await self._output.flush_usage()
        await self._steps().keep(name, text)

    def _raise_error(self) -> None:
        error = self._output.pop_error()
        if error is not None:
            raise error


class JobContext(_Context[P]):
    """One attempt of one job, for a coroutine.

    Stopping the job cancels the handler's task. A handler that swallows that gets CancelledError again from each of
    the methods here, or JobLeaseLostError once another worker may own the job.
    """

    async def emit(self, value: object) -> None:
        """Stream `value` to whoever watches: a str as text, anything else (dict, list, model, …) as one JSON event.

        It returns at once: text is buffered, the first goes out immediately, later text at most every `emit_interval`,
        neighbouring texts joined, one of more than 64 Ki characters split. It waits only while the buffer (1,000 events
        or 1 MiB) is full. Halves of a surrogate pair are joined across calls; a half that stays alone is written as
        U+FFFD. An empty text writes nothing but renews the lease. Raises InvalidArgumentError for what JSON cannot hold
        or would be more than 1 MiB of it, and StoreFullError when the database had no memory for 60 s: the text before
        was dropped, and readers are told of the gap.
        """
        await self._add(*event_of(value))

    async def progress(self, value: float) -> None:
        """Say how far the job is, from 0 to 1. It is shown to watchers, and kept on the record until the next one."""
        await self._add("progress", progress_text(value))

    async def flush(self) -> None:
        """Wait until everything emitted so far is written."""
        self._check()
        await self._wait(self._output.flush())

    async def heartbeat(self) -> None:
        """Renew the lease now, and learn whether the job was stopped. Seldom needed: a thread renews every lease."""
        self._check()
        self._output.touch()
        await self._wait(self._output.flush())

    @overload
    async def step(self, name: str, function: Callable[A, Awaitable[T]], /, *args: A.args, **kwargs: A.kwargs) -> T: ...
    @overload
    async def step(self, name: str, function: Callable[A, T], /, *args: A.args, **kwargs: A.kwargs) -> T: ...
    @overload
    async def step(
        self, name: str, function: Callable[..., Any], /, *args: Any, type: TypeForm[T], **kwargs: Any
    ) -> T: ...
    async def step(self, name: str, function: Any, /, *args: Any, type: Any = None, **kwargs: Any) -> Any:
        """What `function` returned when this job last finished the step `name`; if none has, run it and keep that.

        The value is stored under the current lease before this returns, so no retry, crash or lost reply makes a
        later attempt run the step again; only the steps that were under way run anew. Several may run at once
        (``asyncio.gather``): when one of them fails the attempt, the others may end, and are kept, before the next
        attempt. A plain function runs in a thread.

        - `name`: 1 to 512 bytes, one for each step of the job: used twice in an attempt it raises InvalidArgumentError.
        - `type`: what the stored JSON is read as; by default what `function` is annotated to return, else any JSON.
          The value given here has passed through JSON even when the step has just run.

        Raises what `function` raises (the step is not finished then); StepValueError, which ends the job, for a value
        that is no JSON or larger than the queue's `max_step`; StoreFullError when the database had no memory for 60 s;
        ReplyShapeError for a stored value that does not fit `type` any more.
        """
        self._check()
        step = Step(self._declared, name, function, type)
        text = await self._wait(self._steps().begin(name))
        if text is None:
            try:
                with self._steps().running():
                    if is_coroutine_function(function):
                        value = await function(*args, **kwargs)
                    else:
                        value = await self._steps().in_thread(lambda: function(*args, **kwargs))
                        if inspect.isawaitable(value):
                            value = await value
                    text = step.encode(value)
                    await self._wait(self._keep(name, text))
            except BaseException:
                self._steps().fail(name)
                raise
        return step.decode(text)

    async def _add(self, kind: str, text: str) -> None:
        self._check()
        output = self._output
        output.add(kind, text)
        if output.stale:
            await self._wait(output.flush())  # this process stood still: is the job still ours?
        elif output.full:
            await self._wait(output.room())
        else:
            self._raise_error()

    async def _wait(self, waiting: Coroutine[Any, Any, T]) -> T | None:
        answer: T | None = None
        try:
            answer = await waiting
        except asyncio.CancelledError:
            if self.signal.reason != "lease_lost":
                raise
            # The answer that we waited for said so itself; here it has a name of its own.
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
        self._check()
        self._raise_error()
        return answer

    def _check(self) -> None:
        if not self.signal.is_set():
            return
        if self.signal.reason == "lease_lost":
            raise _lost(self.id)
        raise asyncio.CancelledError(f"job {self.id!r} was stopped: {self.signal.reason}")


class SyncJobContext(_Context[P]):
    """One attempt of one job, for a plain function; it runs in a thread of its own.

    A thread cannot be interrupted: once the job is stopped, each of the methods here raises JobStopped (a
    BaseException, so that ``except Exception`` lets it pass), or JobLeaseLostError once another worker may own the
    job. To get out of a blocking call, hang its close on the signal: ``job.signal.on_set(response.close)``.
    """

    def __init__(self, *, loop: asyncio.AbstractEventLoop, **fields: Any) -> None:
        super().__init__(**fields)
        self._loop = loop
        self._ahead = 0

    def emit(self, value: object) -> None:
        """Stream `value` to whoever watches. See `JobContext.emit`; it blocks only while the buffer is full."""
        self._add(*event_of(value))

    def progress(self, value: float) -> None:
        """Say how far the job is, from 0 to 1. See `JobContext.progress`."""
        self._add("progress", progress_text(value))

    def flush(self) -> None:
        """Block until everything emitted so far is written."""
        self._check()
        self._wait(self._output.flush())

    def heartbeat(self) -> None:
        """Renew the lease now, and learn whether the job was stopped. Seldom needed: a thread renews every lease."""
        self._check()
        self._wait(self._beat())

    @overload
    def step(self, name: str, function: Callable[A, T], /, *args: A.args, **kwargs: A.kwargs) -> T: ...
    @overload
    def step(self, name: str, function: Callable[..., Any], /, *args: Any, type: TypeForm[T], **kwargs: Any) -> T: ...
    def step(self, name: str, function: Any, /, *args: Any, type: Any = None, **kwargs: Any) -> Any:
        """What `function` returned when this job last finished the step `name`. See `JobContext.step`."""
        self._check()
        if is_coroutine_function(function):
            raise InvalidArgumentError(f"step {name!r}: {function!r} is async, and this handler is not; use async def")
        step = Step(self._declared, name, function, type)
        text = self._wait(self._steps().begin(name))
        if text is None:
            try:
                text = step.encode(function(*args, **kwargs))
                self._check()
                self._wait(self._keep(name, text))
            except BaseException:
                self._steps().fail(name)
                raise
        return step.decode(text)

    async def _beat(self) -> None:
        self._output.touch()
        await self._output.flush()

    def _add(self, kind: str, text: str) -> None:
        self._check()
        output = self._output
        try:
            self._loop.call_soon_threadsafe(output.add, kind, text)
        except RuntimeError:
            raise JobStopped("shutdown", self.id) from None  # the worker has ended without this thread
        self._ahead += 1
        if output.stale:
            self._wait(output.flush())
        elif output.full or self._ahead >= AHEAD:
            self._wait(output.room())
        else:
            self._raise_error()

    def _wait(self, waiting: Coroutine[Any, Any, T]) -> T:
        self._ahead = 0
        try:
            answer = asyncio.run_coroutine_threadsafe(waiting, self._loop).result()
        except (RuntimeError, CancelledError):
            waiting.close()
            raise JobStopped("shutdown", self.id) from None
        self._check()
        self._raise_error()
        return answer

    def _check(self) -> None:
        reason = self.signal.reason
        if reason == "lease_lost":
            raise _lost(self.id)
        if reason is not None:
            raise JobStopped(reason, self.id)
