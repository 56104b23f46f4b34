"""`outlast doctor` says what is wrong with a database, and how to mend it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from tests.protocol.test_billing import ROWS
from tests.servers import free_port, start_valkey

from outlast import AsyncClient, Client, Queue
from outlast_worker import JobContext, Worker, costs
from outlast_worker.cli.doctor import examine
from outlast_worker.gateway import Database, GatewayConfig, GatewayServer


def run(*arguments: str) -> tuple[int, Any, str]:
    command = [sys.executable, "-m", "outlast_worker", "doctor", *arguments]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def marks(report: Any) -> dict[str, str]:
    return {finding["what"]: finding["mark"] for finding in report["findings"]}


@pytest.fixture
def good() -> Iterator[int]:
    with start_valkey(config={"appendonly": "yes", "maxmemory": "200mb", "maxmemory-policy": "noeviction"}) as server:
        yield server.port


def test_a_database_as_it_should_be(good: int) -> None:
    code, report, _ = run("--redis-url", f"redis://127.0.0.1:{good}")
    assert code == 0
    assert report["well"]
    assert set(marks(report).values()) == {"ok"}
    assert set(marks(report)) == {
        *("round trip", "TLS", "version", "eviction", "memory", "persistence", "clock", "scripts"),
        *("TIME in scripts", "undeclared keys in scripts", "PUBLISH in scripts", "writing"),
    }
    with redis.Redis(port=good) as raw:
        assert raw.keys("*") == []


@pytest.mark.parametrize(
    ("settings", "what", "mark", "mend"),
    [
        ({"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}, "eviction", "bad", "noeviction"),
        ({"appendonly": "no"}, "persistence", "warn", "appendonly yes"),
        ({"maxmemory": "1mb", "maxmemory-policy": "noeviction"}, "memory", "warn", "raise maxmemory"),
        ({"maxmemory": "1mb", "maxmemory-policy": "noeviction"}, "writing", "bad", "raise maxmemory"),
        ({"replicaof": "127.0.0.1 1"}, "writing", "bad", "the primary's address"),
        ({"min-replicas-to-write": "1"}, "writing", "bad", "min-replicas-to-write"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(settings: dict[str, str], what: str, mark: str, mend: str) -> None:
    with start_valkey(config=settings) as server, Client(redis_url=f"redis://127.0.0.1:{server.port}") as client:
        [finding] = [found for found in examine(client) if found.what == what]
    assert finding.mark == mark
    assert mend in finding.mend


def test_a_login_that_may_do_less_is_told_what_could_not_be_seen(good: int) -> None:
    with redis.Redis(port=good) as raw:
        raw.execute_command("ACL SETUSER", "small", "reset", "on", ">word", "~*", "+ping", "+time", "+eval", "+client")
    code, report, _ = run("--redis-url", f"redis://small:word@127.0.0.1:{good}")
    assert code == 1  # scripts cannot ask for the time or read a key: that is not an opinion
    found = marks(report)
    assert found["server"] == found["eviction"] == found["persistence"] == "unknown"
    assert found["undeclared keys in scripts"] == "bad"
    assert "word" not in json.dumps(report).replace("password", "")


def test_a_database_that_is_not_there_is_an_error_of_its_own() -> None:
    code, report, error = run("--redis-url", f"redis://127.0.0.1:{free_port()}")
    assert (code, report) == (3, None)
    assert "TransportError" in error


async def test_over_rest_the_open_questions_are_answered(good: int) -> None:
    config = GatewayConfig(databases=[Database(redis_url=f"redis://127.0.0.1:{good}", token="t")])
    async with GatewayServer(config) as gateway:
        code, report, _ = await asyncio.to_thread(run, "--rest-url", gateway.url, "--rest-token", "t")
    assert code == 0, report
    found = {finding["what"]: finding["found"] for finding in report["findings"]}
    assert found["REST: integers above 2^53"].startswith("answers 90071992547409")
    assert {name for name in found if name.startswith("REST: ")} == {
        *("REST: XREAD with BLOCK", "REST: integers above 2^53", "REST: EVAL_RO"),
        *("REST: key locking", "REST: cjson under key locking"),
    }


def test_no_tls_to_another_machine_is_bad() -> None:
    from outlast_worker.cli.doctor import Patient, _tls

    for address, mark in (
        ("redis://db.example.com:6379", "bad"),
        ("rediss://db.example.com", "ok"),
        ("rediss://db.example.com?ssl_cert_reqs=none", "warn"),
        ("rediss+cluster://db.example.com?ssl_check_hostname=false", "warn"),
        ("rediss://db.example.com?ssl_cert_reqs=required&ssl_check_hostname=true", "ok"),
        ("http://db.example.com", "bad"),
        ("https://db.example.com", "ok"),
        ("redis://localhost", "ok"),
        ("unix:///run/redis.sock", "ok"),
    ):
        assert _tls(Patient(None, address, "q")).mark == mark  # type: ignore[arg-type]


# -- cost --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", costs.COMMANDS)
def test_the_counts_of_the_estimate_are_those_that_a_server_counts(name: str) -> None:
    assert costs.COMMANDS[name] == ROWS[name][0]


async def test_the_estimate_of_a_job_is_what_a_run_of_it_costs() -> None:
    """60 tokens over 1.5 s, with a key, nobody watching."""
    queue: Queue[Any, Any] = Queue("cost")
    took: list[float] = []
    with start_valkey() as server, redis.Redis(port=server.port) as raw:
        url = f"redis://127.0.0.1:{server.port}"
        worker = Worker(url)

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> None:
            began = time.monotonic()
            for _ in range(60):
                await job.emit("token ")
                await asyncio.sleep(0.025)
            took.append(time.monotonic() - began)  # longer than 1.5 s on a busy machine, so with more flushes

        async with AsyncClient(redis_url=url) as client, worker:
            await client.queue(queue).enqueue(None, idempotency_key="before")
            await client.queue(queue).wait((await client.queue(queue).enqueue(None, idempotency_key="before")).id)
            raw.config_resetstat()
            job = await client.queue(queue).enqueue(None, idempotency_key="k")
            while (record := raw.hget(f"{{cost}}:job:{job.id}", "status")) != b"completed":
                assert record is not None
                await asyncio.sleep(0.05)
            stats: dict[str, dict[str, int]] = raw.info("commandstats")
    ours = {"cmdstat_hget", "cmdstat_info", "cmdstat_config|resetstat"}
    looked = stats["cmdstat_hget"]["calls"]
    counted = sum(value["calls"] for name, value in stats.items() if name not in ours)
    parts = costs.estimate(
        costs.Workload(1, tokens=60, seconds=took[-1], keys=True, viewers=0, workers=0, economy=False)
    )
    assert looked > 5
    assert counted == pytest.approx(sum(parts.values()), rel=0.2)


def test_the_estimate_has_the_renewals_of_a_job_that_says_nothing() -> None:
    work = costs.Workload(1, tokens=0, seconds=100, viewers=0, workers=0, lease=60)
    assert costs.estimate(work)["stream"] == 100 // 20 * costs.COMMANDS["renewal of 1"]


def test_the_command_prints_a_month_and_its_price() -> None:
    command = [sys.executable, "-m", "outlast_worker", "cost", "--jobs", "1000", "--workers", "0", "--viewers", "0"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    parts = json.loads(done.stdout)["commands"]
    assert parts["enqueue"] == 1000 * costs.COMMANDS["enqueue with a key"]
    assert parts["total"] == sum(value for name, value in parts.items() if name != "total")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "dollars for 1,000" in done.stdout
