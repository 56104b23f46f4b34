"""`outlast dev`: the whole stack as one real command, used over HTTP, stopped, killed and started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse

from outlast import Client, Queue
from outlast_worker.dev.stack import KILL_AFTER

from .conftest import Running, Start, gone, until

JOBS = """
import asyncio, os
from outlast import AsyncClient, Queue
from outlast_edge import ANY, Edge
from outlast_worker import Worker

queue = Queue("mine", lease=1)
worker = Worker()

@worker.handles(queue, concurrency=2)
async def run(job):
    if job.payload == "die":
        if job.starts == 1:
            os._exit(9)
    if job.payload == "hold":
        await job.progress(0.1)
        await asyncio.sleep(30)
    return job.payload

app = Edge(AsyncClient(), queues=[queue], authorize=lambda request, action, job: ANY).app()
"""


@pytest.fixture
def mine(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(JOBS)


def servers(dev: Running) -> dict[str, int]:
    """Process ids of the parts, by name."""
    found = {}
    for pid, command in dev.children().items():
        for name in ("valkey-server", "outlast_worker worker", "dev.web"):
            if name in command:
                found[name] = pid
    return found


def stop(dev: Running, number: int = signal.SIGTERM) -> None:
    """It ends within seconds, with 0, and leaves nothing running. Nothing has to be killed for that."""
    family = dev.children()
    assert len(family) >= 2
    dev.signal(number)
    assert dev.wait(KILL_AFTER - 0.5) == 0
    assert [command for pid, command in family.items() if not gone(pid)] == []


def events(url: str, after: str | None = None) -> Iterator[Any]:
    with (
        httpx.Client(timeout=30) as http,
        connect_sse(http, "GET", url, headers={"last-event-id": after} if after else {}) as source,
    ):
        yield from source.iter_sse()


def test_the_demo_answers_from_the_real_model_and_keeps_everything_over_a_restart(start: Start) -> None:
    dev = start("dev", "--json", "--port", "0")
    ready = dev.json()
    assert list(ready) == ["page", "rest_url", "rest_token", "redis_url"]
    page = ready["page"]
    assert "<html" in httpx.get(page).text
    assert httpx.get(f"{page}/demo/info").json()["model"].startswith("SmolLM2")

    # A prompt, refreshed in mid-stream: nothing is lost and nothing comes twice.
    asked = {"payload": {"prompt": "Explain why the sky is blue."}}
    made = httpx.post(f"{page}/v1/jobs", json=asked, headers={"idempotency-key": "click"})
    assert made.status_code == 202
    again = httpx.post(f"{page}/v1/jobs", json=asked, headers={"idempotency-key": "click"})
    assert again.json()["id"] == made.json()["id"]
    url, text, cursor, end = page + made.json()["events_url"], "", None, None
    while end is None:
        for event in events(url, cursor):
            cursor = event.id or cursor
            if event.event == "chunk":
                text += event.json()["text"]
                if len(text) < 80 and len(text) > 40:
                    break
            if event.event == "completed":
                end = event.json()
    assert text == end["result"]
    assert len(text) > 100

    # Stop is heard at once.
    made = httpx.post(f"{page}/v1/jobs", json={"payload": {"prompt": "Tell me a long story about the sea."}})
    job = page + made.json()["url"]
    until(lambda: httpx.get(job).json()["status"] == "active", "the job runs")
    assert httpx.post(page + made.json()["cancel_url"]).status_code == 200
    until(lambda: httpx.get(job).json()["status"] == "cancelled", "the job is cancelled", 5)

    stop(dev, signal.SIGINT)
    assert "Traceback" not in dev.said
    assert dev.line() == "", "stdout had that one line"
    dev = start("dev", "--json", "--port", "0")
    assert dev.json() == ready
    assert httpx.get(url.removesuffix("/events")).json()["result"] == text
    stop(dev)


def test_your_own_worker_and_app_run_and_what_dies_is_started_again(mine: None, start: Start, tmp_path: Path) -> None:
    dev = start("dev", "jobs:worker", "--app", "jobs:app", "--json", "--port", "0")
    ready = dev.json()
    client = Client(ready["rest_url"], ready["rest_token"])
    jobs = client.queue(Queue[Any, Any]("mine", lease=1))
    assert jobs.wait(jobs.enqueue("over REST").id, timeout=30) == "over REST"
    made = httpx.post(f"{ready['page']}/v1/jobs", json={"payload": "over the app"}).json()
    assert jobs.wait(made["id"], timeout=30) == "over the app"

    # The worker dies: its job is run again by the next one.
    assert jobs.wait(jobs.enqueue("die").id, timeout=30) == "die"
    assert "the worker ended with exit code 9" in dev.said
    # The web front dies: its socket keeps the callers until the next one is there.
    parts = servers(dev)
    os.kill(parts["dev.web"], signal.SIGKILL)
    assert httpx.get(f"{ready['page']}/v1/jobs/{made['id']}", timeout=30).json()["result"] == "over the app"
    # The database dies: what it acknowledged is there again, at the same address.
    waiting = jobs.enqueue("later", delay=3600).id
    os.kill(parts["valkey-server"], signal.SIGKILL)
    until(lambda: "the database has died; starting it again" in dev.said, "it is noticed")
    assert jobs.wait(jobs.enqueue("after").id, timeout=30) == "after"
    assert jobs.cancel(waiting)
    # The source changes.
    (tmp_path / "jobs.py").write_text(JOBS.replace("return job.payload", "return job.payload + '!'"))
    until(lambda: "has changed: restarting" in dev.said, "the change is seen")
    until(lambda: jobs.wait(jobs.enqueue("new").id, timeout=30) == "new!", "the new source runs")
    client.close()
    assert ready["rest_token"] not in dev.said
    assert ready["redis_url"] not in dev.said
    stop(dev)


def test_a_job_that_runs_at_the_end_is_handed_back_and_kept(mine: None, start: Start) -> None:
    dev = start("dev", "jobs:worker", "--json", "--port", "0")
    ready = dev.json()
    assert ready["page"] is None
    with Client(redis_url=ready["redis_url"]) as client:
        jobs = client.queue(Queue[Any, Any]("mine", lease=1))
        id = jobs.enqueue("hold").id
        until(lambda: (job := jobs.get(id)) is not None and job.progress > 0, "the job runs")
        stop(dev)
        dev = start("dev", "--app", "jobs:app", "--json", "--port", "0")
        assert dev.json()["redis_url"] == ready["redis_url"]
        job = jobs.get(id)
        assert job is not None
        assert (job.status, job.attempt, job.starts) == ("waiting", 0, 1)


def test_killing_the_command_leaves_nothing_running(mine: None, start: Start) -> None:
    dev = start("dev", "jobs:worker", "--app", "jobs:app", "--json", "--port", "0")
    dev.json()
    family = dev.children()
    assert len(servers(dev)) == 3
    dev.process.kill()
    until(lambda: all(gone(pid) for pid in family), f"all of {family} have ended", 15)


def test_export_lines_are_what_a_shell_and_the_other_commands_understand(mine: None, start: Start) -> None:
    dev = start("dev", "jobs:worker", "--port", "0")
    lines = []
    while "Ctrl-C" not in (line := dev.line()):
        assert line, dev.said
        lines.append(line)
    exports = "".join(line for line in lines if line.startswith("export "))
    assert [line.split("=")[0] for line in exports.splitlines()] == [
        "export OUTLAST_REST_URL",
        "export OUTLAST_REST_TOKEN",
        "export OUTLAST_REDIS_URL",
    ]
    for unset in ("", "unset OUTLAST_REDIS_URL\n"):
        script = f"{exports}{unset}{sys.executable} -m outlast_worker enqueue mine '\"x\"' --wait"
        done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, "x\n"), done.stderr
    stop(dev)


def test_h73_only_this_machine_and_only_with_the_token(mine: None, start: Start) -> None:
    dev = start("dev", "--json", "--port", "0")
    ready = dev.json()
    rest, page = ready["rest_url"], ready["page"]
    for url in (rest, page, ready["redis_url"].replace("redis:", "http:")):
        assert httpx.URL(url).host == "127.0.0.1"
    listing = Path("/proc/net/tcp")
    if listing.exists():
        ports = {httpx.URL(url).port for url in (rest, page)} | {int(ready["redis_url"].rpartition(":")[2])}
        listening = [line.split()[1] for line in listing.read_text().splitlines()[1:] if line.split()[3] == "0A"]
        for port in ports:
            assert [address for address in listening if address.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
    assert httpx.post(rest, json=["PING"]).status_code == 401
    assert httpx.post(rest, json=["PING"], headers={"authorization": "Bearer wrong"}).status_code == 401
    token = {"authorization": f"Bearer {ready['rest_token']}"}
    assert httpx.post(rest, json=["PING"], headers=token).json() == {"result": "PONG"}
    # A page elsewhere whose name resolves to this machine.
    for url in (rest, page):
        assert httpx.get(url, headers={"host": "rebound.test", **token}).status_code in (400, 403, 421)
    stop(dev)


def test_what_keeps_it_from_starting_is_said_plainly(
    mine: None, start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        page = start("dev", "--port", str(port))
        assert page.wait() == 2
        assert page.said == (
            f"port {port} on 127.0.0.1 cannot be used for the page: Address already in use; "
            "choose another with --port or --host\n"
        )
        rest = start("dev", "jobs:worker", "--port", str(port - 1))
        assert rest.wait() == 2
        assert f"port {port} on 127.0.0.1 cannot be used for the REST gateway, which is one above" in rest.said
    broken = start("dev", "nothere:worker", "--port", "0")
    assert broken.wait() == 2
    assert "no module 'nothere'" in broken.said
    app = start("dev", "jobs:worker", "--app", "jobs:nothing", "--port", "0")
    assert app.wait() == 2
    assert "module 'jobs' has no 'nothing'" in app.said
    first = start("dev", "jobs:worker", "--port", "0", "--json")
    first.json()
    second = start("dev", "jobs:worker", "--port", "0")
    assert second.wait() == 2
    assert f"is in use by process {first.process.pid}" in second.said
    elsewhere = start("dev", "jobs:worker", "--port", "0", "--json", "--data-dir", "other", "--host", "0.0.0.0")
    assert elsewhere.json()["rest_url"].startswith("http://0.0.0.0:")
    assert "warning: the page and the gateway listen on 0.0.0.0" in elsewhere.said
    for said in (page.said, rest.said, broken.said, app.said, second.said, elsewhere.said):
        assert "Traceback" not in said


def test_the_gateway_alone_serves_a_database_of_your_own(start: Start, valkey_url: str, queue_name: str) -> None:
    gateway = start("gateway", "--redis-url", valkey_url, "--port", "0", "--token", "a-token", "--json")
    ready = gateway.json()
    assert ready["rest_token"] == "a-token"
    with Client(ready["rest_url"], "a-token") as client:
        assert client.queue(Queue[Any, Any](queue_name)).stats().waiting == 0
    gateway.signal(signal.SIGINT)
    assert gateway.wait() == 0
    assert gateway.said == ""
    random = start("gateway", "--redis-url", valkey_url, "--port", "0")
    assert random.line().startswith("export OUTLAST_REST_URL=http://127.0.0.1:")
    token = random.line().strip().partition("=")
    assert token[0] == "export OUTLAST_REST_TOKEN"
    assert len(token[2]) >= 20
    port = ready["rest_url"].rpartition(":")[2]
    assert start("gateway", "--port", port).wait() == 2
    remote = start("gateway", "--redis-url", valkey_url, "--port", "0", "--host", "0.0.0.0", "--json")
    remote.json()
    assert "listens on 0.0.0.0" in remote.said


def test_a_gateway_file_names_several_databases_and_the_switches_are_off_unless_asked_for(
    start: Start, valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(
        f'[[databases]]\nredis_url = "{valkey_url}/1"\ntoken = "one"\nreadonly_token = "look"\n'
        f'[[databases]]\nredis_url = "{valkey_url}/2"\ntoken = "two"\n',
        encoding="utf-8",
    )
    plain = start("gateway", "--config", str(file), "--port", "0", "--json").json()["rest_url"]
    open_ = start(
        *("gateway", "--config", str(file), "--port", "0", "--json"), *("--allow-admin", "--billed", "--faults")
    ).json()["rest_url"]

    def ask(url: str, token: str, *command: str, path: str = "") -> httpx.Response:
        return httpx.post(url + path, json=list(command), headers={"authorization": f"Bearer {token}"})

    assert ask(plain, "one", "SET", queue_name, "1").json() == {"result": "OK"}
    assert ask(plain, "two", "GET", queue_name).json() == {"result": None}
    assert ask(plain, "look", "GET", queue_name).json() == {"result": "1"}
    assert ask(plain, "look", "SET", queue_name, "2").status_code == 400
    assert ask(plain, "one", "CONFIG", "GET", "maxmemory").status_code == 400
    assert ask(open_, "one", "CONFIG", "GET", "maxmemory").json()["result"][0] == "maxmemory"
    assert "outlast-billed" not in ask(plain, "one", "GET", queue_name).headers
    assert ask(open_, "one", "GET", queue_name).headers["outlast-billed"] == "1"
    switch = {"action": "drop_reply", "command": "SET"}
    headers = {"authorization": "Bearer one"}
    assert httpx.post(f"{plain}/-/faults", json=switch, headers=headers).status_code >= 400
    assert httpx.post(f"{open_}/-/faults", json=switch, headers=headers).status_code < 300
    with pytest.raises(httpx.TransportError):
        ask(open_, "one", "SET", queue_name, "3")
    assert ask(plain, "one", "GET", queue_name).json() == {"result": "3"}

    wrong = start("gateway", "--config", str(tmp_path / "nothing.toml"))
    assert wrong.wait() == 2
    assert "nothing.toml" in wrong.said
    assert "Traceback" not in wrong.said
    both = start("gateway", "--config", str(file), "--token", "x")
    assert both.wait() == 2
