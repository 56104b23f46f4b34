"""The recipes in deploy/: what they promise in comments is true of what they run."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import redis
from typer.testing import CliRunner

from outlast.protocol import Keys
from outlast_worker.cli import app

from .conftest import Start, until

DEPLOY = Path(__file__).parents[2] / "deploy"
CONTAINER = (DEPLOY / "Containerfile").read_text(encoding="utf-8")


def unit(name: str) -> ConfigParser:
    parser = ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / name, encoding="utf-8")
    return parser


def grace(command: list[str]) -> float:
    return float(command[command.index("--grace") + 1])


def test_the_unit_gives_more_time_than_the_grace_and_runs_as_nobody() -> None:
    service = unit("outlast-worker.service")["Service"]
    command = shlex.split(service["ExecStart"])
    assert grace(command) + 10 <= float(service["TimeoutStopSec"])
    assert service["KillMode"] == "mixed"
    assert service["DynamicUser"] == "yes"
    assert_known(command[1:])
    assert unit("outlast-worker-health.timer")["Timer"]["OnUnitActiveSec"]


def test_the_container_gives_more_time_than_the_grace_and_is_not_root() -> None:
    [command] = re.findall(r"^CMD \[(.*)\]$", CONTAINER, re.MULTILINE)
    words = [word.strip().strip('"') for word in command.split(",")]
    [stop] = re.findall(r"--stop-timeout (\d+)", CONTAINER)
    assert grace(words) + 10 <= float(stop)
    assert_known(words[1:])
    assert re.search(r"^USER (?!root)\w+$", CONTAINER, re.MULTILINE)
    assert CONTAINER.index("\nUSER ") < CONTAINER.index("\nCMD ")


def assert_known(arguments: list[str]) -> None:
    shown = CliRunner().invoke(app, [arguments[0], "--help"], env={"COLUMNS": "200"}).output
    for option in (word for word in arguments if word.startswith("--")):
        assert option in shown


def health_checks() -> list[str]:
    [inside] = re.findall(r"^HEALTHCHECK .*\\\n +CMD (.*)$", CONTAINER, re.MULTILINE)
    [_, _, outside] = shlex.split(unit("outlast-worker-health.service")["Service"]["ExecStart"])
    return [inside, outside.replace("/opt/outlast/venv/bin/", "").replace("systemctl restart", "false")]


def test_the_health_checks_tell_a_dead_worker_from_a_database_that_refuses(
    start: Start, valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    queue = f"health-{os.getpid()}-{queue_name}"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def healthy(check: str, url: str) -> bool:
        env = {**os.environ, "PATH": path, "OUTLAST_REDIS_URL": url, "OUTLAST_QUEUES": queue}
        command = check.replace("outlast workers --host", f"outlast workers {queue} --host")
        done = subprocess.run(["/bin/sh", "-c", command], env=env, capture_output=True, text=True)
        assert done.returncode in (0, 1), done.stderr
        return done.returncode == 0

    inside, outside = health_checks()
    (tmp_path / "jobs.py").write_text(
        "from outlast import Queue\nfrom outlast_worker import Worker\n"
        f"worker = Worker()\n@worker.handles(Queue({queue!r}))\nasync def run(job): ...\n"
    )
    worker = start("worker", "jobs:worker", "--redis-url", valkey_url)
    with redis.Redis.from_url(valkey_url, protocol=2) as raw:
        until(lambda: raw.exists(Keys(queue).workers), "the worker says that it lives")
    assert healthy(inside, valkey_url)
    assert healthy(outside, valkey_url)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert not healthy(inside, valkey_url)
    assert not healthy(outside, valkey_url)
    assert healthy(inside, valkey_url.replace("redis://", "redis://:wrong@"))
