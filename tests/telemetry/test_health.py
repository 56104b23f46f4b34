"""Health endpoints tell the truth (H-66), and metrics say what there is to say."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.servers import free_port, start_valkey

from outlast import AsyncClient, ConfigurationError, JobFailedError, Queue
from outlast.observe import unobserve
from outlast_worker import JobContext, Worker, health, metrics
from outlast_worker.intake import Intake

ROOT = Path(__file__).parents[2]


def ask(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def probe(port: int) -> tuple[bool, bool]:
    """Alive, ready."""
    live, ready = [(await asyncio.to_thread(ask, port, path))[0] for path in ("/livez", "/readyz")]
    return live == 200, ready == 200


async def until(port: int, wanted: tuple[bool, bool], seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while (found := await probe(port)) != wanted:
        assert time.monotonic() < end, (found, await asyncio.to_thread(ask, port, "/readyz"))
        await asyncio.sleep(0.05)


async def test_h66_idle_busy_without_a_database_and_stopping(queue_name: str) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)
    port, go, started = free_port(), asyncio.Event(), asyncio.Event()
    with start_valkey() as server:
        url = f"redis://127.0.0.1:{server.port}"
        worker = Worker(url, health=port, block=0.5)

        @worker.handles(queue)
        async def run(job: JobContext[Any]) -> None:
            started.set()
            await go.wait()

        async with AsyncClient(redis_url=url) as client, worker:
            await until(port, (True, True))
            for _ in range(3):  # one runs, two are a backlog
                await client.queue(queue).enqueue(None)
            await started.wait()
            assert await probe(port) == (True, True)
            server.stop()
            await until(port, (True, False))
            assert "does not answer" in (await asyncio.to_thread(ask, port, "/readyz"))[1]
            server.start()
            await until(port, (True, True))
            worker.stop()
            await until(port, (True, False))
            assert '"stopping"' in (await asyncio.to_thread(ask, port, "/readyz"))[1]
            go.set()
    with pytest.raises(urllib.error.URLError):
        ask(port, "/livez")


async def test_h66_code_that_takes_no_jobs_any_more_is_not_alive(
    valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "STUCK", 0.3)
    monkeypatch.setattr("outlast_worker.engine.STUCK", 0.3)
    port, wedge = free_port(), asyncio.Event()
    look = Intake._look

    async def stuck(self: Intake) -> None:
        if wedge.is_set():
            await asyncio.Event().wait()
        await look(self)

    monkeypatch.setattr(Intake, "_look", stuck)
    worker = Worker(valkey_url, health=port, block=0.2)
    worker.handles(Queue(queue_name))(lambda job: None)
    async with worker:
        await until(port, (True, True))
        wedge.set()
        await until(port, (False, False))
        assert f"taking jobs of queue '{queue_name}'" in (await asyncio.to_thread(ask, port, "/livez"))[1]


async def test_h66_a_blocked_event_loop_is_first_not_ready_then_not_alive_then_well_again(
    valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "PULSE", 0.05)
    monkeypatch.setattr(health, "SLUGGISH", 0.5)
    monkeypatch.setattr(health, "BLOCKED", 1.5)
    port, seen = free_port(), []
    worker = Worker(valkey_url, health=port)

    @worker.handles(Queue(queue_name))
    async def run(job: JobContext[Any]) -> None:
        end = time.monotonic() + 20
        while (not seen or seen[-1] != (False, False)) and time.monotonic() < end:  # blocks the loop: this is the point
            seen.append((ask(port, "/livez")[0] == 200, ask(port, "/readyz")[0] == 200))
            time.sleep(0.05)  # noqa: ASYNC251

    async with worker, AsyncClient(redis_url=valkey_url) as client:
        await until(port, (True, True))
        job = await client.queue(Queue(queue_name)).enqueue(None)
        await client.queue(Queue(queue_name)).wait(job.id, timeout=30)
        await until(port, (True, True))
    assert list(dict.fromkeys(seen)) == [(True, True), (True, False), (False, False)]


async def test_h66_a_probe_costs_the_database_nothing(queue_name: str) -> None:
    port = free_port()
    with start_valkey() as server, redis.Redis(port=server.port) as raw:
        worker = Worker(f"redis://127.0.0.1:{server.port}", health=port)
        worker.handles(Queue(queue_name))(lambda job: None)
        async with worker:
            await until(port, (True, True))
            await asyncio.sleep(0.3)  # the first looks are over
            before = raw.info("stats")["total_commands_processed"]
            for _ in range(50):
                assert await probe(port) == (True, True)
            assert raw.info("stats")["total_commands_processed"] - before == 1  # the INFO itself


def test_an_address_that_cannot_be_is_refused_by_name(valkey_url: str, queue_name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"health='here': give PORT or HOST:PORT"):
        Worker(valkey_url, health="here")
    assert health.parse_address("9464") == ("127.0.0.1", 9464)
    assert health.parse_address("[::1]:9464") == ("::1", 9464)
    assert health.parse_address("0.0.0.0:80") == ("0.0.0.0", 80)
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        worker = Worker(valkey_url, health=taken.getsockname()[1])
        worker.handles(Queue(queue_name))(lambda job: None)
        with pytest.raises(ConfigurationError, match="cannot listen there"):
            worker.run(burst=True)


def values(exposition: str, queue: str) -> dict[str, float]:
    """Of the samples of one queue, without that label."""
    found = {}
    for line in exposition.splitlines():
        if f'queue="{queue}"' in line or ("queue=" not in line and line.startswith("outlast_")):
            name, _, value = line.rpartition(" ")
            name = name.replace(f'queue="{queue}"', "").replace("{,", "{").replace(",}", "}")
            found[name.removesuffix("{}")] = float(value)
    return found


async def test_metrics_count_what_happened_and_say_how_deep_the_queues_are(
    valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "FRESH", 0.0)
    port = free_port()
    queue: Queue[Any, Any] = Queue(queue_name, max_attempts=2, backoff=0.01)
    worker = Worker(valkey_url, health=port, concurrency=2)

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> None:
        job.usage(input_tokens=10, cost=0.25)
        if job.payload == "fails":
            raise ConnectionError("provider gone")

    async with worker, AsyncClient(redis_url=valkey_url) as client:
        jobs = client.queue(queue)
        good = await jobs.enqueue("works", idempotency_key="k")
        assert (await jobs.enqueue("works", idempotency_key="k")).deduplicated
        bad = await jobs.enqueue("fails")
        await jobs.enqueue("later", delay=100)
        await jobs.wait(good.id, timeout=10)
        with pytest.raises(JobFailedError):
            await jobs.wait(bad.id, timeout=10)
        end = time.monotonic() + 10
        while True:
            _, text = await asyncio.to_thread(ask, port, "/metrics")
            found = values(text, queue_name)
            if 'outlast_attempts_total{outcome="failed"}' in found or time.monotonic() > end:
                break
            await asyncio.sleep(0.05)
    unobserve(metrics.counting())
    assert {name: value for name, value in found.items() if "bucket" not in name and "created" not in name} | {
        "outlast_attempt_seconds_sum": 0,
        "outlast_wait_seconds_sum": 0,
    } == {
        "outlast_database_up": 1,
        "outlast_stuck": 0,
        "outlast_slots": 2,
        'outlast_queue_jobs{state="waiting"}': 0,
        'outlast_queue_jobs{state="scheduled"}': 1,
        'outlast_queue_jobs{state="active"}': 0,
        'outlast_queue_jobs{state="dead"}': 1,
        "outlast_queue_oldest_waiting_seconds": 0,
        "outlast_enqueued_total": 3,
        'outlast_attempts_total{outcome="completed"}': 1,
        'outlast_attempts_total{outcome="retried"}': 1,
        'outlast_attempts_total{outcome="failed"}': 1,
        "outlast_attempt_seconds_count": 3,
        "outlast_attempt_seconds_sum": 0,
        "outlast_wait_seconds_count": 2,
        "outlast_wait_seconds_sum": 0,
        "outlast_running": 0,
        'outlast_usage_total{counter="input_tokens"}': 30,
        'outlast_usage_total{counter="cost"}': 0.75,
    }
    assert good.id not in text
    # What deploy/alerts.yml asks for exists.
    alerts = (ROOT / "deploy" / "alerts.yml").read_text()
    asked = set(re.findall(r"\boutlast_\w+", "\n".join(re.findall(r"expr: (.*)", alerts))))
    assert len(asked) >= 4
    assert {name for name in asked if not re.search(rf"^{name}\b", text, re.MULTILINE)} == set()


async def test_the_command_has_an_endpoint_for_each_process_and_logs_json(
    valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(
        "from outlast import Queue\nfrom outlast_worker import Worker\nworker = Worker()\n"
        f"worker.handles(Queue({queue_name!r}))(lambda job: None)\n"
    )
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outlast_worker", "worker", "app:worker", "--processes", "2"),
        *("--health", f"127.0.0.1:{port}", "--log-format", "json", "--redis-url", valkey_url),
        cwd=tmp_path,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        end = time.monotonic() + 30
        for each in (port, port + 1):
            while True:
                try:
                    assert await probe(each) == (True, True)
                    break
                except (AssertionError, OSError):
                    assert time.monotonic() < end
                    await asyncio.sleep(0.1)
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = await process.communicate()
    import json

    lines = [json.loads(line) for line in err.decode().splitlines() if line.startswith("{")]
    assert f"127.0.0.1:{port}" in "".join(line["message"] for line in lines)
    assert {"time", "level", "logger", "message"} <= set(lines[0])
