"""`outlast worker` as real processes: signals, bursts, several processes, reload, and why it does not start."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast import Client, Job, Jobs, Queue
from outlast_worker.cli.supervise import Program, Supervisor, snapshot
from outlast_worker.dev.server import EmbeddedServer

from .conftest import Start, gone, until

JOBS = """
import asyncio, os, time
from outlast import Queue
from outlast_worker import Worker

queue = Queue(os.environ["QUEUE"], lease=1)
worker = Worker()

@worker.handles(queue)
async def run(job):
    await job.progress(0.1)
    match job.payload:
        case "pid":
            return os.getpid()
        case "die":
            if job.starts == 1:
                os._exit(9)
            return "survived"
        case "hold":
            await asyncio.sleep(0.3)
            return os.getpid()
        case {"until": path}:
            while not os.path.exists(path):
                await asyncio.sleep(0.01)
            return "done"
        case other:
            return other
"""


@pytest.fixture
def jobs(valkey_url: str, queue_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs[Any, Any]]:
    name = f"worker-{os.getpid()}-{queue_name}"
    monkeypatch.setenv("OUTLAST_REDIS_URL", valkey_url)
    monkeypatch.setenv("QUEUE", name)
    (tmp_path / "jobs.py").write_text(JOBS)
    with Client() as client:
        yield client.queue(Queue[Any, Any](name, lease=1))


def job(jobs: Jobs[Any, Any], id: str) -> Job[Any, Any]:
    found = jobs.get(id)
    assert found is not None
    return found


def running(jobs: Jobs[Any, Any], id: str) -> bool:
    return job(jobs, id).status == "active" and job(jobs, id).progress > 0


# -- one process -------------------------------------------------------------------------------------------------------


def test_burst_runs_what_is_there_and_ends(jobs: Jobs[Any, Any], start: Start) -> None:
    ids = [jobs.enqueue(n).id for n in range(20)]
    worker = start("worker", "jobs:worker", "--burst", "--concurrency", "5", "--json")
    assert worker.json() == {"pid": worker.process.pid, "worker": "jobs:worker", "processes": 1}
    assert worker.wait() == 0
    assert [jobs.wait(id, timeout=1) for id in ids] == list(range(20))
    assert worker.line() == ""


def test_h62_the_first_signal_lets_running_jobs_finish(jobs: Jobs[Any, Any], start: Start, tmp_path: Path) -> None:
    id = jobs.enqueue({"until": str(tmp_path / "go")}).id
    worker = start("worker", "jobs:worker")
    until(lambda: running(jobs, id), "the job runs")
    worker.signal(signal.SIGTERM)
    later = jobs.enqueue("later").id
    time.sleep(0.2)
    (tmp_path / "go").touch()
    assert worker.wait() == 0
    assert job(jobs, id).result == "done"
    assert job(jobs, later).status == "waiting"
    assert "Traceback" not in worker.said


def test_h62_the_second_signal_hands_them_back(jobs: Jobs[Any, Any], start: Start, tmp_path: Path) -> None:
    id = jobs.enqueue({"until": str(tmp_path / "never")}).id
    worker = start("worker", "jobs:worker")
    until(lambda: running(jobs, id), "the job runs")
    worker.signal(signal.SIGINT)
    time.sleep(0.1)
    worker.signal(signal.SIGTERM)
    assert worker.wait(10) == 1
    assert (job(jobs, id).status, job(jobs, id).attempt) == ("waiting", 0)
    assert "Traceback" not in worker.said


def test_grace_limits_how_long_running_jobs_may_take(jobs: Jobs[Any, Any], start: Start, tmp_path: Path) -> None:
    id = jobs.enqueue({"until": str(tmp_path / "never")}).id
    worker = start("worker", "jobs:worker", "--grace", "0.2")
    until(lambda: running(jobs, id), "the job runs")
    worker.signal(signal.SIGTERM)
    assert worker.wait(10) == 1
    assert job(jobs, id).status == "waiting"


# -- several processes -------------------------------------------------------------------------------------------------


def test_processes_share_the_work_and_stop_together(jobs: Jobs[Any, Any], start: Start) -> None:
    worker = start("worker", "jobs:worker", "--processes", "2", "--json")
    assert worker.json() == {"pid": worker.process.pid, "worker": "jobs:worker", "processes": 2}
    ids = [jobs.enqueue("hold").id for _ in range(6)]
    pids = {jobs.wait(id, timeout=30) for id in ids}
    assert pids == set(worker.children())
    assert len(pids) == 2
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert all(gone(pid) for pid in pids)


def test_h22_a_process_that_dies_is_replaced(jobs: Jobs[Any, Any], start: Start) -> None:
    worker = start("worker", "jobs:worker", "--processes", "1")
    id = jobs.enqueue("die").id
    assert jobs.wait(id, timeout=30) == "survived"
    assert "worker process 1 ended with exit code 9; it starts again in 0.5 s" in worker.said
    [pid] = worker.children()
    os.kill(pid, signal.SIGKILL)
    assert jobs.wait(jobs.enqueue("pid").id, timeout=30) not in (pid, None)
    assert "worker process 1 was killed by signal 9" in worker.said


def test_h62_the_supervisor_passes_signals_on(jobs: Jobs[Any, Any], start: Start, tmp_path: Path) -> None:
    first = jobs.enqueue({"until": str(tmp_path / "go")}).id
    worker = start("worker", "jobs:worker", "--processes", "2")
    until(lambda: running(jobs, first), "the job runs")
    worker.signal(signal.SIGINT)
    until(lambda: len(worker.children()) == 1, "the idle process has ended")
    (tmp_path / "go").touch()
    assert worker.wait() == 0
    assert job(jobs, first).result == "done"

    second = jobs.enqueue({"until": str(tmp_path / "never")}).id
    worker = start("worker", "jobs:worker", "--processes", "2")
    until(lambda: running(jobs, second), "the job runs")
    worker.signal(signal.SIGTERM)
    until(lambda: len(worker.children()) == 1, "the idle process has ended")
    worker.signal(signal.SIGTERM)
    assert worker.wait(10) == 1
    assert (job(jobs, second).status, job(jobs, second).attempt) == ("waiting", 0)


def test_the_processes_of_a_killed_supervisor_finish_and_end(
    jobs: Jobs[Any, Any], start: Start, tmp_path: Path
) -> None:
    id = jobs.enqueue({"until": str(tmp_path / "go")}).id
    worker = start("worker", "jobs:worker", "--processes", "2")
    until(lambda: running(jobs, id), "the job runs")
    pids = list(worker.children())
    worker.process.kill()
    until(lambda: sum(gone(pid) for pid in pids) == 1, "the idle process has ended")
    (tmp_path / "go").touch()
    until(lambda: all(gone(pid) for pid in pids), "the busy one, too")
    assert job(jobs, id).result == "done"


@pytest.mark.parametrize("turns", range(6))
async def test_a_stop_that_comes_while_a_process_is_being_started_reaches_it(turns: int) -> None:
    supervisor = Supervisor([Program("sleeper", ["/bin/sleep", "60"])])
    running = asyncio.ensure_future(supervisor.run())
    for _ in range(turns):
        await asyncio.sleep(0)
    supervisor.stop()
    assert await asyncio.wait_for(running, 10) == 0


def test_burst_over_several_processes_ends_when_all_have(jobs: Jobs[Any, Any], start: Start) -> None:
    ids = [jobs.enqueue(n).id for n in range(10)]
    assert start("worker", "jobs:worker", "--burst", "--processes", "2").wait() == 0
    assert [jobs.wait(id, timeout=1) for id in ids] == list(range(10))


def test_h71_the_address_of_the_database_is_on_no_command_line_but_the_callers(
    jobs: Jobs[Any, Any], start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedServer(tmp_path / "data") as server:
        monkeypatch.setenv("OUTLAST_REDIS_URL", "redis://127.0.0.1:1")
        worker = start("worker", "jobs:worker", "--processes", "2", "--redis-url", server.url)
        with Client(redis_url=server.url) as client:
            other = client.queue(jobs.queue)
            pid = other.wait(other.enqueue("pid").id, timeout=30)
        assert pid in worker.children()
        assert not [command for command in worker.children().values() if server.url in command]
        assert server.url not in worker.said


# -- reload ------------------------------------------------------------------------------------------------------------


def test_reload_runs_the_new_source_and_survives_a_broken_one(
    jobs: Jobs[Any, Any], start: Start, tmp_path: Path
) -> None:
    source = tmp_path / "jobs.py"
    worker = start("worker", "jobs:worker", "--reload", "--grace", "0.1", "--concurrency", "2")
    assert jobs.wait(jobs.enqueue("x").id, timeout=30) == "x"
    held = jobs.enqueue({"until": str(tmp_path / "never")}).id
    until(lambda: running(jobs, held), "a job runs while the source changes")
    source.write_text(JOBS.replace("return other", "return other * 2").replace('return "done"', 'return "old"'))
    until(lambda: jobs.wait(jobs.enqueue("x").id, timeout=30) == "xx", "the new source runs")
    source.write_text("def broken(:\n")
    until(lambda: "waits for a change" in worker.said, "the broken source is told")
    assert "SyntaxError" in worker.said
    source.write_text(JOBS.replace("return other", "return other * 3").replace("os.path.exists(path)", "True"))
    until(lambda: jobs.wait(jobs.enqueue("x").id, timeout=30) == "xxx", "the mended source runs")
    assert jobs.wait(held, timeout=30) == "done"
    assert job(jobs, held).attempt == 1
    worker.signal(signal.SIGINT)
    assert worker.wait() == 0


def test_reload_looks_at_sources_only(tmp_path: Path) -> None:
    for path in ("a.py", "pkg/b.py", ".venv/c.py", "venv/pyvenv.cfg", "venv/lib/d.py", "node_modules/e.py", "data.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    assert {os.path.relpath(path, tmp_path) for path in snapshot(tmp_path)} == {"a.py", "pkg/b.py"}


# -- what cannot start -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("jobs", "write MODULE:NAME, such as jobs:worker"),
        ("nothere:worker", "no module 'nothere'"),
        ("jobs.py:worker", "leave .py out"),
        ("jobs:other", "module 'jobs' has no 'other'"),
        ("jobs:queue", "jobs:queue is Queue, not a Worker"),
        ("broken:worker", "importing 'broken' failed: ZeroDivisionError: division by zero ("),
        ("missing:worker", "importing 'missing' failed: No module named 'torch_of_another_name'"),
        ("syntax:worker", "importing 'syntax' failed: SyntaxError"),
    ],
)
def test_a_target_that_cannot_be_run_is_exit_code_2(
    jobs: Jobs[Any, Any], start: Start, tmp_path: Path, target: str, message: str
) -> None:
    (tmp_path / "broken.py").write_text("def helper():\n    return 1 / 0\n\nhelper()\n")
    (tmp_path / "missing.py").write_text("import torch_of_another_name\n")
    (tmp_path / "syntax.py").write_text("def (:\n")
    worker = start("worker", target)
    assert worker.wait() == 2
    assert message in worker.said
    assert "Traceback" not in worker.said
    if target == "broken:worker":
        assert "broken.py, line 2)" in worker.said


def test_a_supervisor_does_not_start_again_what_can_never_start(
    jobs: Jobs[Any, Any], start: Start, tmp_path: Path
) -> None:
    worker = start("worker", "nothere:worker", "--processes", "2")
    assert worker.wait() == 2
    assert "starts again" not in worker.said
    assert start("worker", "nothere:worker", "--reload").wait() == 2


def test_h51_a_wrong_password_ends_it_and_a_database_that_is_not_there_does_not(
    jobs: Jobs[Any, Any], start: Start, tmp_path: Path
) -> None:
    server = EmbeddedServer(tmp_path / "data")
    server.start()
    wrong = start("worker", "jobs:worker", "--redis-url", f"redis://:hunter2@127.0.0.1:{server.port}")
    assert wrong.wait() == 3
    assert "refused user or password" in wrong.said
    assert "hunter2" not in wrong.said
    assert "Traceback" not in wrong.said
    server.stop()
    early = start("worker", "jobs:worker", "--redis-url", server.url)
    time.sleep(2)
    assert early.process.poll() is None
    server.start()
    with Client(redis_url=server.url) as client:
        other = client.queue(jobs.queue)
        assert other.wait(other.enqueue("x").id, timeout=30) == "x"
    early.signal(signal.SIGTERM)
    assert early.wait() == 0
    server.stop()


def test_reload_and_burst_exclude_each_other(jobs: Jobs[Any, Any], start: Start) -> None:
    assert start("worker", "jobs:worker", "--burst", "--reload").wait() == 2
    assert start("worker", "jobs:worker", "--processes", "0").wait() == 2
    assert start("worker", "jobs:worker", "--grace", "-1").wait() == 2


def test_the_module_and_the_script_are_the_same_command() -> None:
    script = Path(sys.executable).parent / "outlast"
    by_script = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    by_module = subprocess.run([sys.executable, "-m", "outlast_worker", "--help"], capture_output=True, text=True)
    assert by_script.stdout == by_module.stdout
    assert textwrap.shorten(by_script.stdout, 40).startswith("Usage: outlast")
