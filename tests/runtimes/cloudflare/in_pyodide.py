"""Run by pyodide.mjs. A failed assertion fails the test that started it; the last line of output is its report."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import outlast
import outlast_edge
from outlast import OutlastError, aio, client, rest

assert sys.platform == "emscripten"
assert "pydantic" not in sys.modules, f"plain JSON needs none: {outlast_edge}, {aio} and {client} must not load it"

from pydantic import BaseModel  # noqa: E402


class Prompt(BaseModel):
    prompt: str


queue = outlast.Queue("generate", payload=Prompt, result=str)
jobs = outlast.AsyncClient().queue(queue)  # os.environ, as on any machine


async def calls() -> list[str]:
    """Every call against the real gateway; the ids that it made."""
    prompt = Prompt(prompt="žluťoučký 🐎")
    made = await jobs.enqueue(prompt, idempotency_key="click-1")
    again = await jobs.enqueue(prompt, idempotency_key="click-1")
    assert (again.id, again.deduplicated) == (made.id, True)
    job = await jobs.get(made.id)
    assert job is not None
    assert (job.payload, job.status) == (prompt, "waiting")
    assert (await jobs.stats()).waiting == 1
    assert (await jobs.events(made.id, wait=0.2)).events == []
    try:
        await jobs.wait(made.id, timeout=0.3)
    except TimeoutError:
        pass
    else:
        raise AssertionError("a job that nobody runs has no result")
    many = await asyncio.gather(*(jobs.enqueue(Prompt(prompt=str(n))) for n in range(20)))
    assert await jobs.cancel(made.id) is True
    assert [event.type async for event in jobs.watch(made.id)] == ["cancelled"]
    return [made.id, *(one.id for one in many)]


async def refused(jobs: Any) -> OutlastError:
    try:
        await jobs.get("x")
    except OutlastError as error:
        return error
    raise AssertionError("there was nobody to answer")


async def faults() -> None:
    """What fetch() does where sockets have their own errors."""
    silent = os.environ["SILENT_URL"]
    begin = time.monotonic()
    transport = rest.AsyncRestTransport(silent, "token", timeout=1.0, read_timeout=0.3)
    outage: Any = await refused(outlast.AsyncClient(transport=transport).queue(queue))
    assert outage.maybe_applied, outage
    assert "(try " in str(outage), "a read that was not answered in time is sent again"
    assert time.monotonic() - begin < 10
    transport = rest.AsyncRestTransport("http://127.0.0.1:9", "token", timeout=0.5)
    outage = await refused(outlast.AsyncClient(transport=transport).queue(queue))
    assert outage.maybe_applied, "fetch() cannot say that nothing was sent"
    left = asyncio.ensure_future(outlast.AsyncClient(silent, "token").queue(queue).get("x"))
    await asyncio.sleep(0.1)
    left.cancel()
    [outcome] = await asyncio.gather(left, return_exceptions=True)
    assert isinstance(outcome, asyncio.CancelledError), outcome
    try:
        outlast.Client().queue(queue).get("x")
        told = "nothing"
    except outlast.ConfigurationError as error:
        told = str(error)
    assert "AsyncClient" in told, told


async def main() -> None:
    made = await calls()
    await faults()
    print(json.dumps({"jobs": made}))
