"""One life of a worker, from the first connect to the last settle. It belongs to one event loop."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import os
import random
import secrets
import shlex
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from outlast import __version__
from outlast.errors import AuthError, ConfigurationError, OutlastError, StoreFullError
from outlast.protocol import Keys, holding
from outlast.protocol.calls import CLOCK, Call
from outlast.rules import Rules, read

from .attempt import WIND_DOWN, Attempt
from .health import STUCK, Health
from .intake import FULL_PAUSE, Bells, Clock, Intake
from .leases import Leases
from .registration import Pace, Registration
from .schedules import Schedule, Scheduler
from .tcp import AsyncTcpTransport, TlsError

__all__ = ["Engine", "Settings"]

logger = logging.getLogger("outlast.worker")

PRUNE_EVERY = 3600.0
LOG_EVERY = 30.0
"""Seconds between two log lines about the same trouble."""
PYTHON = os.path.dirname(os.__file__)
TIDY = 2.0
"""Seconds that the last words of a worker may take, each."""


@dataclass(frozen=True)
class Settings:
    """What a worker was told, with the environment read and the defaults filled in."""

    url: str
    pace: Pace
    prefix: str
    name: str
    concurrency: int
    poll: float
    block: float
    grace: float | None
    emit_interval: float
    is_retryable: Callable[[BaseException], bool]
    on_error: Callable[[BaseException, Any], object] | None
    require_queue: bool = False
    health: str | None = None

    def __repr__(self) -> str:
        return f"Settings({self.name!r})"  # the URL may hold a password


class Engine:
    """Queues, attempts and connections of a running worker.

    It ends in two steps: `stopping` (nothing new is taken), `drained` (nothing runs any more).
    """

    def __init__(
        self,
        settings: Settings,
        registrations: Sequence[Registration],
        *,
        burst: bool,
        schedules: Sequence[Schedule] = (),
    ) -> None:
        self.settings = settings
        self.id = secrets.token_hex(8)
        self.prefix = settings.prefix
        self.poll = settings.poll
        share = settings.pace.share / 1000
        self.block = min(settings.block, *(registration.lease_ms * share for registration in registrations))
        self.emit_interval = settings.emit_interval
        self.loop = asyncio.get_running_loop()
        self.transport = AsyncTcpTransport(settings.url)
        lease = min(registration.lease_ms for registration in registrations) / 1000
        # A renewal must have time to fail and be repeated while the lease lasts.
        self.leases = Leases(
            settings.url,
            self.loop,
            timeout=min(10.0, max(0.5, lease / 4)),
            nap=min(registration.beat(registration.lease_ms, settings.pace) for registration in registrations) / 4,
            trouble=self.trouble,
            blocked=self._blocked,
            recovered=lambda: self.news.set(),
        )
        self.stuck: set[Attempt] = set()
        """Attempts that have ended although their code still runs: it keeps its slot until it returns."""
        self.clock = Clock()
        self.booked = 0
        self.stopping = self.drained = False
        self.reachable = False
        """Whether the database answered when it was last asked. It is, at the latest, every `block` seconds."""
        self.started = asyncio.Event()
        """Set after the first try to connect, whatever came of it."""
        self.handed_back = 0
        self._intakes = [Intake(self, registration) for registration in registrations]
        self._rules: list[Rules] = []
        self._bells: list[Bells] = []
        self._burst = burst
        self._schedules = list(schedules)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self.news = asyncio.Event()
        """Something that the list of workers should have at once."""
        self.thread = threading.get_ident()
        self._core: set[asyncio.Task[None]] = set()
        self._attempts: dict[asyncio.Task[None], Attempt] = {}
        self._idle = asyncio.Event()
        """Set when the last attempt ends: to wait for "one of them" again and again costs as much as there are."""
        self._asides: set[asyncio.Task[None]] = set()
        self._cancelled = False
        self._full = False
        self._logged: dict[str, float] = {}
        self._since = 0
        self.health = None if settings.health is None else Health(self, settings.health)

    # -- what intakes and attempts use -------------------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        """Whether a slot that one queue frees may go to another."""
        return len(self._intakes) > 1

    def free_slots(self) -> int:
        if self.stopping or self._full:
            return 0
        return self.settings.concurrency - sum(intake.running for intake in self._intakes) - self.booked

    def slot_freed(self) -> None:
        """A slot is free: for a queue that may have more jobs, whose turn it is first."""
        if self.stopping:
            return
        hungry = [intake for intake in self._intakes if intake.hungry]
        for intake in hungry:
            intake.wake.set()
        self._intakes.append(self._intakes.pop(0))
        if not hungry:
            self._open_ears()

    def unbooked(self, by: Intake) -> None:
        """Slots that a take had booked and did not fill are for the queues that found none free meanwhile."""
        for intake in self._intakes:
            if intake is not by and intake.hungry and not intake.looking and intake.free:
                intake.wake.set()

    def looked(self) -> None:
        """A queue has just been looked at."""
        self._open_ears()
        self._end_burst()

    def begin(self, attempt: Attempt, ended: Callable[[], object]) -> None:
        # The handler is scheduled before the task that waits for its end, and runs a turn of the loop earlier than it
        # would if that task had to start it. What observers put into the context is for both.
        context = contextvars.copy_context()
        context.run(attempt.start)
        task = self.loop.create_task(attempt.run(), name=f"outlast attempt {attempt.job.id}", context=context)
        self._attempts[task] = attempt

        def done(task: asyncio.Task[None]) -> None:
            del self._attempts[task]
            ended()
            if not self._attempts:
                self._idle.set()
            if self._burst and not self._attempts and not self.stopping:
                for intake in self._intakes:
                    intake.drained = False
                    intake.look()

        task.add_done_callback(done)

    def may_retry(self, error: BaseException) -> bool:
        try:
            return bool(self.settings.is_retryable(error))
        except Exception:
            logger.exception("is_retryable raised; the job is tried again")
            return True

    def on_error_of(self, error: BaseException, job: Any) -> None:
        if self.settings.on_error is None:
            return
        try:
            self.settings.on_error(error, job)
        except Exception:
            logger.exception("on_error raised")

    def trouble(self, error: OutlastError) -> None:
        """The database did not answer, or refused. It is tried again; the log has one line in 30 s."""
        if self.reachable and not isinstance(error, StoreFullError):
            self.reachable = False
            self._intakes[0].look()  # whether that is still so should be known soon
        if isinstance(error, StoreFullError) and not self._full:
            self._full = True
            self.aside(self._wait_for_memory())
        now = time.monotonic()
        kind = type(error).__name__ + getattr(error, "code", "")
        if now - self._logged.get(kind, -LOG_EVERY) >= LOG_EVERY:
            self._logged[kind] = now
            logger.warning("trouble with the database, trying again: %s", error)
            self.on_error_of(error, None)

    async def _wait_for_memory(self) -> None:
        """Take nothing until the database accepts what needs memory: a job would be paid for and could not be shown."""
        keys = self._intakes[0].keys
        while self._full and not self._stop.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(FULL_PAUSE * random.uniform(0.5, 1)):
                    await self._stop.wait()
            with suppress(OutlastError):
                await self.transport.send(holding.seen(keys, self.id, json.dumps(self._info(), separators=(",", ":"))))
                self._full = False
        for intake in self._intakes:
            if not intake.stopped:
                intake.look()

    # -- what the health endpoints ask, from threads of their own -----------------------------------------------------

    @property
    def asked_to_stop(self) -> bool:
        return self._stop.is_set()

    def load(self) -> dict[str, int]:
        return {"running": len(self._attempts), "slots": self.settings.concurrency, "stuck": len(self.stuck)}

    def queues(self) -> dict[str, Keys]:
        return {intake.registration.queue.name: intake.keys for intake in self._intakes}

    def stuck_at(self, now: float) -> str | None:
        """What takes no jobs any more, although it waits for nothing that it may wait for."""
        if self._stop.is_set():
            return None
        for intake in list(self._intakes):
            if now - intake.step_ends > STUCK:
                return f"taking jobs of queue {intake.registration.queue.name!r}"
        if any(now - bells.step_ends > STUCK for bells in list(self._bells)):
            return "waiting for doorbells"
        return None

    # -- the parts of a life -------------------------------------------------------------------------------------------

    def split_bells(self) -> None:
        """A cluster: one command may not name two queues, so each gets a blocking read of its own."""
        self._bells = [Bells(self, [intake]) for intake in self._intakes]
        for bells in self._bells:
            self._run(bells.run(), "bells")

    def _open_ears(self) -> None:
        for bells in self._bells:
            if any(bells.needs_waking(intake) for intake in self._intakes):
                self.aside(bells.wake())

    def _end_burst(self) -> None:
        if self._burst and not self._attempts and not self.booked and all(intake.drained for intake in self._intakes):
            self.stop()

    def aside(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work, name="outlast aside")
        self._asides.add(task)
        task.add_done_callback(self._asides.discard)

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self.loop.create_task(work, name=f"outlast {name}")
        self._core.add(task)
        task.add_done_callback(lambda task: self._stop.set() if not task.cancelled() and task.exception() else None)

    # -- a life ------------------------------------------------------------------------------------------------------

    def stop(self, *, now: bool = False) -> None:
        """Take nothing more and let what runs finish; with `now`, hand it back. For the loop's own thread."""
        self._stop.set()
        self.news.set()
        if now:
            self._hurry.set()

    async def run(self) -> None:
        """Work until stopped. Raises AuthError, TransportError (TLS) or ConfigurationError when it cannot start."""
        if self.health is not None:
            self.health.start()
            logger.info("worker %s tells its health at %s", self.settings.name, self.health.address)
        try:
            try:
                if await self._connect():
                    await self._work()
            except asyncio.CancelledError:
                self._hurry.set()
                raise
            finally:
                await self._shut_down()
        finally:
            if self.health is not None:
                self.health.stop()
            await self.transport.aclose()
        if self._cancelled:
            raise asyncio.CancelledError
        for task in self._core:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _connect(self) -> bool:
        """Wait for the server. False: stopped before it answered."""
        trying = self.loop.create_task(self._try_to_connect(), name="outlast connect")
        stopped = self.loop.create_task(self._stop.wait())
        try:
            await asyncio.wait({trying, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if trying.done():
                await trying
                return not self._stop.is_set()
            return False
        finally:
            for task in (trying, stopped):
                task.cancel()
            await asyncio.gather(trying, stopped, return_exceptions=True)
            self.started.set()

    async def _try_to_connect(self) -> None:
        pause = 0.1
        while True:
            try:
                # On the connection that will wait for doorbells. A server that is not there should be known, not waited
                # for unseen, so the call is not repeated.
                asked = replace(CLOCK, replayable=False)
                self.clock.observe(await self.transport.send(asked, block=0))
                await self._read_rules()
                self.reachable = True
                return
            except (AuthError, ConfigurationError, TlsError):
                raise  # waiting does not help
            except OutlastError as error:
                self.trouble(error)
            self.started.set()
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, 2.0)

    async def _read_rules(self) -> None:
        self._rules = await self.transport.send_many([read(intake.keys) for intake in self._intakes])
        for intake, rules in zip(self._intakes, self._rules, strict=True):
            keys = intake.keys
            if self.settings.require_queue and rules.set_at is None and keys.name == keys.tag:
                raise ConfigurationError(
                    f"queue {keys.name!r} was never set up in this database, and this worker has require_queue=True; "
                    f"run: outlast queue set {shlex.quote(intake.registration.queue.name)}"
                )
            intake.obey(rules)
            self.block = min(self.block, intake.lease_ms / 1000 * self.settings.pace.share)

    async def _work(self) -> None:
        self._since = self.clock.now_ms()
        queues = [
            f"{intake.keys.name} ({intake.registration.slots} at a time here; {rules})"
            for intake, rules in zip(self._intakes, self._rules, strict=True)
        ]
        logger.info("worker %s takes jobs of %s", self.settings.name, ", ".join(queues))
        for intake in self._intakes:
            self._run(intake.run(), f"intake {intake.keys.name}")
            self._run(intake.run_second(), f"intake {intake.keys.name} 2")
            intake.wake.set()
        if self.transport.cluster:
            self.split_bells()
        else:
            self._bells = [Bells(self, self._intakes)]
            self._run(self._bells[0].run(), "bells")
        self._run(self._be_seen(), "registry")
        if self._schedules:
            scheduler = Scheduler(self.transport, self.prefix, self._schedules, self.trouble)
            self._run(scheduler.run(), "schedules")
        await self._stop.wait()

    async def _be_seen(self) -> None:
        prune = self.loop.time() + PRUNE_EVERY * random.uniform(0.1, 1)
        while True:
            self.news.clear()
            info = json.dumps(self._info(), separators=(",", ":"), ensure_ascii=False)
            try:
                await self.transport.send_many([holding.seen(intake.keys, self.id, info) for intake in self._intakes])
                if self.loop.time() >= prune:
                    prune = self.loop.time() + PRUNE_EVERY
                    for intake in self._intakes:
                        while await self.transport.send(holding.prune_dead(intake.keys)) >= 100:
                            pass
            except StoreFullError as error:
                self.trouble(error)
            except OutlastError:
                pass  # the next sign of life is soon enough
            with suppress(TimeoutError):  # a stop is told at once: what runs may still run for long
                async with asyncio.timeout(self.settings.pace.seen):
                    await self.news.wait()

    def _blocked(self, seconds: float) -> list[Call[Any]]:
        """The event loop answers nothing: say where it is, and that this worker is not well. In the leases' thread."""
        stack = traceback.extract_stack(sys._current_frames().get(self.thread))
        at = next((frame for frame in reversed(stack) if not frame.filename.startswith(PYTHON)), None)
        logger.error(
            "the event loop has been blocked for %.0f s%s: no cancel, timeout or other job gets through; blocking code "
            "belongs into a plain handler, a step, or asyncio.to_thread",
            seconds,
            f" in {at.name} ({at.filename}, line {at.lineno})" if at else "",
        )
        info = json.dumps({**self._info(), "state": "blocked"}, separators=(",", ":"), ensure_ascii=False)
        return [holding.seen(intake.keys, self.id, info) for intake in self._intakes]

    def _info(self) -> dict[str, object]:
        return {
            "at": self.clock.now_ms(),
            "name": self.settings.name,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "concurrency": self.settings.concurrency,
            "active": len(self._attempts),
            "stuck": len(self.stuck),
            "started": self._since,
            "state": "stopping" if self._stop.is_set() else "running",
            "version": __version__,
        }

    # -- the end of it -----------------------------------------------------------------------------------------------

    async def _shut_down(self) -> None:
        self.stopping = True
        for intake in self._intakes:
            intake.wake.set()
            intake.more.set()
        if self._core:
            # Deaf to doorbells from now on; cancels still come through while jobs run.
            self.aside(self._wake_bells())
            await self._drain()
        self.drained = True
        await self._end(self._core | self._asides, after=self._wake_bells())
        if self._since:
            await self._end({self.loop.create_task(self._sign_off())})
        self.leases.stop()
        await self._end({self.loop.create_task(_wait(self.leases.ended))})

    async def _drain(self) -> None:
        """Until nothing runs any more, or for the grace; then hand back what still does."""
        intakes = [task for task in self._core if "intake" in task.get_name()]
        hurry = self.loop.create_task(self._hurry.wait())
        end = None if self.settings.grace is None else self.loop.time() + self.settings.grace
        try:
            # A take that is under way may still bring jobs; they go straight back.
            await asyncio.wait(intakes, timeout=TIDY)
            while self._attempts and not self._hurry.is_set():
                left = None if end is None else end - self.loop.time()
                if left is not None and left <= 0:
                    break
                self._idle.clear()
                idle = self.loop.create_task(self._idle.wait())
                try:
                    await asyncio.wait({hurry, idle}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    idle.cancel()
        except asyncio.CancelledError:
            self._cancelled = True  # raised again at the end: what runs is handed back first
        finally:
            hurry.cancel()
        if not self._attempts:
            return
        running = sum(not attempt.ended for attempt in self._attempts.values())
        logger.warning("worker %s hands %d running jobs back", self.settings.name, running)
        for attempt in self._attempts.values():
            attempt.stop("shutdown")
        await asyncio.wait(self._attempts, timeout=WIND_DOWN * 1.7)
        self.handed_back = max(running, len(self._attempts))
        await self._end(set(self._attempts), patience=0)

    async def _wake_bells(self) -> None:
        for bells in self._bells:
            await bells.wake()

    async def _sign_off(self) -> None:
        with suppress(OutlastError):
            leave: list[Call[Any]] = [holding.seen(intake.keys, self.id, None) for intake in self._intakes]
            leave += [Call(("DEL", intake.ctl), lambda _: None) for intake in self._intakes]
            await self.transport.send_many(leave)

    async def _end(
        self,
        tasks: set[asyncio.Task[None]],
        *,
        patience: float = TIDY / 2,
        after: Coroutine[Any, Any, None] | None = None,
    ) -> None:
        """Let tasks end by themselves, then cancel them."""
        if after is not None:
            tasks = {*tasks, self.loop.create_task(after)}
        for task in tasks:
            if task.get_name() in ("outlast registry", "outlast schedules"):
                task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=patience)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=TIDY)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
