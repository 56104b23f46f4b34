"""Serves an ASGI app on a socket that the parent has bound: ``outlast_worker.dev.web MODULE:APP SOCKET PARENT``.

A process of its own, so that whatever the app does takes neither the database nor the workers with it, and so that it
can be started again while the socket keeps the callers.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager

from outlast import OutlastError
from outlast_worker.cli.load import load
from outlast_worker.cli.show import note
from outlast_worker.cli.supervise import Lifeline

__all__ = ["main"]

GRACE = 1
"""Seconds that streams to browsers get at a restart. They resume from their cursor."""


def main(target: str, listener: int, parent: int) -> int:
    lifeline = Lifeline(parent)
    import uvicorn

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Generator[None]:
            # uvicorn's own raises the signal again after an orderly end, which would look like a violent one.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.handle_exit)
            yield

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                lifeline.ready()

    try:
        app = load(target, "an app")
        if not callable(app):
            note(f"{target} is {type(app).__name__}, not an ASGI app")
            return 2
    except OutlastError as error:
        note(str(error))
        return 2
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE)
    with socket.socket(fileno=listener) as bound:
        server = Server(config)
        server.run(sockets=[bound])
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
