"""The quickstart, from its files to a streaming answer in a FastAPI application, through `outlast dev`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
from httpx_sse import connect_sse

from .test_site import ROOT, blocks


def test_from_an_empty_folder_to_a_streaming_answer(tmp_path: Path) -> None:
    page = ROOT / "docs" / "quickstart.md"
    for label, body in blocks(page, "python"):
        (tmp_path / label.removeprefix("file: ")).write_text(body)
    [command] = [body.split() for label, body in blocks(page, "bash") if label == "run"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OUTLAST_", "UPSTASH_", "KV_"))}
    dev = subprocess.Popen(
        [sys.executable, "-m", "outlast_worker", *command[1:], "--port", "0", "--json"],
        cwd=tmp_path,
        env=clean,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert dev.stdout is not None
        addresses = json.loads(dev.stdout.readline())
        with httpx.Client(base_url=addresses["page"], timeout=30) as browser:
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
    finally:
        dev.send_signal(signal.SIGINT)
        dev.communicate(timeout=30)
