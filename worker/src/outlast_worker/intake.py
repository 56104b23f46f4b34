"""How jobs come in: `Intake` takes the jobs of one queue, `Bells` waits for the doorbells of all of them."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from outlast.errors import AuthError, OutlastError, ServerError, StoreFullError, TransportError
from outlast.protocol import calls, holding
from outlast.protocol.calls import CTL_TTL_MS, Call
from outlast.protocol.holding import Reservation
from outlast.protocol.keys import LATER
from outlast.protocol.wire import items, text

from .attempt import Attempt

if TYPE_CHECKING:
    from outlast.rules import Rules

    from .engine import Engine
    from .registration import Registration

__all__ = ["Bells", "Clock", "Intake"]

logger = logging.getLogger("outlast.worker")

FRESH_MS = 1000
"""How long a reserve may be under way. One that reaches the server later takes nothing: its repeat may have run."""
MOST = 100
"""Jobs taken by one call."""
HALF = 8
"""From twice as many slots on, one call fills half of them, and two may be under way: while one half runs, the database
prepares the other. Taken all at once, jobs that end together make worker and database wait for each other in turns."""
FULL_PAUSE = 5.0
"""Seconds, at most, until a database that had no memory for a write is asked whether it has."""
QUIET = 10
"""Blocks after which a queue gets a real look, also one that is paused, at its rate, or shows nothing due."""
RETRY_BLOCKING = 60.0
"""Seconds after which a server that refuses blocking reads is asked again."""


class Clock:
    """An estimate of the server's clock; late by at most the way of the latest answer."""

    def __init__(self) -> None:
        self._offset: float | None = None

    def observe(self, server_ms: int) -> None:
        self._offset = server_ms - time.monotonic() * 1000

    def now_ms(self) -> int:
        offset = time.time() * 1000 - time.monotonic() * 1000 if self._offset is None else self._offset
        return int(time.monotonic() * 1000 + offset)


class Intake:
    """Takes jobs of one queue whenever that can bring any.

    - After a take that filled every free slot there may be more: the next one goes out when a slot is free (`hungry`).
    - Otherwise the doorbell covers what is enqueued, and a local timer what becomes due.
    - A queue that is limited gives nothing. When its pause or its rate ends is known, so only the timer counts; that a
      job elsewhere has ended, or a pause was lifted, shows in its list `room`.
    """

    def __init__(self, engine: Engine, registration: Registration) -> None:
        self.registration = registration
        self.keys = registration.keys(engine.prefix)
        self.ctl = self.keys.ctl(engine.id)
        self.attempts: dict[tuple[str, str], Attempt] = {}
        self.running = 0
        self.hungry = True
        self.limited: holding.Limited = ""
        self.terms = holding.Terms()
        self.drained = False
        """Whether the latest take found nothing more that can run now."""
        self.bell = False
        self.due = False
        self.glance = False
        """Whether it is enough to read what is due: a reserve costs twice as much."""
        self.wake = asyncio.Event()
        self.more = asyncio.Event()
        """A second take is worth it: a half of the slots is free while the first is under way."""
        self.looked = asyncio.Event()
        self._engine = engine
        self.stopped = False
        self.step_ends = inf
        """When the step that it is at should be done, on the monotonic clock: now, or never while it waits."""
        self._most = min(MOST, max(HALF, -(-registration.slots // 2)))
        self._booked = 0
        self._request = 0
        self._fresh_ms = FRESH_MS
        self._hint: asyncio.TimerHandle | None = None
        self._armed_at = inf
        """For what time, on the server's clock in ms, the last take said to come back."""
        self._timers: set[asyncio.TimerHandle] = set()
        self._loop = asyncio.get_running_loop()

    @property
    def free(self) -> int:
        """Jobs that may be started now."""
        return max(0, min(self.registration.slots - self.running - self._booked, self._engine.free_slots()))

    @property
    def looking(self) -> bool:
        return self._booked > 0

    @property
    def ear(self) -> str | None:
        """The list that would be of use, if any."""
        if self.stopped or self.free == 0:
            return None
        return self.keys.room if self.limited else None if self.hungry else self.keys.signal

    @property
    def lease_ms(self) -> int:
        return self.terms.lease_ms or self.registration.lease_ms

    def release_slot(self) -> None:
        self.running -= 1
        self._think_of_more()
        if self.terms.concurrency is not None:
            self.hungry = self.hungry or self.limited == "room"
            if self._engine.stopping or self._engine.shared:
                self._engine.aside(self.make_room())  # this worker may not use it
        self._engine.slot_freed()

    def obey(self, rules: Rules) -> None:
        """What the queue's rules are before the first take."""
        lease, timeout, result_ttl = (
            None if seconds is None else round(seconds * 1000)
            for seconds in (rules.lease, rules.timeout, rules.result_ttl)
        )
        self.terms = holding.Terms(lease, timeout, result_ttl, rules.max_payload, rules.concurrency, rules.owner_cap)

    def due_in(self, seconds: float) -> None:
        """Look again then: something becomes due."""
        handle: asyncio.TimerHandle

        def fire() -> None:
            self._timers.discard(handle)
            self.look()

        handle = self._loop.call_later(seconds, fire)
        self._timers.add(handle)

    def look(self) -> None:
        """Look now, even with no slot free: promoting what is due and reclaiming what is lost serves all workers."""
        self.due, self.glance = True, False
        self.wake.set()

    async def run(self) -> None:
        """Take jobs until the worker stops."""
        try:
            while True:
                self.step_ends = inf
                await self.wake.wait()
                self.step_ends = time.monotonic()
                self.wake.clear()
                if self._engine.stopping:
                    break
                await self._look()
                self.looked.set()
            # First, so that a bell which this worker's own read hears from now on is passed on.
            self.stopped = True
            if self._armed_at < inf:
                await self._give_watch_up()
            elif self.bell:
                await self.ring()
            if self.limited:
                await self.make_room()
        finally:
            self.stopped = True
            self.looked.set()
            for handle in [*self._timers, *([self._hint] if self._hint else [])]:
                handle.cancel()

    async def run_second(self) -> None:
        """The other of two takes at a time."""
        while not self._engine.stopping:
            await self.more.wait()
            self.more.clear()
            k = min(self.free, self._most)
            if k > 0 and self.looking and self.hungry and not self.limited:
                await self._take(k, bell=False, line=1)

    def _think_of_more(self) -> None:
        if self._booked and self.hungry and not self.limited and self.free >= self._most:
            self.more.set()

    async def _look(self) -> None:
        k = min(self.free, self._most)
        bell, due, glance = self.bell, self.due, self.glance
        self.bell = self.due = self.glance = False
        if glance and not bell and not self.limited and await self._nothing_due(k):
            self.hungry = self.hungry or k == 0
            return
        if k == 0 and not due:
            self.hungry = True
            if self.limited == "room":
                await self.make_room()
            if bell:  # it came while the last slot was filled; somebody else may have one
                await self.ring()
            return
        await self._take(k, bell=bell, line=0)

    async def _take(self, k: int, *, bell: bool, line: int) -> None:
        engine = self._engine
        self._booked += k
        engine.booked += k
        self._think_of_more()
        try:
            answer = await self._reserve(k, bell, line)
        finally:
            self._booked -= k
            engine.booked -= k
        if answer is None:
            engine.unbooked(self)
            return
        self.terms = answer.terms or self.terms
        for job in answer.jobs:
            self._begin(Attempt(engine, self, job))
        taken = len(answer.jobs)
        self.limited = answer.limited
        self.hungry = taken == k and not self.limited
        # A pause that somebody has to end is not waited for: what it holds back cannot run, now or at any time known.
        endless = self.limited == "paused" and answer.hint_ms < 0
        self.drained = taken < k and answer.hint_ms != 0 and (not self.limited or endless)
        if answer.hint_ms == 0:
            self.look()
        self._arm(answer.hint_ms)
        self._armed_at = answer.server_now_ms + answer.hint_ms if answer.hint_ms > 0 else inf
        if self.hungry and self.free:
            self.wake.set()
        engine.unbooked(self)
        engine.looked()

    def _arm(self, hint_ms: float) -> None:
        """Look again when something becomes due; 0 or less: nothing is known."""
        if self._hint is not None:
            self._hint.cancel()
            self._hint = None
        if hint_ms > 0:
            self._hint = self._loop.call_later(hint_ms / 1000, self.look)

    async def _nothing_due(self, k: int) -> bool:
        try:
            scheduled, leases, ready = await self._engine.transport.send_many(holding.glance(self.keys))
        except OutlastError:
            return False  # the reserve will say what is wrong
        self._engine.reachable = True
        # What another worker waits for: the next due time, or a lapsed lease that it has marked with a fraction.
        if abs(scheduled - self._armed_at) > 2:
            scheduled += LATER
        if leases % 1 and abs(leases - self._armed_at) > 2:
            leases += LATER
        earliest = min(scheduled, leases)
        ahead = math.ceil(earliest - self._engine.clock.now_ms()) if earliest < inf else -1
        if (ready and k) or (earliest < inf and ahead <= 0):
            return False
        self._arm(ahead)
        return True

    def _begin(self, attempt: Attempt) -> None:
        self.running += 1
        key = (attempt.job.token, attempt.job.id)
        self.attempts[key] = attempt
        self._engine.begin(attempt, lambda: self.attempts.pop(key, None))

    async def _give_watch_up(self) -> None:
        """This worker may be the one that waits for what is due next; another has to, now."""
        try:
            ring = Call(("LPUSH", self.keys.signal, "1"), lambda _: None)
            await self._engine.transport.send_many([Call(("DEL", self.keys.watch), lambda _: None), ring])
        except OutlastError as error:
            self._engine.trouble(error)

    async def ring(self) -> None:
        """Pass a doorbell on to another worker."""
        try:
            await self._engine.transport.send(Call(("LPUSH", self.keys.signal, "1"), lambda _: None))
        except OutlastError as error:
            self._engine.trouble(error)

    async def make_room(self) -> None:
        """Wake another worker that waits for a limit of the queue."""
        try:
            await self._engine.transport.send_many(calls.make_room(self.keys))
        except OutlastError as error:
            self._engine.trouble(error)

    def _next_request(self) -> int:
        self._request += 1
        return self._request

    async def _reserve(self, k: int, bell: bool, line: int) -> Reservation | None:
        """Take, and repeat until it is known what was taken. None: the worker stops, or the server refused."""
        engine, queue = self._engine, self.registration.queue
        request = self._next_request()
        again, pause = False, 0.05
        while True:
            if line == 0:
                self.step_ends = time.monotonic()
            stale_at = engine.clock.now_ms() + self._fresh_ms
            call = holding.reserve(
                self.keys,
                worker=engine.id,
                request=request,
                line=line,
                k=k,
                lease_ms=self.lease_ms,
                result_ttl_ms=queue.result_ttl_ms,
                dead_ttl_ms=queue.dead_ttl_ms,
                again=again,
                stale_at_ms=stale_at,
                bell=bell,
                limited=self.limited,
            )
            try:
                answer = await engine.transport.send(call)
            except TransportError as error:
                engine.trouble(error)
                again = again or error.maybe_applied
            except OutlastError as error:
                # Refused, so nothing was taken; unless it was a repeat, whose first send may have been lucky.
                engine.trouble(error)
                if not again:
                    self.due_in(FULL_PAUSE if isinstance(error, StoreFullError) else random.uniform(0.5, 1.5))
                    return None
            else:
                engine.clock.observe(answer.server_now_ms)
                engine.reachable = True
                if not answer.stale:
                    self._fresh_ms = FRESH_MS
                    return answer
                # Nothing was taken, and what is late can take nothing any more: ask anew, with more time for the way.
                self._fresh_ms = min(self._fresh_ms * 2, FRESH_MS * 32)
                request = self._next_request()
                again = False
                continue
            if engine.stopping and not again:
                return None
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            if again:
                # The first send may still lie in a dead socket's buffer; once it is too old, it can do nothing.
                await asyncio.sleep(max(0, stale_at - engine.clock.now_ms()) / 1000 + 0.02)
            pause = min(pause * 2, 2.0)


class Bells:
    """One blocking read for the doorbells and the cancel lists of `intakes`. On a cluster each queue has its own.

    The read is never dropped: it might have a doorbell in its hands. When it should listen to more than it does, the
    worker pushes a `.` to its own list, which ends the read.
    """

    def __init__(self, engine: Engine, intakes: Sequence[Intake]) -> None:
        self._engine = engine
        self._intakes = list(intakes)
        self._heard: dict[Intake, str | None] | None = None
        self._quiet = 0
        self._woken = False
        self._polls_until = 0.0
        self.step_ends = inf

    def needs_waking(self, intake: Intake) -> bool:
        """Whether the read in flight is deaf to what would be of use to a queue."""
        if self._heard is None or self._woken or intake not in self._heard:
            return False
        return intake.ear is not None and intake.ear != self._heard[intake]

    async def wake(self) -> None:
        """End the read in flight."""
        if self._heard is None or self._woken:
            return
        self._woken = True
        ctl = self._intakes[0].ctl
        try:
            await self._engine.transport.send_many(
                [
                    Call(("RPUSH", ctl, "."), lambda _: None),
                    Call(("PEXPIRE", ctl, str(CTL_TTL_MS)), lambda _: None),
                ]
            )
        except OutlastError as error:
            self._woken = False
            self._engine.trouble(error)

    async def run(self) -> None:
        pause = 0.1
        for intake in self._intakes:  # what there is comes first; then it is known what to listen to
            await intake.looked.wait()
        while not self._engine.drained:
            if time.monotonic() < self._polls_until:
                await asyncio.sleep(self._engine.poll * random.uniform(0.9, 1.1))
                await self._look([intake for intake in self._worth_a_look() if intake.free], glance=self._quiet > 0)
                continue
            self._heard = {intake: intake.ear for intake in self._intakes}
            keys = [intake.ctl for intake in self._intakes] + [ear for ear in self._heard.values() if ear is not None]
            self._intakes.append(self._intakes.pop(0))  # the next read has another queue in front
            self.step_ends = time.monotonic() + self._engine.block
            try:
                answer = await self._engine.transport.send(_blpop(keys, self._engine.block), block=self._engine.block)
                self._engine.reachable = True
            except TransportError as error:
                self._engine.trouble(error)
                await asyncio.sleep(pause * random.uniform(0.5, 1.5))
                pause = min(pause * 2, self._engine.poll)
                await self._look(self._intakes)  # a bell may have been lost with the connection
                continue
            except ServerError as error:
                if error.code == "CROSSSLOT" and len(self._intakes) > 1:
                    self._engine.split_bells()
                    return
                self._refused(error)
                continue
            finally:
                self._heard, self._woken = None, False
                self.step_ends = inf  # a queue that does not come back from its look says so itself
            pause = 0.1
            if answer is None:
                await self._look(self._worth_a_look(), glance=self._quiet > 0)
            else:
                await self._hear(*answer)

    def _worth_a_look(self) -> list[Intake]:
        # A pause costs nothing to wait for: its end is known, or room is made. Tokens can get lost, though.
        self._quiet = (self._quiet + 1) % QUIET
        return [intake for intake in self._intakes if intake.limited in ("", "room") or self._quiet == 0]

    async def _hear(self, key: str, value: str) -> None:
        for intake in self._intakes:
            if key == intake.keys.signal:
                if intake.stopped:
                    await intake.ring()
                    return
                intake.bell = True
                await self._look([intake], due=False)
                return
            if key == intake.keys.room:
                if intake.stopped:
                    await intake.make_room()
                await self._look([intake], due=False)
                return
            if key == intake.ctl and value != ".":
                token, _, id = value.partition(" ")
                attempt = intake.attempts.get((token, id))
                if attempt is not None:
                    attempt.stop("cancelled")

    async def _look(self, intakes: Sequence[Intake], *, due: bool = True, glance: bool = False) -> None:
        """Have the queues look, and wait until they did: what the next read listens to depends on it."""
        for intake in intakes:
            if not intake.stopped:
                intake.glance = glance and not intake.due
                intake.due = intake.due or due
                intake.looked.clear()
                intake.wake.set()
        for intake in intakes:
            await intake.looked.wait()

    def _refused(self, error: ServerError) -> None:
        if not self._polls_until:
            hint = " (an ACL without BLPOP?)" if isinstance(error, AuthError) else ""
            logger.warning(
                "blocking reads are refused%s: %s; polling every %g s instead, cancels arrive with the heartbeat",
                hint,
                error,
                self._engine.poll,
            )
        self._polls_until = time.monotonic() + RETRY_BLOCKING


def _blpop(keys: Sequence[str], block: float) -> Call[tuple[str, str] | None]:
    def decode(reply: Any) -> tuple[str, str] | None:
        if reply is None:
            return None
        key, value = items(reply)
        return text(key), text(value)

    # Not replayable: a read that was lost has perhaps eaten a doorbell, and that must be known.
    return Call(("BLPOP", *keys, f"{block:.3f}"), decode, replayable=False)
