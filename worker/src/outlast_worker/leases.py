"""Leases, renewed by a thread: a handler that blocks the event loop, or computes for minutes, keeps its job."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import inf
from typing import Any, Literal, TypeVarTuple

from outlast.errors import OutlastError, StoreFullError, TransportError
from outlast.protocol import Keys, holding
from outlast.protocol.calls import Call
from outlast.protocol.holding import Reserved

from .tcp import SilentError, TcpTransport

__all__ = ["Answer", "Lease", "Leases"]

Answer = holding.Held | Literal["unreachable"]

Ts = TypeVarTuple("Ts")

REPEAT = 0.4
"""Seconds until a renewal that failed is tried again: a lapsed lease is taken after a grace of 1 s."""
SILENCE = 60.0
"""Seconds, at most three leases, for which a job goes on after its lease while the database is connected and silent.

A database that stands still hands nothing to anybody; when it goes on, owners get their leases back. One that cannot be
reached may be serving others: then the job stops when its lease runs out.
"""
BLOCKED = 30.0
"""Seconds of an event loop that answers nothing after which the worker counts as unhealthy."""
MOST = 200
"""Jobs renewed in one call."""


class Lease:
    """One job that this worker holds. `renewed` and `until` are on the monotonic clock, in seconds."""

    __slots__ = ("beat", "job", "keys", "ms", "renewed", "report", "until")

    def __init__(self, keys: Keys, job: Reserved, *, ms: int, beat: float, report: Callable[[Answer], None]) -> None:
        self.keys = keys
        self.job = job
        self.ms = ms
        self.beat = beat
        """Seconds after which the thread renews it, unless a flush did."""
        self.renewed = time.monotonic()
        self.until = inf
        """Not renewed after this: an attempt that ran out of time must not hold its job."""
        self.report = report
        """Called on the event loop with an answer other than ok; `unreachable`: the time without one is over."""

    def deadline(self, failure: OutlastError) -> float:
        """When to stop, if all renewals until then go on failing like this."""
        cut_off = isinstance(failure, TransportError) and not isinstance(failure, SilentError)
        return self.renewed + self.ms / 1000 + (0 if cut_off else min(SILENCE, 3 * self.ms / 1000))

    @property
    def lapsed(self) -> bool:
        """Whether somebody else may have the job, as far as this process can know."""
        return time.monotonic() - self.renewed >= self.ms / 1000


class Leases:
    """The thread and the leases that it renews, all that are due in one round trip."""

    def __init__(
        self,
        url: str,
        loop: asyncio.AbstractEventLoop,
        *,
        timeout: float,
        nap: float,
        trouble: Callable[[OutlastError], None],
        blocked: Callable[[float], Sequence[Call[Any]]],
        recovered: Callable[[], object],
    ) -> None:
        """`nap`: seconds after which the thread looks for new leases, a part of the shortest beat. Were it woken for
        each, it would take the interpreter from a job that is about to start.
        """
        self._transport = TcpTransport(url, timeout=timeout)
        self._nap = nap
        self._loop = loop
        self._trouble = trouble
        self._blocked = blocked
        self._recovered = recovered
        self._asked: float | None = None
        """When the loop was last asked for a sign of life that it still owes."""
        self._told = False
        self._failure: OutlastError | None = None
        """What the latest renewal came to."""
        self._leases: set[Lease] = set()
        self._changed = threading.Condition()
        self._stopped = False
        self._next = inf
        self._thread: threading.Thread | None = None
        self.ended = asyncio.Event()

    def add(self, lease: Lease) -> None:
        with self._changed:
            self._leases.add(lease)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="outlast leases", daemon=True)
                thread.start()  # the system may have no more threads just now; the next lease tries again
                self._thread = thread
            elif lease.renewed + lease.beat < self._next:
                self._changed.notify()

    def remove(self, lease: Lease) -> None:
        with self._changed:
            self._leases.discard(lease)

    def stop(self) -> None:
        """End the thread; `ended` is set when it has. It may be in the middle of a call that takes its time."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is None:
            self.ended.set()

    def _run(self) -> None:
        relief = False
        try:
            while True:
                with self._changed:
                    while not self._stopped and (wait := self._wait()) > 0:
                        self._changed.wait(min(wait, self._nap))
                    if self._stopped:
                        return
                    due = self._due()
                try:
                    self._renew(due, relief)
                    self._failure, relief = None, False
                    self._watch_loop()
                except OutlastError as error:
                    relief = isinstance(error, StoreFullError)
                    self._failure = error
                    self._tell(self._trouble, error)
                    self._tell(self._set_deadlines, error)
                    with self._changed:
                        if not self._stopped:
                            self._changed.wait(REPEAT)
        finally:
            self._transport.close()
            self._tell(self.ended.set)

    def _wait(self) -> float:
        """Seconds until the next renewal is due."""
        now = time.monotonic()
        due = min((lease.renewed + lease.beat for lease in self._leases if lease.until > now), default=inf)
        if self._asked is not None and not self._told:
            due = min(due, self._asked + BLOCKED)
        self._next = min(due, now + self._nap)
        return due - now

    def _due(self) -> list[Lease]:
        # Those that are nearly due go along: one call for many is cheaper than many calls.
        now = time.monotonic()
        return [lease for lease in self._leases if lease.until > now and now - lease.renewed >= lease.beat * 0.75]

    def _renew(self, due: list[Lease], relief: bool) -> None:
        groups: defaultdict[tuple[str, int], list[Lease]] = defaultdict(list)
        for lease in due:
            groups[(lease.keys.base, lease.ms)].append(lease)
        parts = [group[at : at + MOST] for group in groups.values() for at in range(0, len(group), MOST)]
        now = time.monotonic()
        answers = self._transport.send_many(
            [holding.renew(part[0].keys, [x.job for x in part], lease_ms=part[0].ms, relief=relief) for part in parts]
        )
        for part, held in zip(parts, answers, strict=True):
            for lease, answer in zip(part, held, strict=True):
                if answer == "lost":
                    self.remove(lease)
                else:
                    lease.renewed = max(lease.renewed, now)
                if answer != "ok":
                    self._tell(lease.report, answer)

    def _set_deadlines(self, failure: OutlastError) -> None:
        with self._changed:
            leases = list(self._leases)
        for lease in leases:
            self._loop.call_later(max(0, lease.deadline(failure) - time.monotonic()), self._end, lease)

    def _end(self, lease: Lease) -> None:
        failure = self._failure
        if failure is not None and lease in self._leases and time.monotonic() >= lease.deadline(failure):
            lease.report("unreachable")

    def _watch_loop(self) -> None:
        now = time.monotonic()
        if self._asked is None:
            self._asked = now
            self._tell(self._answer)
        elif now - self._asked >= BLOCKED and not self._told:
            self._told = True
            self._transport.send_many(self._blocked(now - self._asked))

    def _answer(self) -> None:
        self._asked = None
        if self._told:
            self._told = False
            self._recovered()

    def _tell(self, what: Callable[[*Ts], object], *arguments: *Ts) -> None:
        with suppress(RuntimeError):  # the loop has ended; nobody is left to be told
            self._loop.call_soon_threadsafe(what, *arguments)
