"""``outlast queue set|show|pause|resume``: what an operator types, what it prints, and what it does."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from outlast import Client, Queue
from outlast_worker.cli import app


@pytest.fixture(autouse=True)
def address(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_REDIS_URL", valkey_url)


@pytest.fixture
def q(queue_name: str) -> str:
    return f"cli-{os.getpid()}-{queue_name}"


def outlast(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["queue", *arguments], prog_name="outlast")
    assert "Traceback" not in result.output
    if not isinstance(result.exception, SystemExit | None):
        raise result.exception
    return result


def ok(*arguments: str) -> str:
    result = outlast(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def facts(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ok(*arguments, "--json"))
    return found


RULES = ["--concurrency", "3", "--rate", "30/60s", "--burst", "2", "--owner-cap", "1", "--lease", "2.5"]
RULES += ["--timeout", "60", "--max-attempts", "4", "--max-payload", "20000", "--result-ttl", "5"]


def test_rules_are_set_shown_and_removed(q: str, client: Client) -> None:
    fresh = outlast("show", q)
    assert fresh.exit_code == 0
    assert f"outlast queue set {q}" in fresh.stderr
    shown = ok("set", q, *RULES)
    assert [line.split(None, 1)[0] for line in shown.splitlines()] == [
        "queue",
        *("lease", "timeout", "max_attempts", "concurrency", "rate", "burst", "owner_cap", "max_payload"),
        *("result_ttl", "set_at"),
    ]
    rules = client.queue(Queue(q)).rules()
    assert (rules.concurrency, rules.rate, rules.lease, rules.max_payload) == (3, "30/60s", 2.5, 20_000)
    assert facts("set", q, "--concurrency", "none", "--rate", "10/s")["concurrency"] is None
    found = facts("show", q)
    assert (found["rate"], found["burst"], found["max_attempts"], found["used_today"]) == ("10/1s", 2, 4, {})
    assert found["set_at"]


def test_a_queue_is_set_up_without_any_rule(q: str) -> None:
    assert facts("set", q)["set_at"]


def test_pause_and_resume(q: str, client: Client) -> None:
    assert facts("pause", q)["paused"] is True
    assert "paused" in ok("show", q)
    found = facts("resume", q)
    assert (found["paused"], found["paused_until"]) == (False, None)
    until = facts("pause", q, "--for", "60")["paused_until"]
    assert until
    assert facts("pause", q, "--for", "5")["paused_until"] == until
    ok("resume", q)
    assert client.queue(Queue(q)).rules().paused_until is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--concurrency", "many"], "--concurrency 'many' is no number; give one, or none"),
        (["--concurrency", "1.5"], "--concurrency '1.5' is no number"),
        (["--rate", "30"], "write starts/time, such as 30/60s"),
        (["--lease", "0"], "lease=0.0 is out of range"),
        (["--max-payload", "100"], "max_payload=100 is out of range"),
    ],
)
def test_what_is_no_rule_is_refused_and_nothing_is_set(q: str, client: Client, arguments: list[str], says: str) -> None:
    result = outlast("set", q, *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert client.queue(Queue(q)).rules().set_at is None
