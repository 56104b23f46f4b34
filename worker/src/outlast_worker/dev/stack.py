"""`outlast dev`: database, gateway, worker and web front on this machine, as processes that start and stop together.

::

    outlast dev (this process: gateway, supervisor)
     ├ valkey-server          data in the data directory
     ├ worker                 restarted when it dies, and when its source changes
     └ web front              the same; it reaches the database through the gateway, as a function would

If this process is killed, all of them end by themselves.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from shlex import quote
from typing import NamedTuple
from urllib.parse import urlsplit

from outlast import ConfigurationError
from outlast_worker.cli.show import note, put
from outlast_worker.cli.supervise import Program, Supervisor, on_signals
from outlast_worker.gateway import Database, GatewayConfig, GatewayServer
from outlast_worker.gateway.config import LOOPBACK_NAMES, is_loopback
from outlast_worker.gateway.server import listen, url_of

from .server import EmbeddedServer
from .state import State

__all__ = ["Options", "run"]

DEMO_WORKER = "outlast_worker.dev.model:worker"
DEMO_APP = "outlast_worker.dev.demo:app"

GRACE = "2"
"""Seconds that running jobs get at the end; then they are handed back and wait for the next start."""
KILL_AFTER = 8.0
START = 60.0
"""Seconds that worker and web front may take to start."""


class Options(NamedTuple):
    worker: str | None
    app: str | None
    host: str
    port: int
    data_dir: Path
    as_json: bool


async def run(options: Options) -> int:
    """Start everything, say where it is, and stay until a signal comes. The exit code."""
    stack = _Stack(options)
    with on_signals(stack.stop):
        return await stack.run()


class _Stack:
    def __init__(self, options: Options) -> None:
        self._options = options
        self._demo = options.worker is None and options.app is None
        self._state = State(options.data_dir)
        self._server = EmbeddedServer(options.data_dir)
        self._supervisor: Supervisor | None = None
        self._stopped = asyncio.Event()
        self._code = 0

    def stop(self, code: int = 0) -> None:
        self._code = self._code or code
        self._stopped.set()
        if self._supervisor is not None:
            self._supervisor.stop()

    async def run(self) -> int:
        options = self._options
        if not is_loopback(options.host):
            note(
                f"warning: the page and the gateway listen on {options.host}. Whoever reaches the page can use it "
                "without a password, and plain HTTP shows the token to the network."
            )
        app = DEMO_APP if self._demo else options.app
        with ExitStack() as sockets:
            # Bound before anything is started, so that a taken port costs nothing.
            page = sockets.enter_context(self._listen()) if app is not None else None
            await asyncio.to_thread(self._server.start)
            try:
                async with self._gateway() as gateway:
                    return await self._serve(gateway.url, page, app)
            finally:
                await asyncio.to_thread(self._server.stop)

    def _listen(self) -> socket.socket:
        host, port = self._options.host, self._options.port
        try:
            return listen(host, port or self._state.get("page_port", int) or 0)
        except OSError as error:
            if port:
                raise ConfigurationError(
                    f"port {port} on {host} cannot be used for the page: {error.strerror}; "
                    "choose another with --port or --host"
                ) from None
        return listen(host, 0)

    def _gateway(self) -> GatewayServer:
        host, port = self._options.host, self._options.port
        token = self._state.remember("rest_token", str, lambda: secrets.token_urlsafe(24))
        local = is_loopback(host)
        config = GatewayConfig(
            databases=[Database(redis_url=self._server.url, token=token)],
            allow_remote=not local,
            allowed_hosts=LOOPBACK_NAMES if local else ["*"],
        )
        rest_port = port + 1 if port else self._state.get("rest_port", int) or 0
        try:
            listen(host, rest_port).close()
        except OSError as error:
            if port:
                raise ConfigurationError(
                    f"port {rest_port} on {host} cannot be used for the REST gateway, which is one above --port: "
                    f"{error.strerror}; choose another --port or --host"
                ) from None
            rest_port = 0
        return GatewayServer(config, host, rest_port)

    async def _serve(self, rest_url: str, page: socket.socket | None, app: str | None) -> int:
        options = self._options
        token = self._state.get("rest_token", str) or ""
        page_url = None if page is None else url_of(page)
        if not options.port:
            self._state.put(rest_port=urlsplit(rest_url).port or 0)
            if page is not None:
                self._state.put(page_port=page.getsockname()[1])
        addresses = {
            "OUTLAST_REST_URL": rest_url,
            "OUTLAST_REST_TOKEN": token,
            "OUTLAST_REDIS_URL": self._server.url,
        }
        hosts = {} if is_loopback(options.host) and ":" not in options.host else {"OUTLAST_DEV_HOSTS": "*"}
        environment = {**os.environ, **addresses, **hosts}
        programs: list[Program] = []
        python = [sys.executable, "-m"]
        target = DEMO_WORKER if self._demo else options.worker
        if target is not None:
            command = [*python, "outlast_worker", "worker", target, "--grace", GRACE, "--parent-fd", "{fd}"]
            programs.append(Program("the worker", command, env=environment))
        if page is not None and app is not None:
            command = [*python, "outlast_worker.dev.web", app, str(page.fileno()), "{fd}"]
            programs.append(Program("the web front", command, env=environment, fds=[page.fileno()]))
        supervisor = self._supervisor = Supervisor(
            programs,
            reload=None if self._demo else Path.cwd(),
            kill_after=KILL_AFTER,
            # One line of JSON is all that stdout may carry then.
            stdout=sys.stderr.fileno() if options.as_json else None,
        )
        if self._stopped.is_set():
            return self._code
        running = asyncio.ensure_future(supervisor.run())
        keeping = asyncio.ensure_future(self._keep_database())
        try:
            ready = asyncio.ensure_future(self._all_ready(programs))
            await asyncio.wait({ready, running}, timeout=START, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                self._tell(page_url, addresses)
            elif not running.done():
                note(f"worker or web front did not start within {START:g} s")
                self.stop(1)
            ready.cancel()
            code = await running
            return self._code if self._stopped.is_set() else code
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _all_ready(self, programs: Sequence[Program]) -> int:
        for program in programs:
            await program.ready.wait()
        return 0

    def _tell(self, page_url: str | None, addresses: dict[str, str]) -> None:
        if self._options.as_json:
            ready = {
                "page": page_url,
                "rest_url": addresses["OUTLAST_REST_URL"],
                "rest_token": addresses["OUTLAST_REST_TOKEN"],
                "redis_url": addresses["OUTLAST_REDIS_URL"],
            }
            put(json.dumps(ready))
            return
        if page_url is not None:
            put(f"\n  {'app ' if self._options.app else 'page'}   {page_url}")
        put(f"  data   {self._options.data_dir} (delete it to start afresh)\n")
        for name, value in addresses.items():
            put(f"export {name}={quote(value)}")
        put("\nCtrl-C stops everything; jobs stay.")

    async def _keep_database(self) -> None:
        """Start the database again when it has died. Its data, port and password are the same."""
        while not self._stopped.is_set():
            await asyncio.sleep(0.3)
            if not self._server.alive and not self._stopped.is_set():
                note("the database has died; starting it again")
                try:
                    await asyncio.to_thread(self._server.start)
                except ConfigurationError as error:
                    note(str(error))
                    self.stop(1)
