"""Jobs at set times: each run once, whoever asks; what was missed; time zones. Time is an argument."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis

from outlast import ConfigurationError, InvalidArgumentError, JobInfo, Queue
from outlast.errors import OutlastError
from outlast.protocol import Keys
from outlast_worker import JobContext, Worker
from outlast_worker.schedules import Schedule, Scheduler, runs
from outlast_worker.tcp import AsyncTcpTransport

START = datetime(2026, 11, 30, 8, 30, tzinfo=UTC)
HOUR = timedelta(hours=1)


def declare(queue_name: str, **options: Any) -> Schedule:
    worker = Worker()
    given = {"name": "nightly", "cron": None if "at" in options else "0 * * * *", **options}
    worker.schedule(Queue(queue_name), given.pop("payload", {"n": 1}), **given)
    [schedule] = worker._schedules.values()
    return schedule


@pytest.fixture
async def transport(valkey_url: str) -> AsyncIterator[AsyncTcpTransport]:
    transport = AsyncTcpTransport(valkey_url)
    yield transport
    await transport.aclose()


def fail(error: OutlastError) -> None:
    raise error


class Table:
    """Several workers with one schedule, and the jobs that they made."""

    def __init__(self, transport: AsyncTcpTransport, raw: redis.Redis, keys: Keys) -> None:
        self._transport, self._raw, self._keys = transport, raw, keys

    def worker(self, *schedules: Schedule) -> Scheduler:
        return Scheduler(self._transport, "", list(schedules), fail)

    def made(self) -> list[str]:
        """The due times of the jobs, as far as they are in the ids, in the order of their turn."""
        ids: Any = self._raw.zrange(self._keys.ready, 0, -1)
        return [id.decode().partition("@")[2] for id in ids]


@pytest.fixture
def table(transport: AsyncTcpTransport, raw: redis.Redis, keys: Keys) -> Table:
    return Table(transport, raw, keys)


async def test_each_time_makes_one_job_however_many_workers_and_however_often_they_look(
    queue_name: str, table: Table
) -> None:
    workers = [table.worker(declare(queue_name)) for _ in range(5)]
    for minutes in (0, 29, 30, 30, 31, 89, 90, 95):
        now = START + timedelta(minutes=minutes)
        await asyncio.gather(*(worker.tick(now) for worker in workers))
    assert table.made() == ["2026-11-30T09:00:00Z", "2026-11-30T10:00:00Z"]


async def test_no_second_job_after_the_first_has_ended_failed_or_expired(
    queue_name: str, table: Table, raw: redis.Redis, keys: Keys
) -> None:
    worker = table.worker(declare(queue_name))
    await worker.tick(START)
    await worker.tick(START + HOUR / 2)
    raw.delete(keys.ready, keys.job("nightly@2026-11-30T09:00:00Z"))
    await table.worker(declare(queue_name)).tick(START + HOUR / 2)
    assert table.made() == []
    # Even when somebody deletes the schedules themselves, a job that is still there is not made again.
    await worker.tick(START + 1.5 * HOUR)
    assert table.made() == ["2026-11-30T10:00:00Z"]
    before = int((START + HOUR / 2).timestamp() * 1000)
    raw.hset(keys.schedules, "last:nightly", str(before))
    raw.delete(keys.ready)
    await worker.tick(START + 1.5 * HOUR)
    assert table.made() == []
    assert raw.hget(keys.schedules, "last:nightly") == str(before + 3_600_000).encode()


@pytest.mark.parametrize(
    ("catch_up", "expected"),
    [
        (0, ["13"]),
        (1, ["12", "13"]),
        (2, ["11", "12", "13"]),
        (100, ["09", "10", "11", "12", "13"]),
    ],
)
async def test_of_the_runs_that_were_missed_the_latest_are_made_up(
    queue_name: str, table: Table, catch_up: int, expected: list[str]
) -> None:
    await table.worker(declare(queue_name)).tick(START)
    # Nobody works until 13:00:59: the run of 13:00 is late, but not missed.
    await table.worker(declare(queue_name, catch_up=catch_up)).tick(datetime(2026, 11, 30, 13, 0, 59, tzinfo=UTC))
    assert [due[11:13] for due in table.made()] == expected


async def test_what_was_due_before_a_schedule_was_first_seen_is_not_made_up(queue_name: str, table: Table) -> None:
    await table.worker(declare(queue_name, cron="* * * * *", catch_up=100)).tick(START)
    assert table.made() == []


async def test_a_changed_rule_goes_on_from_the_last_run(queue_name: str, table: Table, raw: redis.Redis) -> None:
    await table.worker(declare(queue_name, cron="0 9 * * *")).tick(START)
    old, new = (declare(queue_name, cron=cron) for cron in ("0 9 * * *", "15 9 * * *"))
    for minutes in (30, 45, 60):
        await table.worker(new).tick(START + timedelta(minutes=minutes))
        await table.worker(old).tick(START + timedelta(minutes=minutes))  # a deploy that takes its time
    assert table.made() == ["2026-11-30T09:00:00Z", "2026-11-30T09:15:00Z"]
    assert raw.hget(Keys(queue_name).schedules, "spec:nightly") == b"cron 0 9 * * * UTC"


async def test_one_time_is_one_job_for_ever(queue_name: str, table: Table) -> None:
    once = declare(queue_name, at=START + HOUR, payload=lambda due: {"due": due.isoformat()})
    worker = table.worker(once)
    assert await worker.tick(START) == 300
    assert await worker.tick(START + HOUR - timedelta(seconds=9)) == 9
    for days in (0.05, 1, 400):
        await table.worker(once).tick(START + timedelta(days=days))
    assert table.made() == ["2026-11-30T09:30:00Z"]


async def test_a_payload_is_made_for_its_time_and_options_reach_the_job(
    queue_name: str, table: Table, transport: AsyncTcpTransport, valkey_url: str
) -> None:
    import outlast

    worker = table.worker(
        declare(queue_name, payload=lambda due: due.hour, owner="cron", priority=3, max_attempts=7),
        declare(queue_name, name="broken", payload=lambda due: 1 / 0),
    )
    await worker.tick(START)
    await worker.tick(START + HOUR / 2)
    async with outlast.AsyncClient(transport=transport) as client:
        job = await client.queue(Queue[Any, Any](queue_name)).get("nightly@2026-11-30T09:00:00Z")
    assert job is not None
    assert (job.payload, job.owner, job.priority, job.max_attempts) == (9, "cron", 3, 7)
    assert isinstance(job, JobInfo)


@pytest.mark.parametrize(
    ("cron", "day", "expected"),
    [
        # 2026-03-29: 02:00 becomes 03:00 in Berlin. What falls into the hour that is not there runs right after it.
        ("30 2 * * *", 29, ["01:00"]),
        ("0 9 * * *", 29, ["07:00"]),
        ("0 */6 * * *", 29, ["23:00", "04:00", "10:00", "16:00"]),
        # 2026-10-25: 03:00 becomes 02:00. What falls into the hour that is there twice runs once; a star counts time.
        ("30 2 * * *", 25, ["00:30"]),
        ("0 * * * *", 25, [f"{(h - 2) % 24:02}:00" for h in range(25)]),
        ("0 9 * * *", 25, ["08:00"]),
    ],
)
def test_clock_changes(cron: str, day: int, expected: list[str]) -> None:
    from zoneinfo import ZoneInfo

    midnight = datetime(2026, 3 if day == 29 else 10, day, tzinfo=ZoneInfo("Europe/Berlin")).astimezone(UTC)
    end = midnight + timedelta(hours=23 if day == 29 else 25)
    rule = f"cron {cron} Europe/Berlin"
    found: list[datetime] = []
    for due in runs(rule, midnight - timedelta(seconds=1)):
        if due >= end:
            break
        found.append(due)
    assert [f"{due:%H:%M}" for due in found] == expected
    back = [due for due, _ in zip(runs(rule, end - timedelta(seconds=1), back=True), found, strict=False)]
    assert back == found[::-1], "what is made up is what would have run"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cron": "* * * *"}, "has not the five fields"),
        ({"cron": "0 25 * * *"}, r"cron='0 25 \* \* \*': Bad hour"),
        ({"cron": "0 9 * * *", "timezone": "Mars/Olympus"}, "timezone='Mars/Olympus' is unknown"),
        ({"at": datetime(2026, 1, 1)}, "has no time zone"),
        ({"cron": None}, "has both of cron and at, or none"),
        ({"catch_up": 101}, "catch_up=101 is out of range"),
        ({"name": ""}, "name is empty"),
        ({"priority": 10}, "priority=10 is out of range"),
        ({"payload": object()}, "payload of queue"),
    ],
)
def test_a_wrong_schedule_is_refused_when_declared(queue_name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        declare(queue_name, **options)


def test_a_name_is_a_queues_own(queue_name: str) -> None:
    worker = Worker()
    for queue in (queue_name, queue_name + "b"):
        worker.schedule(Queue(queue), 1, name="s", cron="* * * * *")
    with pytest.raises(InvalidArgumentError, match="has a schedule 's' already"):
        worker.schedule(Queue(queue_name), 1, name="s", cron="0 * * * *")


def test_without_the_extra_the_error_says_what_to_install(queue_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cronsim", None)
    with pytest.raises(ConfigurationError, match=r"outlast-worker\[schedules\]"):
        declare(queue_name)


async def test_a_worker_runs_its_schedules(queue_name: str, valkey_url: str) -> None:
    """By the server's own clock, with several workers at once."""
    queue: Queue[Any, Any] = Queue(queue_name)
    ran: list[str] = []
    done = asyncio.Event()

    def make() -> Worker:
        worker = Worker(valkey_url)

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> None:
            ran.append(job.id)
            done.set()

        # Whole seconds, so at least one from now.
        worker.schedule(queue, "soon", name="soon", at=at)
        return worker

    at = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=2)
    async with make(), make(), make():
        async with asyncio.timeout(20):
            await done.wait()
        assert datetime.now(UTC) >= at
    assert ran == [f"soon@{at:%Y-%m-%dT%H:%M:%SZ}"]
