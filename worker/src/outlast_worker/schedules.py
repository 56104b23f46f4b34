"""Jobs at set times: `Worker.schedule`. Needs the extra `schedules` (cronsim) for cron rules.

Any number of workers may run the same schedules. For each due time each of them tells the database the schedule's name
and the time, and in one step the script makes the job unless one was made for this time or a later one. So neither
several workers, nor a crash, nor a lost reply makes a second job. What counts as now is the database's clock.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from outlast import AsyncClient, InvalidArgumentError, Queue
from outlast._checks import check_count, check_id
from outlast.errors import ConfigurationError, OutlastError
from outlast.observe import enqueuing
from outlast.protocol import Call, Keys
from outlast.protocol.calls import CLOCK
from outlast.protocol.wire import items, text
from outlast.transport import AsyncTransport

__all__ = ["LATE", "Schedule", "Scheduler", "make_schedule", "rule_of", "runs"]

LATE = 60.0
"""Seconds after its time within which a run is not missed yet, only late."""
LOOK = 300.0
"""Seconds after which a worker looks at the clock again, however far off the next run is."""
MAX_CATCH_UP = 100

logger = logging.getLogger("outlast.worker")


@dataclass(frozen=True)
class Schedule:
    """A schedule as declared."""

    queue: Queue[Any, Any]
    name: str
    cron: str | None
    at: datetime | None
    timezone: str
    catch_up: int
    payload: Any = field(repr=False)
    """Or a function of the due time that gives it."""
    options: Mapping[str, Any] = field(repr=False)

    @property
    def rule(self) -> str:
        """As the database and the listing have it."""
        return f"at {self.at.isoformat()}" if self.at is not None else f"cron {self.cron} {self.timezone}"

    def missed(self, last: datetime, now: datetime) -> list[datetime]:
        """What is to be made now, if the latest run that was made was due at `last`: oldest first."""
        found: list[datetime] = []
        missed = 0
        for due in runs(self.rule, now, back=True):
            if due <= last or ((late := (now - due).total_seconds() > LATE) and missed == self.catch_up):
                break
            missed += late
            found.append(due)
        return found[::-1]

    def next(self, now: datetime) -> datetime | None:
        """The first run after `now`."""
        return next(iter(runs(self.rule, now)), None)

    def id(self, due: datetime) -> str:
        """The id of the job that is this run."""
        return f"{self.name}@{due.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def make_schedule(
    queue: Queue[Any, Any],
    payload: Any,
    *,
    name: str,
    cron: str | None,
    at: datetime | None,
    timezone: str,
    catch_up: int,
    options: Mapping[str, Any],
) -> Schedule:
    """Check what was declared. Raises InvalidArgumentError, or ConfigurationError without the extra."""
    check_id(name, "name")
    check_count(catch_up, "catch_up", least=0, most=MAX_CATCH_UP)
    if (cron is None) == (at is None):
        raise InvalidArgumentError(f"schedule {name!r} has both of cron and at, or none; give one of them")
    if at is not None and at.tzinfo is None:
        raise InvalidArgumentError(f"schedule {name!r}: at={at!r} has no time zone; give an aware datetime")
    if at is not None:
        at = at.astimezone(UTC).replace(microsecond=0)
    elif len(str(cron).split()) != 5:
        raise InvalidArgumentError(
            f"schedule {name!r}: cron={cron!r} has not the five fields minute, hour, day, month, weekday"
        )
    else:
        cron = " ".join(str(cron).split())
    schedule = Schedule(queue, name, cron, at, timezone, catch_up, payload, options)
    # What is wrong with the rule, the payload or the options is said now, not when the first run is due.
    schedule.next(datetime.now(UTC))
    if not callable(payload):
        AsyncClient(namespace="").queue(queue)._order(
            payload, id=name, idempotency_key=None, idempotency_ttl=None, **options
        )
    return schedule


def rule_of(text: str) -> tuple[str, str]:
    """A stored rule for people: when, and in which time zone."""
    kind, _, rest = text.partition(" ")
    if kind == "at":
        return rest, "UTC"
    cron, _, timezone = rest.rpartition(" ")
    return cron, timezone


def runs(rule: str, now: datetime, *, back: bool = False) -> Iterable[datetime]:
    """The times at which a rule is due after `now`, or with `back` those up to it, latest first: datetimes in UTC.

    Of a clock change (Debian's rule): what falls into the hour that is skipped runs right after it; what falls into the
    hour that comes twice runs once, unless its hour or minute is a star, which counts real time.
    """
    when, timezone = rule_of(rule)
    if rule.startswith("at "):
        at = datetime.fromisoformat(when)
        return [at] if (at <= now) == back else []
    try:
        from cronsim import CronSim, CronSimError
    except ImportError:
        raise ConfigurationError("cron schedules need cronsim: pip install 'outlast-worker[schedules]'") from None
    try:
        zone = ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidArgumentError(f"timezone={timezone!r} is unknown; give one such as Europe/Berlin") from None
    # A run that is due in this very second is among those up to now.
    start = now.astimezone(zone) + timedelta(seconds=1 if back and not now.microsecond else 0)
    try:
        found = CronSim(when, start, reverse=back)
    except CronSimError as error:
        raise InvalidArgumentError(f"cron={when!r}: {error}") from None
    return (due.astimezone(UTC) for due in found)


class Scheduler:
    """Makes the runs of a worker's schedules."""

    def __init__(
        self, transport: AsyncTransport, prefix: str, schedules: list[Schedule], trouble: Callable[[OutlastError], None]
    ) -> None:
        self._transport = transport
        self._client = AsyncClient(transport=transport)
        self._client._prefix = prefix
        self._prefix = prefix
        self._schedules = schedules
        self._trouble = trouble
        self._known = False

    async def run(self) -> None:
        """For ever."""
        pause = 0.0
        while True:
            await asyncio.sleep(pause)
            try:
                pause = await self.tick()
            except OutlastError as error:
                self._trouble(error)
                pause = random.uniform(1, 3)

    async def tick(self, at: datetime | None = None) -> float:
        """Make what is due. The seconds until the next look. `at`: instead of the server's clock."""
        now = at or datetime.fromtimestamp(await self._transport.send(CLOCK) / 1000, UTC)
        if not self._known:
            await self._declare(now)
            self._known = True
        names = [(Keys(self._prefix + one.queue.name), one.name) for one in self._schedules]
        lasts = await self._transport.send_many(
            [Call(("HMGET", keys.schedules, f"last:{name}"), _last) for keys, name in names]
        )
        pause = LOOK
        for schedule, last in zip(self._schedules, lasts, strict=True):
            if last is None:
                self._known = False  # deleted: it begins anew
                return 0.0
            for due in schedule.missed(last, now):
                await self._make(schedule, due)
            following = schedule.next(now)
            if following is not None:
                pause = min(pause, (following - now).total_seconds())
        return pause

    async def _declare(self, now: datetime) -> None:
        """What was due before a schedule was first seen was not missed."""
        commands: list[Call[Any]] = []
        for one in self._schedules:
            key = Keys(self._prefix + one.queue.name).schedules
            commands.append(Call(("HSETNX", key, f"last:{one.name}", str(_ms(now))), int))
            commands.append(Call(("HSET", key, f"spec:{one.name}", one.rule), int))
        await self._transport.send_many(commands)

    async def _make(self, schedule: Schedule, due: datetime) -> None:
        jobs = self._client.queue(schedule.queue)
        sent = False
        try:
            with enqueuing(schedule.queue.name) as observed:
                order = jobs._order(
                    schedule.payload(due) if callable(schedule.payload) else schedule.payload,
                    id=schedule.id(due),
                    idempotency_key=None,
                    idempotency_ttl=None,
                    schedule=(schedule.name, _ms(due)),
                    trace=observed.trace,
                    **schedule.options,
                )
                sent = True
                answer = await self._transport.send(order.call)
                observed.answered(answer)
        except Exception:
            if sent:
                raise
            # The others go on. This run is tried again at each look, and counts as missed meanwhile.
            logger.exception("schedule %s: the payload of the run at %s cannot be made", schedule.name, due)
            return
        if not answer.deduplicated:
            logger.info("schedule %s: job %s", schedule.name, answer.id)


def _ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)


def _last(reply: Any) -> datetime | None:
    [value] = items(reply)
    return None if value is None else datetime.fromtimestamp(int(text(value)) / 1000, UTC)
