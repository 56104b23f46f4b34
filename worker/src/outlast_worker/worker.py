"""`Worker`: declare handlers, run them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from datetime import datetime
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from outlast._checks import Duration, check_count, to_ms
from outlast._config import find_namespace, lookup
from outlast.errors import ConfigurationError, InvalidArgumentError
from outlast.queue import Queue, check_queue

from . import policy
from .context import JobContext, SyncJobContext
from .engine import Engine, Settings
from .health import parse_address
from .registration import PROMPT, THRIFTY, Handles, Registration, check_heartbeat
from .tcp import is_metered

if TYPE_CHECKING:
    from .schedules import Schedule

__all__ = ["Worker"]

P = TypeVar("P")
R = TypeVar("R")

logger = logging.getLogger("outlast.worker")

URL_NAMES = ("OUTLAST_REDIS_URL", "REDIS_URL")
MAX_CONCURRENCY = 100_000


class Worker:
    """Runs the jobs of one or several queues.

    ``@worker.handles(queue)`` declares, ``worker.run()`` works until SIGTERM or SIGINT; ``await worker.serve()`` and
    ``async with worker:`` do the same inside an application and touch no signals.

    - `redis_url`: see `outlast_worker.tcp.TcpTransport`. Without it OUTLAST_REDIS_URL, then REDIS_URL, read when the
      worker starts.
    - `concurrency`: the most jobs at a time in this process. Without it, as many as its queues together may run.
    - `lease`: overrides the queues' (60 s). `heartbeat`: how often a silent job's lease is renewed (a quarter of the
      lease, at most 15 s).
    - `economy`: fewer commands, for a database that bills them; by default where the host is Upstash's. See `Pace`
      for what it changes and what that costs.
    - `block` (30 s, at most half a lease): how long the worker waits for the doorbell before it looks by itself. Use
      5 s beside workers of other implementations, which may eat doorbells. `poll` (1 s): how often it looks where the
      server refuses blocking reads.
    - `grace`: seconds that running jobs get after stop(); then they are handed back. Without it they may finish.
    - `is_retryable`: decides alone whether an error is worth another attempt; it replaces the default, by which all
      but TerminalJobError are.
    - `on_error`: called with each error and the job's context, or None for troubles of the worker itself.
    - `emit_interval` (0.05 s): the least time between two writes of a job's streamed text.
    - `namespace`: as the clients' (OUTLAST_NAMESPACE). `name`: shown in the list of workers (host:pid).
    - `require_queue`: refuse to start (ConfigurationError) for a queue whose rules were never set in the database, by
      ``outlast queue set``. Rules that are there count over `lease` and over what the queue declares.
    - `health`: PORT (of loopback) or HOST:PORT where /livez, /readyz and /metrics are answered while it runs; see
      `outlast_worker.health`. ConfigurationError if that is taken.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        concurrency: int | None = None,
        lease: Duration | None = None,
        heartbeat: Duration | None = None,
        poll: Duration = 1.0,
        block: Duration | None = None,
        grace: Duration | None = None,
        is_retryable: Callable[[BaseException], bool] | None = None,
        on_error: Callable[[BaseException, JobContext[Any] | SyncJobContext[Any] | None], object] | None = None,
        emit_interval: Duration | None = None,
        economy: bool | None = None,
        namespace: str | None = None,
        name: str | None = None,
        require_queue: bool = False,
        health: int | str | None = None,
    ) -> None:
        if concurrency is not None:
            check_count(concurrency, "concurrency", most=MAX_CONCURRENCY)
        if heartbeat is not None and lease is not None:
            check_heartbeat(heartbeat, to_ms(lease, "lease"), f"lease={lease!r}")
        self.redis_url = redis_url
        self.concurrency = concurrency
        self.grace = None if grace is None else _seconds(grace, "grace", least=0)
        self.namespace = namespace
        self.name = name
        self.require_queue = require_queue
        self.health = health
        if health is not None:
            parse_address(str(health))
        self._lease = lease
        self._heartbeat = heartbeat
        self._poll = _seconds(poll, "poll")
        self._block = None if block is None else _seconds(block, "block")
        self._emit_interval = None if emit_interval is None else _seconds(emit_interval, "emit_interval", least=0)
        self._economy = economy
        self._is_retryable = is_retryable or policy.is_retryable
        self._on_error = on_error
        self._registrations: dict[str, Registration] = {}
        self._schedules: dict[tuple[str, str], Schedule] = {}
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._task: asyncio.Task[int] | None = None
        self._starting = False
        self._wanted: str | None = None
        """A stop that came while there was nothing to stop yet: "stop" or "now"."""

    def __repr__(self) -> str:
        return f"Worker(queues={list(self._registrations)})"

    def handles(self, queue: Queue[P, R], *, concurrency: int | None = None) -> Handles[P, R]:
        """Declare the handler of a queue: ``async def run(job: JobContext[P]) -> R``, or a plain function of a
        `SyncJobContext[P]`, which runs in a thread of its own.

        `concurrency`: jobs of this queue at a time; without it the worker's, or 1. Raises InvalidArgumentError for
        what cannot be a handler, and for a queue that has one.
        """
        if not isinstance(cast("object", queue), Queue):
            raise InvalidArgumentError(f"handles({queue!r}): give a Queue, as in @worker.handles(Queue('name'))")
        if concurrency is not None:
            check_count(concurrency, "concurrency", most=MAX_CONCURRENCY)

        def register(handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
            if queue.name in self._registrations:
                raise InvalidArgumentError(f"queue {queue.name!r} has a handler already; one queue, one handler")
            self._registrations[queue.name] = Registration(
                queue, handler, concurrency=concurrency, lease=self._lease, heartbeat=self._heartbeat
            )
            return handler

        return cast("Handles[P, R]", register)

    def schedule(
        self,
        queue: Queue[P, R],
        payload: P | Callable[[datetime], P],
        *,
        name: str,
        cron: str | None = None,
        at: datetime | None = None,
        timezone: str = "UTC",
        catch_up: int = 1,
        priority: int = 0,
        max_attempts: int | None = None,
        timeout: Duration | None = None,
        expires: Duration | None = None,
        deadline: Duration | None = None,
        result_ttl: Duration | None = None,
        owner: str | None = None,
        webhook: str | None = None,
        budget: Mapping[str, float] | None = None,
    ) -> None:
        """Make a job at set times while workers with this schedule run: each time one job, however many they are.

        - `payload`: what the job gets, or a function of the due time (UTC) that gives it.
        - `name`: of the schedule, unique in its queue. A run's id is ``name@2026-12-01T08:00:00Z``. While the name
          stays, the schedule's times may change.
        - `cron`: five fields, minute, hour, day, month, weekday, in `timezone`. Needs the extra `schedules`. Or `at`:
          one time, an aware datetime.
        - `catch_up`: runs that are made up for when no worker was there at their time: the latest so many, oldest
          first. 1 by default; 0 leaves missed ones out. A run up to 60 s late counts as on time. What was due before
          the schedule was first seen in the database is not made up.
        - The rest is as for `enqueue`.

        Raises InvalidArgumentError for a wrong rule, ConfigurationError without the extra.
        """
        from .schedules import make_schedule

        check_queue(queue)
        made = make_schedule(
            queue,
            payload,
            name=name,
            cron=cron,
            at=at,
            timezone=timezone,
            catch_up=catch_up,
            options={
                "priority": priority,
                "delay": 0.0,
                "max_attempts": max_attempts,
                "timeout": timeout,
                "expires": expires,
                "deadline": deadline,
                "result_ttl": result_ttl,
                "owner": owner,
                "webhook": webhook,
                "budget": budget,
            },
        )
        if (queue.name, name) in self._schedules:
            raise InvalidArgumentError(f"queue {queue.name!r} has a schedule {name!r} already; give each its own name")
        self._schedules[queue.name, name] = made

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self, *, burst: bool = False) -> None:
        """Work until SIGTERM or SIGINT, then let running jobs finish.

        A second signal, or the end of the grace, hands them back to other workers; then it ends with SystemExit(1), so
        that a supervisor sees the difference. A third one ends the process where it stands. The signal handlers that
        were there before are put back. `burst`: end when no job is waiting or due; a queue that is
        paused until somebody resumes it is not waited for, one whose pause has an end is.

        Raises AuthError for a wrong password and TransportError for a TLS mismatch; a server that is not there yet is
        waited for. Runs on uvloop where that is installed (extra `fast`).
        """
        previous: dict[int, Any] = {}
        count = 0

        def on_signal(number: int, _: FrameType | None) -> None:
            nonlocal count
            count += 1
            if count > 2:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            self.stop(now=count > 1)

        self._starting = True
        if threading.current_thread() is threading.main_thread():
            previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            with asyncio.Runner(loop_factory=_fast_loop()) as runner:
                handed_back = runner.run(self._live(burst))
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if handed_back:
            raise SystemExit(1)

    def serve(self, *, burst: bool = False) -> Coroutine[Any, Any, None]:
        """Work until stop() is called, inside a running application: ``await worker.serve()``. Touches no signals.

        Cancelling it hands running jobs back. Raises as `run` does.
        """
        self._starting = True  # from the call on, so that a stop() before the first step is not lost

        async def serve() -> None:
            await self._live(burst)

        return serve()

    async def _live(self, burst: bool) -> int:
        return await self._finish(self._begin(burst))

    def _begin(self, burst: bool) -> Engine:
        with self._lock:
            if self._engine is not None:
                raise ConfigurationError("this worker is running already; make another one")
            engine = self._engine = Engine(
                self._settings(),
                list(self._registrations.values()),
                burst=burst,
                schedules=list(self._schedules.values()),
            )
            wanted, self._wanted, self._starting = self._wanted, None, False
        if wanted is not None:
            engine.stop(now=wanted == "now")
        return engine

    async def _finish(self, engine: Engine) -> int:
        try:
            await engine.run()
        finally:
            with self._lock:
                self._engine = None
        return engine.handed_back

    def stop(self, *, now: bool = False) -> None:
        """Ask the worker to end, and return at once: no new jobs, running ones finish. With `now` they are handed back.

        For any thread and for signal handlers. run(), serve() and ``async with`` return once it has ended. Without
        effect on a worker that does not run.
        """
        engine = self._engine
        if engine is None:
            if self._starting:
                self._wanted = "now" if now or self._wanted == "now" else "stop"
            return
        with suppress(RuntimeError):  # its loop has ended, and so has the worker
            engine.loop.call_soon_threadsafe(lambda: engine.stop(now=now))

    async def __aenter__(self) -> Worker:
        engine = self._begin(False)
        task = self._task = engine.loop.create_task(self._finish(engine), name="outlast worker")
        started = engine.loop.create_task(engine.started.wait())
        await asyncio.wait({started, task}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if task.done():
            await task
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if task is None:
            return
        self.stop()
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            self.stop(now=True)
            await asyncio.wait([task])
            raise

    def _settings(self) -> Settings:
        if not self._registrations:
            raise ConfigurationError("the worker has no handlers; declare one with @worker.handles(queue)")
        for registration in self._registrations.values():
            registration.slots = registration.concurrency or self.concurrency or 1
        url = self.redis_url or next((found for name in URL_NAMES if (found := lookup(os.environ, name))), None)
        if url is None:
            raise ConfigurationError("no database: set OUTLAST_REDIS_URL or REDIS_URL, or give redis_url")
        pace = THRIFTY if (is_metered(url) if self._economy is None else self._economy) else PROMPT
        return Settings(
            url=url,
            pace=pace,
            prefix=find_namespace(self.namespace, os.environ),
            name=self.name or f"{socket.gethostname()}:{os.getpid()}",
            concurrency=self.concurrency or sum(registration.slots for registration in self._registrations.values()),
            poll=self._poll,
            block=pace.block if self._block is None else self._block,
            grace=self.grace,
            emit_interval=pace.emit_interval if self._emit_interval is None else self._emit_interval,
            is_retryable=self._is_retryable,
            on_error=self._on_error,
            require_queue=self.require_queue,
            health=None if self.health is None else str(self.health),
        )


def _seconds(value: Duration, name: str, *, least: float = 0.001) -> float:
    return to_ms(value, name, least=least) / 1000


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """A seventh less CPU for each job; None: asyncio's own loop."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return None
    return new_event_loop
