"""`outlast dashboard` in Chromium: every view in both themes and at phone width, and an operator's work by keyboard."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest
from tests.dashboard.fleet import SECRET, Fleet, everything
from tests.servers import start_valkey

Drive = Callable[..., dict[str, Any]]


class Running:
    """The command, and the database behind it."""

    def __init__(self, redis_url: str, url: str, ids: dict[str, str]) -> None:
        self.redis_url, self.url, self.ids = redis_url, url, ids


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with start_valkey() as server:
        url = f"redis://{server.host}:{server.port}"
        ids = everything(url)
        command = [sys.executable, "-m", "outlast_worker", "dashboard", "--redis-url", url, "--port", "0", "--json"]
        with subprocess.Popen([*command, "--payloads"], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            yield Running(url, json.loads(process.stdout.readline())["url"], ids)
            process.terminate()
            assert process.wait(20) == 0


@pytest.mark.parametrize(("scheme", "phone"), [("light", False), ("dark", True)], ids=["light desk", "dark phone"])
def test_every_view_is_legible_and_nothing_sticks_out(scheme: str, phone: bool, drive: Drive, running: Running) -> None:
    ids = running.ids
    views = {state: f"#/queue/chat/{state}" for state in ("waiting", "active", "scheduled", "dead", "usage")}
    titles = dict.fromkeys(views, "chat")
    for name in ("active", "dead", "done", "odd"):
        views[f"job-{name}"], titles[f"job-{name}"] = f"#/job/chat/{quote(ids[name], safe='')}", ids[name]
    views["overview"], titles["overview"] = "#/", "Queues"
    seen = drive("dashboard", url=running.url, views=views, titles=titles, scheme=scheme, phone=phone)["views"]
    for name, view in seen.items():
        ratio, where = view["contrast"]
        assert view["wide"] <= 0, name
        assert view["small"] == [], name
        assert ratio >= 4.5, (name, where)
        assert view["injected"] == 0, "what jobs say stays text"
    assert "<img src=x onerror=alert(1)>" in seen["dead"]["text"]
    assert "0.0123" in seen["job-active"]["text"]
    assert "search the archive" in seen["job-active"]["text"]


def test_an_operator_needs_no_mouse(drive: Drive, running: Running) -> None:
    seen = drive("operate", url=running.url, id=running.ids["waiting"], live=running.ids["active"])
    fleet = Fleet(running.redis_url, "chat")
    job = fleet.jobs.get(running.ids["waiting"])
    fleet.close()
    assert job is not None
    assert (seen["paused"], seen["resumed"]) == ("Paused", True)
    assert (seen["kept"], job.status, seen["status"]) == ("Waiting", "cancelled", "Cancelled")
    assert seen["dead"] == "No dead jobs."
    assert SECRET in seen["output"]
    assert seen["unknown"].startswith("No job has this id in the queue here")
