"""The Worker of `wrangler/` in the real workerd, its parts in Pyodide, and what wrangler would upload."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import ServerSentEvent, connect_sse

from ..conftest import BEARER, NODE, ROOT, Hand, Packages, Upstream, dependencies, run, until_quiet
from . import bundle
from .workerd import PLATFORM, Workerd, vendor

HERE = Path(__file__).parent
SOURCES = [ROOT / "client" / "src", ROOT / "edge" / "src"]
UPLOAD_LIMIT = 3 * 1024
"""KiB, compressed: what Cloudflare has always taken on its free plan."""


@pytest.fixture(scope="session")
def wheels(packages: Packages) -> Path:
    """What a Worker's dependencies come with, for Cloudflare's platform."""
    return packages.install("cloudflare", [*dependencies("client", "edge"), "workers-runtime-sdk>=1.9,<2"], *PLATFORM)


@pytest.fixture(scope="session")
def bundles(node_modules: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles")
    bundle.build(node_modules / "pyodide", folder)
    return folder


Pack = Callable[[Path], Path]


@pytest.fixture
def pack(wheels: Path, tmp_path: Path) -> Pack:
    """A copy of a Worker's folder with its dependencies in it, as `pywrangler sync` leaves it."""

    def copy(worker: Path) -> Path:
        project = tmp_path / "worker"
        shutil.copytree(ROOT / "wrangler", project, ignore=shutil.ignore_patterns("python_modules", "__pycache__"))
        shutil.copytree(worker / "src", project / "src", dirs_exist_ok=True)
        vendor(project, [wheels, *SOURCES])
        return project

    return copy


@pytest.fixture
def serve(node_modules: Path, bundles: Path, pack: Pack, upstream: Upstream) -> Callable[[Path], Workerd]:
    [binary] = node_modules.glob("@cloudflare/workerd-*/bin/workerd")

    def start(worker: Path) -> Workerd:
        return Workerd(binary, bundles, pack(worker), upstream.environment)

    return start


def kinds(events: Iterator[ServerSentEvent]) -> Iterator[tuple[str, Any, str]]:
    for event in events:
        if event.event != "state":
            yield event.event, json.loads(event.data), event.id


def test_the_worker_makes_streams_resumes_and_cancels_jobs(
    serve: Callable[[Path], Workerd], hand: Hand, upstream: Upstream
) -> None:
    with serve(ROOT / "wrangler") as workerd, httpx.Client(base_url=workerd.url, timeout=30) as http:
        requests = upstream.faults.delay(0, times=None)

        def create(prompt: str, **headers: str) -> httpx.Response:
            return http.post("/v1/jobs", json={"payload": {"prompt": prompt}}, headers={**BEARER, **headers})

        made = create("hello").json()
        cold = requests.fired
        assert cold in (1, 2), "one request; two if the database had not seen the script"
        create("hello again")
        assert requests.fired == cold + 1
        assert hand.waiting() == 2
        assert http.post("/v1/jobs", json={"payload": {"prompt": "x"}}).status_code == 403
        assert http.get(made["url"]).status_code == 404, "nobody sees a job without saying who he is"

        # Cut off after the third event, and again after the fourth: nothing is lost and nothing comes twice.
        hand.take(made["id"])
        heard, cursor = "", ""
        for words in (("one ", "two ", "three "), ("four ",), ("five",)):
            headers = {**BEARER, **({"last-event-id": cursor} if cursor else {})}
            with connect_sse(http, "GET", made["events_url"], headers=headers) as source:
                events = kinds(source.iter_sse())
                for word in words:
                    hand.say(word)  # the next is said only when this one was heard: a buffered stream would wait
                    kind, data, cursor = next(events)
                    assert kind == "chunk"
                    heard += data["text"]
        hand.end(heard)
        with connect_sse(http, "GET", made["events_url"], headers={**BEARER, "last-event-id": cursor}) as source:
            [(kind, data, cursor)] = list(kinds(source.iter_sse()))
        assert (kind, data) == ("completed", {"result": "one two three four five"})
        assert http.get(made["events_url"], headers={**BEARER, "last-event-id": cursor}).status_code == 204

        # The same as JSON, for plans whose 10 ms of CPU are too few for a stream.
        page = http.get(made["events_url"], headers={**BEARER, "accept": "application/json"}).json()
        assert page["done"]
        assert "".join(event["data"].get("text", "") for event in page["events"]) == heard

        other = create("stop me", **{"idempotency-key": "click-1"})
        assert other.status_code == 202
        again = create("stop me", **{"idempotency-key": "click-1"})
        assert (again.status_code, again.json()["id"]) == (200, other.json()["id"])
        assert create("not that", **{"idempotency-key": "click-1"}).status_code == 422
        assert http.post(other.json()["cancel_url"], headers=BEARER).json()["cancelled"] is True

        upstream.faults.drop_reply(executed=True, command="EVALSHA")
        waiting = hand.waiting()
        assert create("the reply is lost").status_code == 202
        assert hand.waiting() == waiting + 1
        assert [line for line in workerd.logs if "Traceback" in line] == []


def test_h61_a_worker_starts_without_randomness_and_calls_go_through_fetch(serve: Callable[[Path], Workerd]) -> None:
    with serve(HERE / "probe") as workerd:
        answer = httpx.get(workerd.url, timeout=30)
        assert answer.status_code == 200, "".join(workerd.logs)
        report = answer.json()
    assert report["python"] == [3, 14]
    for what, outcome in report["at_start"].items():
        assert "andom" in outcome, f"{what} at import: this runtime would not have noticed ours either"
    assert report["job"] == {"payload": {"prompt": "žluťoučký 🐎"}, "status": "waiting"}
    assert report["cancelled"] is True
    assert report["events"] == ["cancelled"]
    assert "AsyncClient" in report["plain client"]
    assert report["pydantic"] is False
    assert report["transport"] == "FetchTransport"


def test_a_viewer_that_leaves_is_read_for_no_longer_than_the_next_keep_alive(
    serve: Callable[[Path], Workerd], hand: Hand, upstream: Upstream
) -> None:
    # Cloudflare tells the Worker nothing and runs no `finally`: only a write that nobody takes ends the stream.
    with serve(HERE / "probe") as workerd, httpx.Client(base_url=workerd.url, timeout=30) as http:
        made = http.post("/v1/jobs", json={"payload": {"prompt": "hello"}}).json()
        hand.take(made["id"])
        reads = upstream.faults.delay(0, times=None)
        with connect_sse(http, "GET", made["events_url"]) as source:
            hand.say("one")
            assert next(kinds(source.iter_sse()))[0] == "chunk"
        until_quiet(reads)
        hand.say("two")
        hand.end("one two")
        with connect_sse(http, "GET", made["events_url"]) as source:
            assert [kind for kind, _, _ in kinds(source.iter_sse())] == ["chunk", "chunk", "completed"]


def test_h61_in_pyodide_every_call_works_and_time_limits_hold(
    node_modules: Path, wheels: Path, upstream: Upstream, hand: Hand
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are made and never answered
        output = run(
            *(NODE / "bin" / "node", HERE / "pyodide.mjs", node_modules / "pyodide"),
            *(wheels, *SOURCES, HERE, "in_pyodide"),
            **upstream.environment,
            SILENT_URL=f"http://127.0.0.1:{silent.getsockname()[1]}",
        )
    report = json.loads(output.splitlines()[-1])
    assert len(report["jobs"]) == 21
    assert hand.waiting() == 20, "all but the cancelled one are there, once"


def test_wrangler_accepts_the_worker_and_would_upload_less_than_3_mb(node_modules: Path, pack: Pack) -> None:
    project = pack(ROOT / "wrangler")
    output = run(
        *(NODE / "bin" / "node", node_modules / "wrangler" / "bin" / "wrangler.js"),
        *("deploy", "--dry-run", "--outdir", project / "dist"),
        folder=project,
        CI="1",
        WRANGLER_SEND_METRICS="false",
        PATH=f"{NODE / 'bin'}:/usr/bin:/bin",
        HOME=str(project),
    )
    found = re.search(r"Total Upload: [\d.]+ KiB / gzip: ([\d.]+) KiB", output)
    assert found, output
    assert float(found[1]) < UPLOAD_LIMIT
    packed = {path.name for path in (project / "dist").rglob("*") if path.is_file()}
    assert {"entry.py", "jsfetch.py", "_edge.py", "enqueue.lua", "watch.js"} <= packed
