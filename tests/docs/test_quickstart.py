"""Pages that are an application, from their files to what they promise, through `outlast dev`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from httpx_sse import connect_sse

from outlast_worker.webhooks import new_secret

from .test_site import ROOT, blocks

OUTLAST = [sys.executable, "-m", "outlast_worker"]


@contextmanager
def running(page: Path, folder: Path, **environment: str) -> Iterator[dict[str, str]]:
    """The files of a page and its `outlast dev`: the addresses that it says."""
    for label, body in blocks(page, "python"):
        (folder / label.removeprefix("file: ")).write_text(body)
    [command] = [
        line.split() for _, body in blocks(page, "bash") for line in body.splitlines() if "outlast dev" in line
    ]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OUTLAST_", "UPSTASH_", "KV_"))}
    dev = subprocess.Popen(
        [*OUTLAST, *command[1:], "--port", "0", "--json"],
        cwd=folder,
        env={**clean, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert dev.stdout is not None
        yield json.loads(dev.stdout.readline())
    finally:
        dev.send_signal(signal.SIGINT)
        dev.communicate(timeout=30)


def test_from_an_empty_folder_to_a_streaming_answer(tmp_path: Path) -> None:
    with (
        running(ROOT / "docs" / "quickstart.md", tmp_path) as addresses,
        httpx.Client(base_url=addresses["page"], timeout=30) as browser,
    ):
        assert "watchJob" in browser.get("/").text
        assert browser.get("/ai/v1/watch.js").status_code == 200
        made = browser.post("/ai/v1/jobs", json={"payload": {"text": "how are you?"}}).raise_for_status().json()
        text, kinds = "", []
        with connect_sse(browser, "GET", made["events_url"]) as events:
            for event in events.iter_sse():
                kinds.append(event.event)
                text += json.loads(event.data)["text"] if event.event == "chunk" else ""
        assert text == "You asked: how are you? "
        assert kinds[-1] == "completed"
        assert kinds.count("chunk") > 1


def test_a_webhook_from_the_command_to_the_receiver(tmp_path: Path) -> None:
    page = ROOT / "docs" / "guides" / "webhooks.md"
    with running(page, tmp_path, WEBHOOK_SECRET=new_secret()) as addresses:
        [enqueue] = [body for label, body in blocks(page, "bash") if label == "run"]
        enqueue = enqueue.replace("http://127.0.0.1:8787", addresses["page"]).replace("outlast", " ".join(OUTLAST), 1)
        subprocess.run(enqueue, shell=True, check=True, env={**os.environ, "OUTLAST_REDIS_URL": addresses["redis_url"]})
        end = time.monotonic() + 20
        while not (told := httpx.get(f"{addresses['page']}/told").json()):
            assert time.monotonic() < end
            time.sleep(0.05)
        [shown] = [json.loads(body) for _, body in blocks(page, "json")]
        assert [{**one, "timestamp": "", "data": {**one["data"], "id": "…"}} for one in told] == [
            {**one, "timestamp": ""} for one in shown
        ]
        assert httpx.post(f"{addresses['page']}/hooks/outlast", json={}).status_code == 401
