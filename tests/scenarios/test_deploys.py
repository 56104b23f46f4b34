"""A deploy that rolls: two builds of everything work on one queue."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from hashlib import sha1
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.faults.audit import audit_keys
from tests.faults.processes import ROOT, Process

from outlast import AsyncClient, Queue
from outlast.protocol import Keys
from outlast.protocol.digests import DIGESTS

PRODUCER = """
import json, sys, outlast
from outlast.protocol import Keys, calls, holding
url, name = sys.argv[1:]
client = outlast.Client(url)
jobs = client.queue(outlast.Queue(name))
transport = client._transport
ids = [f"later-{n}" for n in range(20)]
for id in ids:
    order = dict(id=id, nonce=id, payload="0.05", max_attempts=5, key_ttl_ms=60_000, extra=[("later", "kept")])
    assert transport.send(calls.enqueue(Keys(name), **order)).id == id
cancelled = [id for id in ids[::5] if jobs.cancel(id)]
ends = {id: [event.type for event in jobs.watch(id)][-1] for id in ids}
print(json.dumps([holding._SETTLE.sha, ends, cancelled]))
"""


@pytest.fixture
def later_build(tmp_path: Path) -> Path:
    """All scripts differ, so that each build has its own in the server."""
    for package in ("client/src/outlast", "worker/src/outlast_worker"):
        shutil.copytree(ROOT / package, tmp_path / Path(package).name)
    protocol = tmp_path / "outlast" / "protocol"
    prelude = protocol / "lua" / "_prelude.lua"
    prelude.write_text("-- of a later build\n" + prelude.read_text())
    digests = {
        name: sha1(prelude.read_bytes() + (protocol / f"lua/{name}.lua").read_bytes()).hexdigest() for name in DIGESTS
    }
    (protocol / "digests.py").write_text(f"DIGESTS = {digests!r}\n")
    return tmp_path


async def test_h70_two_builds_share_a_queue_through_kills_and_cancels(
    valkey_url: str,
    queue_name: str,
    raw: redis.Redis,
    aclient: AsyncClient,
    later_build: Path,
    spawn: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = aclient.queue(Queue[Any, Any](queue_name, max_attempts=5))
    options = {"queue": {"lease": 0.8}, "concurrency": 3}
    old: Process = spawn("sleep", **options)
    environ = {**os.environ, "PYTHONPATH": str(later_build)}
    monkeypatch.setenv("PYTHONPATH", str(later_build))
    new: list[Process] = [spawn("sleep", **options) for _ in range(2)]
    for process in (old, *new):
        await process.wait_for("up")
    producer = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PRODUCER, valkey_url, queue_name), env=environ, stdout=asyncio.subprocess.PIPE
    )
    ids = [(await jobs.enqueue(0.05)).id for _ in range(20)]
    cancelled = [id for id in ids[::5] if await jobs.cancel(id)]
    slow = (await jobs.enqueue(1.5, priority=9)).id
    await new[0].wait_for("start", 2)
    new[0].kill()
    theirs, _ = await producer.communicate()
    sha, ends, later_cancelled = json.loads(theirs)
    assert sha != DIGESTS["settle"]
    async with asyncio.timeout(40):
        ends |= {id: [event.type async for event in jobs.watch(id)][-1] for id in (*ids, slow)}
    assert set(cancelled + later_cancelled) == {id for id, end in ends.items() if end == "cancelled"}
    assert set(ends.values()) == {"completed", "cancelled"}
    assert old.said("end")
    assert new[1].said("end")
    for id in ends:
        job = await jobs.get(id)
        assert job is not None
        assert job.starts <= 2
        assert raw.hget(Keys(queue_name).job(id), "later") == (b"kept" if id.startswith("later-") else None)
    finished = [line["id"] for process in (old, *new) for line in process.said("end")]
    assert len(finished) - len(set(finished)) <= 3, "only what the killed worker had settled nothing of ran again"
    assert audit_keys(raw, queue_name, list(ends), at_rest=True) == []
    assert raw.script_exists(sha, DIGESTS["settle"]) == [True, True]
