"""The testing kit, as its users have it: the page's own tests run, and each part does what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import outlast
from outlast_worker import JobContext, SyncJobContext, Worker
from outlast_worker.testing import (
    Answer,
    Cut,
    Failure,
    ScriptedProvider,
    aabandon,
    abandon,
    arun_until_idle,
    atime_travel,
    run_until_idle,
    time_travel,
)

PAGE = (Path(__file__).parents[2] / "docs/testing.md").read_text(encoding="utf-8")


def test_the_page_works_as_written_in_an_empty_folder(tmp_path: Path) -> None:
    files = re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert [name for name, _ in files] == ["summaries.py", "test_summaries.py"]
    for name, body in files:
        (tmp_path / name).write_text(body, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


@pytest.fixture
def jobs(outlast_client: outlast.Client) -> Any:
    return outlast_client.queue(outlast.Queue("q"))


def echo(**options: Any) -> Worker:
    worker = Worker()

    @worker.handles(outlast.Queue("q", **options))
    def run(job: SyncJobContext[Any]) -> Any:
        if job.payload == "fail":
            raise ValueError("no")
        return job.payload

    return worker


def test_time_makes_delays_and_retries_due(jobs: Any) -> None:
    worker = echo(backoff=60, max_backoff=60)
    late, failing = jobs.enqueue(1, delay=3600).id, jobs.enqueue("fail", max_attempts=2).id
    run_until_idle(worker)
    assert (jobs.get(late).status, jobs.get(failing).status) == ("scheduled", "scheduled")
    time_travel(jobs, 61)
    run_until_idle(worker)
    assert (jobs.get(late).status, jobs.get(failing).status) == ("scheduled", "failed")
    time_travel(jobs, timedelta(hours=1))
    run_until_idle(worker)
    assert jobs.get(late).status == "completed"


def test_time_ends_pauses_expires_jobs_keys_and_records(jobs: Any) -> None:
    jobs.pause(600)
    done = jobs.enqueue(1, idempotency_key="k").id
    expired = jobs.enqueue(2, expires=700).id
    time_travel(jobs, 599)
    assert jobs.rules().paused_until is not None
    assert jobs.get(done).status == "waiting"
    time_travel(jobs, 102)
    run_until_idle(echo())
    assert (jobs.get(done).status, jobs.get(expired).status) == ("completed", "failed")
    assert jobs.enqueue(1, idempotency_key="k").id == done
    time_travel(jobs, 3601)
    assert jobs.get(done) is None
    assert jobs.enqueue(1, idempotency_key="k").id != done


def test_time_makes_schedules_due(jobs: Any) -> None:
    worker = echo()
    worker.schedule(outlast.Queue("q"), "tick", name="daily", cron="0 0 * * *", catch_up=2)
    run_until_idle(worker)
    time_travel(jobs, timedelta(days=2))
    run_until_idle(worker)
    midnight = datetime.now(UTC).replace(hour=0, minute=0)
    for due in (midnight, midnight - timedelta(days=1)):
        assert jobs.get(f"daily@{due:%Y-%m-%dT%H:%M:00Z}").result == "tick"


async def test_the_same_for_coroutines(outlast_env: str) -> None:
    worker = Worker()
    queue: outlast.Queue[Any, Any] = outlast.Queue("q")

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> int:
        return job.attempt

    async with outlast.AsyncClient() as client:
        jobs = client.queue(queue)
        made = await jobs.enqueue(1)
        assert await aabandon(jobs) == made.id
        assert await aabandon(jobs) is None
        await atime_travel(jobs, 61)
        await arun_until_idle(worker)
        assert await jobs.wait(made.id, timeout=5) == 2


def test_a_worker_that_is_not_idle_in_time_is_told_of(jobs: Any) -> None:
    worker = Worker()

    @worker.handles(outlast.Queue("q"))
    async def run(job: JobContext[Any]) -> None:
        import asyncio

        await asyncio.sleep(60)

    id = jobs.enqueue(1).id
    with pytest.raises(TimeoutError, match=r"Worker\(queues=\['q'\]\) was still busy after timeout=0.5 s"):
        run_until_idle(worker, timeout=0.5)
    assert jobs.get(id).status == "waiting"


@pytest.mark.parametrize("number", [1, 2])
def test_tests_do_not_meet(number: int, jobs: Any) -> None:
    assert abandon(jobs) is None
    assert jobs.stats().waiting == 0
    jobs.enqueue(number)


def test_the_provider_keeps_to_its_script_for_the_sdk_of_openai() -> None:
    script: list[Any] = [
        Failure(429, retry_after=7),
        Answer("one two", pause=0.01, usage=(3, 2)),
        Cut("half of"),
        "a b",
    ]
    with (
        ScriptedProvider(script) as provider,
        openai.OpenAI(base_url=provider.url, api_key="any", max_retries=0) as client,
    ):
        ask: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "what was said"}]}
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**ask)
        assert refused.value.response.headers["retry-after"] == "7"
        parts = list(client.chat.completions.create(**ask, stream=True))
        assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == "one two"
        assert parts[-1].usage.total_tokens == 5
        cut = list(client.chat.completions.create(**ask, stream=True))
        assert all(part.choices[0].finish_reason is None for part in cut)
        assert client.chat.completions.create(**ask).choices[0].message.content == "a b"
        assert client.chat.completions.create(**ask).choices[0].message.content == "what was said"
    assert len(provider.requests) == 5
    with pytest.raises(httpx.ConnectError):
        httpx.post(provider.url + "/chat/completions", json={})
