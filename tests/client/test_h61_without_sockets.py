"""H-61: where Python has no sockets, no TLS and no threads, import works and every call goes through fetch().

A child process plays WebAssembly: nothing of that kind exists in it, its event loop has no selector, and its only way
out is a `fetch` that this process carries out against the real gateway. The same in real WebAssembly: tests/runtimes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outlast_worker.gateway import Database, GatewayConfig, GatewayServer

CHILD = Path(__file__).with_name("h61_child.py")
TOKEN = "the-token-of-h61"


@pytest.fixture
def gateway(valkey_url: str) -> Iterator[str]:
    with GatewayServer(GatewayConfig(databases=[Database(redis_url=valkey_url, token=TOKEN)])) as server:
        yield server.url


def play(what: str, url: str, queue_name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the child; its report, and the fetches that it asked for."""
    fetched: list[dict[str, Any]] = []
    child = subprocess.Popen(
        [sys.executable, CHILD, what, url, TOKEN, queue_name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdin
    assert child.stdout
    assert child.stderr
    with child, httpx.Client(timeout=30) as outside:
        for line in child.stdout:
            wish = json.loads(line)
            if "report" in wish:
                return wish["report"], fetched
            fetched.append(wish)
            response = outside.request(wish["method"], wish["url"], headers=wish["headers"], content=wish["body"])
            answer = {"status": response.status_code, "headers": response.headers.multi_items(), "body": response.text}
            child.stdin.write(json.dumps(answer) + "\n")
            child.stdin.flush()
        raise AssertionError(f"the child ended without a report:\n{child.stderr.read()}")


def test_h61_import_needs_no_tls_socket_thread_signal_or_randomness(gateway: str, queue_name: str) -> None:
    report, fetched = play("import", gateway, queue_name)
    assert fetched == []
    assert report["tls"] is False
    assert report["pydantic"] is False, "plain JSON payloads need no pydantic"


def test_h61_enqueue_get_watch_and_cancel_work_with_nothing_but_fetch(gateway: str, queue_name: str) -> None:
    report, fetched = play("calls", gateway, queue_name)
    assert report["job"] == {"payload": {"prompt": "žluťoučký 🐎"}, "status": "waiting"}
    assert report["cancelled"] is True
    assert report["events"] == ["cancelled"]
    assert report["repeated"] == report["id"], "the lost answer's repeat found the same job"
    assert {wish["redirect"] for wish in fetched} == {"manual"}
    assert {wish["method"] for wish in fetched} == {"POST"}
    assert not any(
        name in ("host", "content-length", "accept-encoding") for wish in fetched for name in wish["headers"]
    )


def test_h61_a_failing_fetch_is_an_unknown_outcome_and_a_silent_one_is_given_up(gateway: str, queue_name: str) -> None:
    report, _ = play("faults", gateway, queue_name)
    assert report["refused"]["error"] == "TransportError"
    assert report["refused"]["maybe_applied"] is True
    assert report["silent"]["error"] == "TransportError"
    assert report["silent"]["aborted"] is True, "a fetch that nobody waits for any more must be stopped"
    assert report["silent"]["seconds"] < 5
    assert TOKEN not in json.dumps(report)


def test_h61_the_plain_client_says_what_to_use_instead(gateway: str, queue_name: str) -> None:
    report, fetched = play("plain", gateway, queue_name)
    assert fetched == []
    assert report["error"] == "ConfigurationError"
    assert "AsyncClient" in report["message"]
