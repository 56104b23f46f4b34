"""Health endpoints of a worker: /livez, /readyz, and /metrics where prometheus-client is installed.

They are answered by threads of their own, from what the worker notes about itself anyway. So they tell the truth about
an event loop that is blocked, and a probe costs the queue nothing.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from outlast.errors import ConfigurationError

from .leases import BLOCKED

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Health", "parse_address"]

PULSE = 1.0
"""Seconds between two signs of life of the event loop."""
SLUGGISH = 5.0
"""Seconds without one after which the worker is not ready."""
STUCK = 60.0
"""Seconds that the code which takes jobs may be at one step, beyond what it may wait, before it counts as stuck."""
TEXT = "text/plain; charset=utf-8"


def parse_address(value: str) -> tuple[str, int]:
    """``"9464"`` or ``"HOST:9464"``. Without a host it is loopback: a probe from elsewhere has to be let in by name."""
    host, _, port = value.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"health={value!r}: give PORT or HOST:PORT, as in 9464 or 0.0.0.0:9464")
    return host.strip("[]") or "127.0.0.1", int(port)


class Health:
    """What an engine says of itself, and the server that passes it on."""

    def __init__(self, engine: Engine, address: str) -> None:
        self._engine = engine
        host, port = parse_address(address)
        self._pulse = time.monotonic()
        self._beating: asyncio.TimerHandle | None = None

        class Handler(_Handler):
            answer = staticmethod(self.answer)

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise ConfigurationError(f"health={address!r}: cannot listen there: {error.strerror}") from error
        self.address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="outlast health", daemon=True)
        if find_spec("prometheus_client") is None:
            self._metrics = None
        else:
            from .metrics import Metrics

            self._metrics = Metrics(engine)

    def start(self) -> None:
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        if self._metrics is not None:
            self._metrics.close()

    def _beat(self) -> None:
        self._pulse = time.monotonic()
        self._beating = self._engine.loop.call_later(PULSE, self._beat)

    def answer(self, path: str) -> tuple[int, str, bytes]:
        match path:
            case "/livez" | "/readyz":
                report = self.report()
                well = report["alive" if path == "/livez" else "ready"]
                status = HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE
                return status, "application/json", json.dumps(report).encode()
            case "/metrics" if self._metrics is not None:
                return HTTPStatus.OK, *self._metrics.exposition()
            case "/metrics":
                missing = b"metrics need prometheus-client: pip install 'outlast-worker[metrics]'\n"
                return HTTPStatus.NOT_IMPLEMENTED, TEXT, missing
            case _:
                return HTTPStatus.NOT_FOUND, TEXT, b"there are /livez, /readyz and /metrics\n"

    def report(self) -> dict[str, Any]:
        """`alive`: worth keeping, else a restart is due. `ready`: takes jobs, or would if it had a slot free."""
        engine, now = self._engine, time.monotonic()
        silent = now - self._pulse
        dead: list[str] = []
        if silent > BLOCKED:
            dead.append(f"the event loop has answered nothing for {silent:.0f} s")
        elif (stuck := engine.stuck_at(now)) is not None:
            dead.append(f"{stuck} has been at one step for over {STUCK:g} s")
        reasons = list(dead)
        if SLUGGISH < silent <= BLOCKED:
            reasons.append(f"the event loop has answered nothing for {silent:.0f} s")
        if engine.asked_to_stop:
            reasons.append("stopping")
        if not engine.reachable:
            reasons.append("the database does not answer")
        return {"alive": not dead, "ready": not reasons, "reasons": reasons, **engine.load()}


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "outlast", ""
    protocol_version = "HTTP/1.1"
    timeout = 10

    answer: Callable[[str], tuple[int, str, bytes]]

    def do_GET(self) -> None:
        status, kind, body = self.answer(self.path.partition("?")[0])
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """A probe each second is no news."""
