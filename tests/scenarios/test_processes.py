"""Forks and secrets, of clients and workers that speak TCP."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
from tests.faults.links import LOOPBACK, Proxy
from tests.servers import free_port, start_valkey

from outlast.protocol import Keys

FORKS = """
import asyncio, os, sys, time, outlast
kind, url, queue = sys.argv[1:]
client = (outlast.Client if kind == "sync" else outlast.AsyncClient)(url)
jobs = client.queue(outlast.Queue(queue))

async def use(name, count):
    for n in range(count):
        made = jobs.enqueue(f"{name}-{n}")
        made = await made if kind == "async" else made
        job = jobs.get(made.id)
        job = await job if kind == "async" else job
        assert job.payload == f"{name}-{n}", (job.payload, name, n)

asyncio.run(use("before", 3))
children = []
for n in range(8):
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(use(f"child{n}", 15))
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    children.append(child)
asyncio.run(use("parent", 30))
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
asyncio.run(use("after", 3))
"""


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_h64_a_tcp_client_used_before_a_fork_works_in_parent_and_children(
    valkey_url: str, queue_name: str, raw: redis.Redis, kind: str, tls: bool
) -> None:
    with Proxy(valkey_url, tls=tls) as proxy:
        url = proxy.url + (f"?ssl_ca_certs={LOOPBACK}" if tls else "")
        subprocess.run([sys.executable, "-c", FORKS, kind, url, queue_name], check=True, timeout=60)
    assert raw.zcard(Keys(queue_name).ready) == 3 + 8 * 15 + 30 + 3


PASSWORD = "p@ss:w/rd #1-very-secret"
WORKER = """
import logging, os, sys
logging.basicConfig(level=logging.DEBUG)
from outlast import Client, Queue
from outlast_worker import Worker
from outlast_worker.tcp import TcpTransport, AsyncTcpTransport
url = os.environ["OUTLAST_REDIS_URL"]
worker = Worker(url)
print(repr(worker), str(worker), repr(TcpTransport(url)), repr(AsyncTcpTransport(url)), repr(Client(redis_url=url)))

@worker.handles(Queue(sys.argv[1], max_attempts=1, backoff=0.01))
async def run(job):
    raise ValueError("the handler fails")

if sys.argv[2] == "crash":
    Client(redis_url=url).queue(Queue(sys.argv[1])).enqueue(1)
worker.run(burst=sys.argv[2] == "crash")
"""


@pytest.mark.parametrize(
    ("how", "where"),
    [
        *(("crash", "netloc"), ("wrong password", "netloc"), ("wrong password", "query")),
        *(("nobody there", "netloc"), ("unreadable", "query")),
    ],
)
def test_h71_a_worker_tells_its_password_to_nobody(queue_name: str, how: str, where: str) -> None:
    given = PASSWORD + ("-but-wrong" if how == "wrong password" else "")
    escaped = quote(given, safe="")
    with start_valkey() as server, redis.Redis(port=server.port) as raw:
        raw.execute_command("ACL", "SETUSER", "ann", "on", f">{PASSWORD}", "~*", "&*", "+@all")
        port = free_port() if how == "nobody there" else server.port
        url = f"redis://ann:{escaped}@127.0.0.1:{port}"
        if where == "query":
            url = f"redis://127.0.0.1:{port}?username=ann&password={escaped}"
        if how == "unreadable":
            url = url.replace(str(port), "no-port")
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, queue_name, how],
            env={**os.environ, "OUTLAST_REDIS_URL": url},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        told = b""
        while line := process.stdout.readline():
            if not told:
                told += Path(f"/proc/{process.pid}/cmdline").read_bytes()
            told += line
            if b"trouble with the database" in line and how == "nobody there":
                process.send_signal(signal.SIGTERM)
        process.stdout.close()
        process.wait(30)
    shapes = [PASSWORD, quote(PASSWORD, safe=""), quote(PASSWORD), "very-secret", json.dumps(PASSWORD)]
    shapes += [base64.b64encode(text.encode()).decode()[:-4] for text in (PASSWORD, f"ann:{PASSWORD}")]
    assert [shape for shape in shapes if shape.encode() in told] == [], told.decode()
    assert {
        "crash": b"the handler fails",
        "wrong password": b"refused user or password",
        "nobody there": b"trouble with the database",
        "unreadable": b"redis_url cannot be read",
    }[how] in told
    assert (process.returncode == 0) == (how in ("crash", "nobody there")), told.decode()
