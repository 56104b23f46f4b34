"""`outlast acl`: each role can do its part on a real server, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from tests.servers import start_valkey

from outlast import AsyncClient, AuthError, Client, Queue, ServerError
from outlast.protocol import Call, calls
from outlast_worker import JobContext, Worker
from outlast_worker.cli.acl import Role, escaped, key_pattern, rules
from outlast_worker.cli.connect import queue_names
from outlast_worker.cli.doctor import examine

QUEUE: Queue[Any, Any] = Queue("mails", lease=5, max_attempts=1)
SECRET = "a-secret-of-this-test"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with start_valkey() as server, redis.Redis(port=server.port) as admin:
        for role in Role:
            words = [word.replace("A-LONG-RANDOM-PASSWORD", SECRET) for word in rules(role, key_pattern(None, "mails"))]
            admin.execute_command("ACL", "SETUSER", f"outlast-{role}", *words)
        yield server.port


def url(port: int, role: Role | None) -> str:
    login = "" if role is None else f"outlast-{role}:{SECRET}@"
    return f"redis://{login}127.0.0.1:{port}"


@pytest.fixture
def admin(port: int) -> Iterator[redis.Redis]:
    with redis.Redis(port=port) as connection:
        yield connection
        connection.flushall()


async def test_a_whole_life_with_every_role_at_its_place(port: int, admin: redis.Redis) -> None:
    """Streams, steps, retries, cancels, limits, webhooks, and a worker that dies: nobody lacks anything."""
    worker = Worker(url(port, Role.WORKER), concurrency=4)

    @worker.handles(QUEUE)
    async def run(job: JobContext[Any]) -> str:
        if job.payload == "fails":
            raise ValueError("no")
        for word in ("a", "b"):
            await job.emit(word)
        await job.progress(0.5)
        job.usage(tokens=2)
        return await job.step("s", lambda: "done")

    with Client(redis_url=url(port, Role.OPERATOR)) as operator:
        operator.queue(QUEUE).set_rules(concurrency=3, owner_cap=2, rate="1000/s")
        operator.queue(QUEUE).pause()
    async with (
        AsyncClient(redis_url=url(port, Role.PRODUCER)) as producer,
        AsyncClient(redis_url=url(port, Role.WATCHER)) as watcher,
        worker,
    ):
        jobs = producer.queue(QUEUE)
        good = [
            await jobs.enqueue("x", owner="o", idempotency_key=f"k{n}", webhook="https://example.com/")
            for n in range(4)
        ]
        bad = await jobs.enqueue("fails")
        later = await jobs.enqueue("x", delay=60)
        assert await jobs.cancel(later.id)
        with Client(redis_url=url(port, Role.OPERATOR)) as operator:
            operator.queue(QUEUE).resume()
            for job in good:
                assert await watcher.queue(QUEUE).wait(job.id, timeout=20) == "done"
                events = [event.type async for event in watcher.queue(QUEUE).watch(job.id)]
                assert events[0] == "chunk"
                assert events[-1] == "completed"
            while (record := await jobs.get(bad.id)) is None or record.status != "failed":
                import asyncio

                await asyncio.sleep(0.02)
            desk = operator.queue(QUEUE)
            assert desk.dead() == [bad.id]
            assert desk.retry_dead(bad.id)
            assert desk.cancel(bad.id) in (True, False)
            assert desk.usage()
            assert desk.stats().dead in (0, 1)
            assert queue_names(operator) == ["mails", "{mails}:hooks"]
            bad_marks = {finding.what for finding in examine(operator, "mails") if finding.mark in ("bad", "unknown")}
            assert bad_marks == set()
            assert {f.mark for f in examine(operator) if f.what == "writing"} == {"unknown"}  # not its queue
    denied = [entry for entry in admin.acl_log() if "outlast-doctor" not in entry["object"]]
    assert [(entry["username"], entry["object"]) for entry in denied if entry["object"] != "publish"] == []


Deed = Callable[[Client], Any]
OTHER = Queue[Any, Any]("invoices")


def take(client: Client) -> Call[Any]:
    keys = client.queue(QUEUE)._keys
    return calls.reserve(keys, worker="w", request=1, k=1, lease_ms=1000, result_ttl_ms=1000, dead_ttl_ms=1000)


@pytest.mark.parametrize(
    ("role", "deed"),
    [
        pytest.param(Role.WATCHER, lambda client: client.queue(QUEUE).enqueue("x"), id="a watcher enqueues"),
        pytest.param(Role.WATCHER, lambda client: client.queue(QUEUE).cancel("some"), id="a watcher cancels"),
        pytest.param(Role.WATCHER, lambda client: client.queue(QUEUE).pause(), id="a watcher pauses"),
        pytest.param(Role.PRODUCER, lambda client: client._transport.send(take(client)), id="a producer takes jobs"),
        pytest.param(Role.WATCHER, lambda client: client._transport.send(take(client)), id="a watcher takes jobs"),
        pytest.param(Role.PRODUCER, lambda client: client.queue(OTHER).enqueue("x"), id="another queue"),
        pytest.param(Role.PRODUCER, lambda client: client.queue(OTHER).get("x"), id="a record of another queue"),
        pytest.param(Role.WORKER, lambda client: client.queue(OTHER).stats(), id="a worker looks elsewhere"),
        pytest.param(Role.OPERATOR, lambda client: client.queue(OTHER).pause(), id="an operator of another queue"),
    ],
)
def test_what_a_role_may_not_is_an_auth_error_that_changes_nothing(
    port: int, admin: redis.Redis, role: Role, deed: Deed
) -> None:
    with Client(redis_url=url(port, role)) as client, pytest.raises(AuthError) as caught:
        deed(client)
    assert SECRET not in str(caught.value)
    assert admin.keys("*") == []


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize(
    "command", ["FLUSHALL", "CONFIG SET maxmemory 1", "KEYS *", "ACL LIST", "DEBUG SLEEP 0", "SHUTDOWN"]
)
def test_no_role_may_run_what_takes_over_a_server(port: int, role: Role, command: str) -> None:
    with redis.Redis.from_url(url(port, role)) as connection, pytest.raises(redis.ResponseError):
        connection.execute_command(*command.split())


def test_the_command_prints_a_line_for_each_and_no_password() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "outlast_worker", "acl", "--queue", "a*b", "--namespace", "prod:"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert [line.split()[2] for line in lines] == [f"outlast-{role}" for role in Role]
    assert all(r"~{prod:a\*b}:" in line for line in lines)
    assert all(">A-LONG-RANDOM-PASSWORD" in line for line in lines)


def test_a_pattern_lets_no_other_queue_in() -> None:
    assert key_pattern(None, "a[b]?") == r"{a\[b\]\?}:*"
    assert key_pattern("ns:", None) == "{ns:*}:*"
    assert escaped("plain-name") == "plain-name"


def test_a_login_that_may_not_is_named_by_the_servers_word(port: int) -> None:
    with Client(redis_url=url(port, Role.WATCHER)) as client, pytest.raises(ServerError, match="NOPERM"):
        client.queue(QUEUE).enqueue("x")
