"""One attempt of one job: run the handler, then settle, retry or hand back what came of it.

The outcome is decided by why the job was stopped, and only if it was not, by how the handler ended: a handler that
swallows its cancellation, or lets a CancelledError of its own escape, changes nothing.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import random
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from outlast.errors import (
    AuthError,
    InvalidArgumentError,
    OutlastError,
    RateLimitedError,
    ReplyShapeError,
    StoreFullError,
    TerminalJobError,
)
from outlast.observe import Attempt as Observed
from outlast.observe import Outcome, Taken, observed, taken
from outlast.protocol import holding
from outlast.protocol.calls import Call
from outlast.protocol.holding import Reserved
from outlast.transport import is_transient

from . import logs, policy
from .context import JobContext, SyncJobContext
from .leases import Answer, Lease
from .output import Output
from .steps import Steps
from .stop_signal import JobSignal, StopReason
from .usage import Usage

if TYPE_CHECKING:
    from .engine import Engine
    from .intake import Intake

__all__ = ["Attempt"]

logger = logging.getLogger("outlast.worker")

WIND_DOWN = 1.0
"""Seconds that a handler has to end once the job is handed back. After that its process is about to end anyway."""
NAG_AFTER = 10.0
"""Seconds after which a handler that goes on although its job was stopped is named in the log."""
SETTLE_TRIES = 5
"""A settle that the database refuses (not: does not answer) this often is given up; the lease then runs out."""


class _Outcome(NamedTuple):
    kind: Literal["settle", "retry", "release", "nothing"]
    status: Literal["completed", "failed", "cancelled"] = "cancelled"
    body: str = ""
    delay_ms: int = 0
    pause_ms: int | None = None

    @property
    def word(self) -> Outcome:
        match self.kind:
            case "settle":
                return self.status
            case "retry":
                return "retried"
            case "release":
                return "handed_back" if self.pause_ms is None else "rate_limited"
            case _:
                return "lost"


def _nobody(_: object) -> None:
    """Whom an attempt that is over reports to."""


class Attempt:
    """The state of one attempt. Everything but the handler of a plain function runs on the event loop."""

    _lock = threading.Lock()
    """Of all attempts: it is held for moments."""

    def __init__(self, engine: Engine, intake: Intake, job: Reserved) -> None:
        self.job = job
        self._engine = engine
        self._intake = intake
        self._registration = intake.registration
        self._queue = intake.registration.queue
        self._loop = asyncio.get_running_loop()
        self.signal = JobSignal()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._terms = intake.terms
        lease_ms = intake.lease_ms
        beat = self._registration.beat(lease_ms, engine.settings.pace)
        self._lease = Lease(intake.keys, job, ms=lease_ms, beat=beat, report=self._held)
        self._output = Output(
            engine.transport,
            self._lease,
            max_len=self._queue.events_max_len,
            interval=engine.emit_interval,
            report=self._held,
            trouble=engine.trouble,
            # While the handler runs, what it says may still be written in time; see `Lease.deadline`.
            hopeless=lambda: self._ended.done() and self._hopeless(),
        )
        # Most jobs have no steps and count nothing; what nobody asks for is not made.
        self._steps: Steps | None = None
        self._usage: Usage | None = None
        if job.usage or job.budget or self._queue.budget:
            self.usage()
        self._watched: Observed | None = None
        self._decided: _Outcome | None = None
        """What becomes of the job although its handler does not run."""
        self._broken: Exception | None = None
        self._context: Any = None
        """What the handler was given."""
        self._timeout_ms: int | None = None
        """None: what comes first is the job's deadline."""
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        self._holds_slot = True
        self._over = False
        self._running = 0
        """The handler, and threads of its steps, as far as they have not returned."""
        self._nag: asyncio.TimerHandle | None = None

    def steps(self) -> Steps:
        """For any thread."""
        with Attempt._lock:
            if self._steps is None:
                self._steps = Steps(
                    self._engine.transport,
                    self._lease,
                    report=self._held,
                    trouble=self._engine.trouble,
                    hopeless=self._may_be_lost,
                    count=self._count,
                )
            return self._steps

    def usage(self) -> Usage:
        """For any thread."""
        with Attempt._lock:
            if self._usage is None:
                self._usage = Usage(self.job, self._queue.budget, self._output, self._loop, self._engine.thread)
            return self._usage

    def stop(self, reason: StopReason) -> None:
        """Stop the handler. The first reason counts, except that a lost lease leaves nothing to settle."""
        if self._over:
            return
        if reason == "lease_lost":
            self._lease.until = 0
            self._output.closed = True
        if self._ended.done() and reason != "lease_lost":
            return
        if not self.signal._set(reason):
            if reason != "lease_lost":
                return
            self.signal.reason = reason
        if reason in ("shutdown", "timeout"):
            # What goes on all the same can do no harm: its writes are refused.
            self._lease.until = time.monotonic() + 2 * WIND_DOWN
            self._loop.call_later(WIND_DOWN, self._end)
        if reason != "shutdown" and not self._ended.done():
            self._nag = self._loop.call_later(NAG_AFTER, self._complain, reason)
        if self._task is not None and not self._task.done():
            self._task.cancel()

    def _complain(self, reason: StopReason) -> None:
        logger.warning(
            "job %r of queue %r was stopped (%s) %g s ago, and its handler still runs; it keeps its slot",
            self.job.id,
            self._queue.name,
            reason,
            NAG_AFTER,
        )

    def _held(self, answer: Answer) -> None:
        if answer == "unreachable":
            if self._ended.done():
                return  # nothing is spent any more; what came of it is kept until the job is somebody else's
            logger.warning(
                "job %r of queue %r is stopped: the database could not be asked for longer than the lease",
                self.job.id,
                self._queue.name,
            )
        if answer != "ok":
            self.stop("cancelled" if answer == "cancel" else "lease_lost")

    @property
    def ended(self) -> bool:
        """Whether the handler has ended; what came of it may still be on its way to the database."""
        return self._ended.done()

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    # -- running -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """From the payload to the handler, which runs from the loop's next turn on. Raises nothing; `run` goes on."""
        logs.current.set((self._queue.name, self.job.id, self.job.attempt))
        self._watched = taken(self._taken()) if observed() else None
        try:
            self._engine.leases.add(self._lease)
            # A reserve that was under way when the worker was told to stop: straight back with its jobs.
            self._decided = _Outcome("release") if self._engine.stopping else self._begin()
        except Exception as error:
            self._broken = error

    async def run(self) -> None:
        """From the running handler to the settled job. Raises nothing."""
        leases, watched = self._engine.leases, self._watched
        ended: Outcome = "lost"
        try:
            if self._broken is not None:
                raise self._broken
            outcome = self._decided
            if outcome is None:
                await self._ended
                outcome = self._outcome()
            if watched is not None:
                watched.settling(outcome.word)
            ended = await self._finish(outcome)
        except Exception:
            logger.exception("job %r: the worker itself failed; the lease will run out", self.job.id)
        finally:
            leases.remove(self._lease)
            if self._timer is not None:
                self._timer.cancel()
            if watched is not None:
                watched.ended(ended, self._error, {} if self._usage is None else self._usage.spent)
            await self._output.close(WIND_DOWN)
            if self._running:
                self._engine.stuck.add(self)
                self._engine.news.set()
            elif self._nag is not None:
                self._nag.cancel()
            self._free()
            self._result = self._error = self._context = self._broken = None
            if not self._running:
                # They call back, in circles: cut here, an attempt's memory is free at once. The garbage collector,
                # had it to find them, would take a fifth of a busy worker's time.
                self._over = True
                self._lease.report = _nobody
                self._steps = self._usage = None
                del self._output

    def _taken(self) -> Taken:
        job = self.job
        waited = max(0, self._engine.clock.now_ms() - job.created_at_ms) / 1000 if job.starts == 1 else None
        return Taken(self._queue.name, job.id, job.attempt, job.starts, waited, job.trace, self._engine.settings.name)

    def _free(self) -> None:
        if self._holds_slot and not self._running:
            self._holds_slot = False
            self._intake.release_slot()

    def _count(self, change: int) -> None:
        self._running += change
        if self._running == 0 and self in self._engine.stuck:
            self._engine.stuck.discard(self)
            self._engine.news.set()
            logger.info("job %r of queue %r: code that outran its attempt has returned", self.job.id, self._queue.name)
            if self._nag is not None:
                self._nag.cancel()
            self._free()

    def _begin(self) -> _Outcome | None:
        """Start the handler, unless it is decided already what becomes of the job."""
        job, now = self.job, self._engine.clock.now_ms()
        for limit, what in (
            (job.expires_at_ms if job.starts == 1 else None, "expired"),  # a retry's first attempt was in time
            (job.deadline_at_ms, "reached its deadline"),
        ):
            if limit is not None and limit <= now:
                return _Outcome("settle", "failed", f"JobExpiredError: the job {what} before it could start")
        if self._usage is not None and (over := self._usage.exceeded()) is not None:
            return _Outcome("settle", "failed", policy.error_text(over))
        try:
            payload = self._payload()
        except Exception as error:
            text = policy.error_text(error)
            logger.error("job %r of queue %r cannot run: %s", job.id, self._queue.name, text)
            self._tell(error)
            return _Outcome("settle", "failed", text)
        timeout_ms = job.timeout_ms or self._terms.timeout_ms or self._queue.timeout_ms
        if job.deadline_at_ms is not None and job.deadline_at_ms - now <= timeout_ms:
            timeout_ms = job.deadline_at_ms - now
        else:
            self._timeout_ms = timeout_ms
        self._lease.until = time.monotonic() + timeout_ms / 1000
        self._context = self._make_context(payload)
        self._start_handler(self._context)
        self._timer = self._loop.call_later(timeout_ms / 1000, self.stop, "timeout")
        return None

    def _payload(self) -> Any:
        limit, text = self._terms.max_payload, self.job.payload
        try:
            size = len(text) if text.isascii() else len(text.encode())
        except UnicodeEncodeError:
            raise ReplyShapeError(f"the payload of queue {self._queue.name!r} is not UTF-8") from None
        if limit is not None and size > limit:
            raise InvalidArgumentError(f"the payload has {size} bytes of JSON; the queue's limit is {limit}")
        return self._queue.decode_payload(self.job.payload)

    def _make_context(self, payload: Any) -> JobContext[Any] | SyncJobContext[Any]:
        job = self.job
        fields: dict[str, Any] = {
            "id": job.id,
            "queue": self._queue,
            "payload": payload,
            "attempt": job.attempt,
            "starts": job.starts,
            "max_attempts": job.max_attempts,
            "signal": self.signal,
            "output": self._output,
            "steps": self.steps,
            "usage": self.usage,
        }
        return JobContext(**fields) if self._registration.is_async else SyncJobContext(loop=self._loop, **fields)

    def _start_handler(self, context: Any) -> None:
        handler = self._registration.handler
        if self._registration.is_async:
            self._task = self._loop.create_task(self._call(handler, context), name=f"outlast job {self.job.id}")
            # Not in `_call` itself: a task that is cancelled before its first step never runs a line of it.
            self._task.add_done_callback(lambda _: self._handler_ended())
        else:
            # A thread of its own, and a daemon: a pool would wait for a stuck handler when the process ends.
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._call_plain, handler, context),
                name=f"outlast job {self.job.id}",
                daemon=True,
            ).start()
        self._count(1)

    async def _call(self, handler: Callable[[Any], Any], context: Any) -> None:
        try:
            self._result = await handler(context)
        except BaseException as error:
            self._error = error
            if isinstance(error, KeyboardInterrupt):
                raise
            if self._steps is not None:
                await self._steps.leave(wait=not self.signal.is_set() and not isinstance(error, TerminalJobError))

    def _call_plain(self, handler: Callable[[Any], Any], context: Any) -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = handler(context)
        except BaseException as error:
            failure = error

        with suppress(RuntimeError):  # the worker has ended without this thread
            self._loop.call_soon_threadsafe(self._plain_ended, result, failure)
        failure = None  # this frame is in its traceback

    def _plain_ended(self, result: Any, failure: BaseException | None) -> None:
        # Handed over as arguments: a closure would read them when the loop gets to it, after the line above.
        if not self._ended.done():
            self._result, self._error = result, failure
        self._handler_ended()

    def _handler_ended(self) -> None:
        self._end()
        self._count(-1)

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _outcome(self) -> _Outcome:
        error, result = self._error, self._result
        try:
            match self.signal.reason:
                case "cancelled":
                    return _Outcome("settle", "cancelled")
                case "lease_lost":
                    return _Outcome("nothing")
                case "shutdown":
                    return _Outcome("release")
                case "timeout":
                    timeout = TimeoutError(
                        "the job reached its deadline"
                        if self._timeout_ms is None
                        else f"the attempt ran longer than {self._timeout_ms / 1000:g} s"
                    )
                    return self._failed(timeout, policy.error_text(timeout))
                case None:
                    pass
            if self._usage is not None and (over := self._usage.exceeded()) is not None:
                self._log(over, "is over its budget")
                self._tell(over)
                return _Outcome("settle", "failed", policy.error_text(over))
            if error is None:
                return self._completed(result)
            if isinstance(error, RateLimitedError):
                self._log(error, "gave its attempt back")
                return _Outcome("release", body=policy.error_text(error), pause_ms=-int(-error.retry_after * 1000 // 1))
            if isinstance(error, StoreFullError) or (self._output.refused and not isinstance(error, TerminalJobError)):
                self._log(error, "was handed back: the database is full")
                return _Outcome("release", body=policy.error_text(error))
            if isinstance(error, asyncio.CancelledError):
                text = "CancelledError: raised inside the handler; nobody cancelled the job"
                return self._failed(error, text)
            return self._failed(error, policy.error_text(error))
        finally:
            if error is not None:
                # What the handler's frames still hold, a provider's stream above all, closes now and not when the
                # garbage collector comes by.
                traceback.clear_frames(error.__traceback__)

    def _completed(self, result: Any) -> _Outcome:
        try:
            if inspect.isawaitable(result):
                if inspect.iscoroutine(result):
                    result.close()
                raise InvalidArgumentError("the handler returned an awaitable; write async def, and await it")
            return _Outcome("settle", "completed", policy.encode_mended(self._queue.encode_result, result))
        except Exception as error:
            # Another attempt would cost as much and end the same way.
            self._log(error, "returned what cannot be stored")
            self._tell(error)
            return _Outcome("settle", "failed", policy.error_text(error))

    def _failed(self, error: BaseException, text: str) -> _Outcome:
        self._log(error, "failed")
        self._tell(error)
        job = self.job
        if job.attempt >= job.max_attempts or not self._engine.may_retry(error):
            return _Outcome("settle", "failed", text)
        delay = policy.retry_after_ms(self._queue, job.attempt, error)
        if job.deadline_at_ms is not None and self._engine.clock.now_ms() + delay >= job.deadline_at_ms:
            return _Outcome("settle", "failed", text)
        return _Outcome("retry", body=text, delay_ms=delay)

    def _log(self, error: BaseException, what: str) -> None:
        job, name = self.job, self._queue.name
        stack: str | None = None
        info: BaseException | None = None
        if policy.quotes_input(error):
            stack = "".join(traceback.format_tb(error.__traceback__))
        elif not isinstance(error, RateLimitedError):
            info = error
        level = logging.WARNING if isinstance(error, (RateLimitedError, TerminalJobError)) else logging.ERROR
        logger.log(
            level,
            "job %r of queue %r, attempt %d, %s: %s%s",
            job.id,
            name,
            job.attempt,
            what,
            policy.error_text(error),
            f"\n{stack}" if stack else "",
            exc_info=info,
        )

    def _tell(self, error: BaseException) -> None:
        self._engine.on_error_of(error, self._context)

    # -- settling ----------------------------------------------------------------------------------------------------

    async def _finish(self, outcome: _Outcome) -> Outcome:
        if outcome.kind == "nothing":
            self._log_lost(outcome)
            return "lost"
        self._lease.until = inf  # the outcome is there; the time that is left is for writing it down
        self._output.drop_usage()
        if outcome.kind == "settle":
            # Watchers see all of the text before the end. A retry starts over, so there nothing is lost.
            await self._output.flush_last()
            if (error := self._output.pop_error()) is not None:
                logger.warning("job %r: its last text could not be written: %s", self.job.id, error)
        await self._output.close(WIND_DOWN)
        if self._steps is not None:
            await self._steps.close()
        if outcome.pause_ms is None and self._terms.concurrency is None:
            self._free()  # the next reserve leaves in the same write as the settle; a pause has to be there before it
        answer = await self._send(outcome)
        if answer == "lost":
            self._log_lost(outcome)
        elif answer == "scheduled":
            self._intake.due_in(outcome.delay_ms / 1000)
        if self._terms.owner_cap is not None and self.job.owner is not None:
            self._engine.aside(self._admit(self.job.owner))
        match answer:
            case "lost" | "refused":
                return "lost"
            case "cancelled":  # it came before the outcome did
                return "cancelled"
            case _:
                return outcome.word

    async def _admit(self, owner: str) -> None:
        try:
            await self._engine.transport.send(holding.admit(self._intake.keys, self.job.id, owner))
        except OutlastError as error:
            self._engine.trouble(error)  # it comes to its turn within the hour

    def _call_of(self, outcome: _Outcome) -> Call[Any]:
        job, queue, keys = self.job, self._queue, self._intake.keys
        result_ttl = job.result_ttl_ms or self._terms.result_ttl_ms or queue.result_ttl_ms
        used = holding.Used() if self._usage is None else self._usage.used(self._engine.clock.now_ms())
        # What is missing from a text that ends with a result, readers are told. A cancelled one ends anywhere.
        ends = outcome.kind == "settle" and outcome.status != "cancelled"
        count = self._output.count if ends else self._output.written
        match outcome.kind:
            case "retry":
                return holding.retry(
                    keys,
                    job,
                    error=outcome.body,
                    delay_ms=outcome.delay_ms,
                    cancel_ttl_ms=result_ttl,
                    count=count,
                    ring=self._engine.stopping,
                    used=used,
                )
            case "release":
                return holding.release(
                    keys,
                    job,
                    cancel_ttl_ms=result_ttl,
                    count=count,
                    emitted=self._output.emitted,
                    error=outcome.body,
                    pause_ms=outcome.pause_ms,
                    used=used,
                )
            case _:
                return holding.settle(
                    keys,
                    job,
                    status=outcome.status,
                    body=outcome.body,
                    ttl_ms=queue.dead_ttl_ms if outcome.status == "failed" else result_ttl,
                    cancel_ttl_ms=result_ttl,
                    count=count,
                    steps=self._steps is not None and self._steps.any,
                    used=used,
                )

    async def _send(self, outcome: _Outcome) -> str:
        """Send until it is answered, or until the lease is somebody else's: a finished result is never dropped."""
        pause, refused = 0.05, 0
        while self.signal.reason != "lease_lost":
            try:
                answer: str = await self._engine.transport.send(self._call_of(outcome))
            except OutlastError as error:
                self._engine.trouble(error)
                if not is_transient(error) and not isinstance(error, (StoreFullError, AuthError)):
                    refused += 1
                    if refused >= SETTLE_TRIES:
                        logger.error("job %r: its outcome was refused and is given up: %s", self.job.id, error)
                        return "refused"
            else:
                return answer
            if self._hopeless():
                break
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, 1.0)
        return "lost"

    def _may_be_lost(self) -> bool:
        return self.signal.reason == "lease_lost" or self._hopeless()

    def _hopeless(self) -> bool:
        """A worker that ends holds what it has for as long as nobody else can have the job, and no longer."""
        return self._engine.stopping and self._lease.lapsed

    def _log_lost(self, outcome: _Outcome) -> None:
        kept = " and its result is dropped" if outcome.status == "completed" else ""
        logger.warning(
            "job %r of queue %r, attempt %d: the lease is lost, another worker may own the job%s",
            self.job.id,
            self._queue.name,
            self.job.attempt,
            kept,
        )
