"""H-60, H-64: one client in many event loops, threads and processes; connections that died meanwhile."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import redis

import outlast
from outlast.protocol import Keys
from outlast_worker.gateway import Database, GatewayConfig, GatewayServer

TOKEN = "the-token-of-many-loops"


@pytest.fixture
def gateway(valkey_url: str) -> Iterator[GatewayServer]:
    with GatewayServer(GatewayConfig(databases=[Database(redis_url=valkey_url, token=TOKEN)])) as server:
        yield server


def test_h60_one_async_client_in_fifty_event_loops(gateway: GatewayServer, queue_name: str, raw: redis.Redis) -> None:
    client = outlast.AsyncClient(gateway.url, TOKEN)
    jobs = client.queue(outlast.Queue(queue_name))

    async def twice() -> set[str]:
        return {made.id for made in await asyncio.gather(jobs.enqueue(1), jobs.enqueue(2))}

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a leaked socket is a ResourceWarning
        ids = set().union(*(asyncio.run(twice()) for _ in range(50)))
        gc.collect()
        assert len(ids) == 100
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for more in pool.map(lambda _: asyncio.run(twice()), range(12)):
                ids |= more
        gc.collect()
    assert raw.zcard(Keys(queue_name).ready) == len(ids) == 124
    assert len(client._transport._clients) == 0  # type: ignore[attr-defined]


def test_h60_a_loop_that_was_closed_by_hand_is_forgotten(gateway: GatewayServer, queue_name: str) -> None:
    client = outlast.AsyncClient(gateway.url, TOKEN)
    jobs = client.queue(outlast.Queue(queue_name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # whoever closes a loop like that leaks, whatever we do
        for _ in range(5):
            loop = asyncio.new_event_loop()
            assert loop.run_until_complete(jobs.get("x")) is None
            loop.close()
        assert len(client._transport._clients) == 1  # type: ignore[attr-defined]
        assert asyncio.run(jobs.get("x")) is None
        del loop
        gc.collect()


def test_h60_aclose_ends_the_running_loops_connections_and_the_next_call_opens_new_ones(
    gateway: GatewayServer, queue_name: str
) -> None:
    async def main() -> None:
        async with outlast.AsyncClient(gateway.url, TOKEN) as client:
            jobs = client.queue(outlast.Queue(queue_name))
            await jobs.enqueue(1)
            await client.aclose()
            await client.aclose()
            assert (await jobs.stats()).waiting == 1

    asyncio.run(main())


CHILD = """
import asyncio, json, sys, outlast
kind, url, token, queue = sys.argv[1:]
jobs = (outlast.Client if kind == "sync" else outlast.AsyncClient)(url, token).queue(outlast.Queue(queue))
loop = asyncio.new_event_loop()
for line in sys.stdin:
    made = jobs.enqueue(1)
    made = loop.run_until_complete(made) if kind == "async" else made
    print(json.dumps([made.id, made.deduplicated]), flush=True)
"""


def test_h60_the_first_call_after_a_freeze_takes_effect_once(
    kind: str, valkey_url: str, queue_name: str, raw: redis.Redis
) -> None:
    """The process is stopped, the server closes the idle connection, the process goes on."""
    database = Database(redis_url=valkey_url, token=TOKEN)
    with GatewayServer(GatewayConfig(databases=[database])) as first:
        port = int(first.url.rpartition(":")[2])
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, kind, first.url, TOKEN, queue_name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("\n")
        child.stdin.flush()
        ids = [json.loads(child.stdout.readline())[0]]
        os.kill(child.pid, signal.SIGSTOP)
    # The gateway is gone and with it every connection; another takes its place before the thaw.
    with GatewayServer(GatewayConfig(databases=[database]), port=port), child:
        child.stdin.write("\n")
        child.stdin.flush()
        os.kill(child.pid, signal.SIGCONT)
        ids.append(json.loads(child.stdout.readline())[0])
        child.stdin.close()
    assert raw.zcard(Keys(queue_name).ready) == len(set(ids)) == 2


def test_h64_a_client_used_before_a_fork_works_in_parent_and_children(
    gateway: GatewayServer, valkey_url: str, queue_name: str, raw: redis.Redis
) -> None:
    code = """
import os, sys, outlast
url, token, queue = sys.argv[1:]
client = outlast.Client(url, token)
jobs = client.queue(outlast.Queue(queue))
ids = [jobs.enqueue("parent").id]
children = []
for n in range(4):
    child = os.fork()
    if child == 0:
        mine = {jobs.enqueue(f"{n}-{m}").id: f"{n}-{m}" for m in range(20)}
        os._exit(0 if all(jobs.get(id).payload == payload for id, payload in mine.items()) else 1)
    children.append(child)
for _ in range(20):
    ids.append(jobs.enqueue("parent").id)
    assert jobs.get(ids[-1]).payload == "parent"
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
assert jobs.get(ids[0]).payload == "parent"
"""
    subprocess.run([sys.executable, "-c", code, gateway.url, TOKEN, queue_name], check=True, timeout=60)
    assert raw.zcard(Keys(queue_name).ready) == 21 + 4 * 20


def test_threads_share_a_plain_client(gateway: GatewayServer, queue_name: str) -> None:
    with outlast.Client(gateway.url, TOKEN) as client, concurrent.futures.ThreadPoolExecutor(16) as pool:
        jobs = client.queue(outlast.Queue(queue_name))
        start = threading.Barrier(16, timeout=20)

        def work(n: int) -> bool:
            if n < 16:
                start.wait()
            id = jobs.enqueue(n).id
            return bool(jobs.get(id).payload == n)  # type: ignore[union-attr]

        assert all(pool.map(work, range(160)))


def test_h52_cancelled_calls_do_not_shift_replies(gateway: GatewayServer, valkey_url: str, queue_name: str) -> None:
    async def main(client: outlast.AsyncClient) -> None:
        async with client:
            jobs = client.queue(outlast.Queue(queue_name))
            ids = [(await jobs.enqueue(n)).id for n in range(20)]
            until = time.monotonic() + 1.5

            async def check(n: int) -> None:
                while time.monotonic() < until:
                    job = await jobs.get(ids[n])
                    assert job is not None
                    assert job.payload == n

            async def cancelled() -> None:
                async def watch() -> None:
                    async for _ in jobs.watch(ids[0]):
                        pass

                calls: list[Any] = [watch, lambda: jobs.wait(ids[1]), lambda: jobs.get(ids[2])]
                while time.monotonic() < until:
                    task = asyncio.ensure_future(random.choice(calls)())
                    await asyncio.sleep(random.random() * 0.005)
                    task.cancel()
                    await asyncio.wait([task])

            await asyncio.gather(*map(check, range(20)), *(cancelled() for _ in range(20)))

    asyncio.run(main(outlast.AsyncClient(gateway.url, TOKEN)))
    asyncio.run(main(outlast.AsyncClient(valkey_url)))
