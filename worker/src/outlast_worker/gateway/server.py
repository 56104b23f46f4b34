"""Runs a gateway under uvicorn: blocking, inside a running loop, or in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Self, cast

from outlast import ConfigurationError, InvalidArgumentError
from outlast_worker.gateway.app import Gateway
from outlast_worker.gateway.config import GatewayConfig, is_loopback
from outlast_worker.gateway.request import TRANSPORT, Receive, Scope, Send

if TYPE_CHECKING:
    from uvicorn import Server

logger = logging.getLogger("outlast.gateway")

GRACE = 10  # seconds that requests in progress get to finish at shutdown
# uvicorn's 5 s are also how long httpx keeps an idle connection: now and then one would be closed as it is used.
KEEP_ALIVE = 75


def check_bind(config: GatewayConfig, host: str) -> GatewayConfig:
    """Refuse an address that others can reach, unless it was asked for; then warn, and answer to its name."""
    if is_loopback(host):
        return config
    if not config.allow_remote:
        raise InvalidArgumentError(
            f"host={host!r} can be reached from other machines: use 127.0.0.1, or allow it with allow_remote=True"
        )
    logger.warning(
        "The gateway listens on %s: everyone who reaches it and has the token owns the database, and plain HTTP shows"
        " the token to the network. Put TLS in front.",
        host,
    )
    name = f"[{host}]" if ":" in host else host
    return dataclasses.replace(config, allowed_hosts=(*config.allowed_hosts, name))


def _server(gateway: Gateway, *, signals: bool, on_started: Callable[[], None] = lambda: None) -> Server:
    """A uvicorn server for `gateway`. Raises ConfigurationError when uvicorn is missing."""
    try:
        import uvicorn
        from uvicorn.protocols.http.auto import AutoHTTPProtocol
    except ImportError:
        raise ConfigurationError(
            "the gateway needs uvicorn, which is missing: pip install 'outlast-worker[dev]'"
        ) from None

    def protocol(**settings: Any) -> asyncio.Protocol:
        made: Any = AutoHTTPProtocol(**settings)
        inner = made.app

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            scope[TRANSPORT] = made.transport
            await inner(scope, receive, send)

        made.app = app
        return cast("asyncio.Protocol", made)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            on_started()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            gateway.begin_shutdown()
            await super().shutdown(sockets)

        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None]:
            # uvicorn's own would raise the signal again after a clean end, and the process would die of it.
            before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM) if signals}
            try:
                yield
            finally:
                for sig, handler in before.items():
                    signal.signal(sig, handler)

    # No access log of uvicorn's: it would print paths, which hold values and perhaps the token.
    quiet: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False, "proxy_headers": False}
    limits: dict[str, Any] = {"timeout_keep_alive": KEEP_ALIVE, "timeout_graceful_shutdown": GRACE}
    kind = cast("type[asyncio.Protocol]", protocol)
    return Server(uvicorn.Config(gateway, http=kind, ws="none", **quiet, **limits))


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound and listens. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol number: asyncio sets TCP_NODELAY only on sockets that name TCP, and without it each answer, head
    # and body being two writes, waits 40 ms for the caller's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def _bind(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on host={host!r}, port={port}: {error.strerror}; choose another port or host"
        ) from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(config: GatewayConfig, host: str = "127.0.0.1", port: int = 8079) -> None:
    """Serve until SIGINT or SIGTERM; requests in progress finish, subscriptions end."""
    config = check_bind(config, host)
    listener: socket.socket
    server = _server(
        Gateway(config), signals=True, on_started=lambda: logger.info("The gateway listens on %s", url_of(listener))
    )
    listener = _bind(host, port)
    server.run(sockets=[listener])


class GatewayServer:
    """A gateway on a port of its own, for tests and `outlast dev`; port 0 takes a free one.

    `async with` serves from the running loop; a plain `with` from a thread, so that blocking clients can be used in
    the same test. Signals stay the caller's.
    """

    def __init__(self, config: GatewayConfig, host: str = "127.0.0.1", port: int = 0) -> None:
        self.gateway = Gateway(check_bind(config, host))
        self.url = ""
        self._address = (host, port)
        self._server: Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None

    async def __aenter__(self) -> Self:
        started = asyncio.Event()
        self._task = asyncio.create_task(self._prepare(started.set))
        waiting = asyncio.ensure_future(started.wait())
        await asyncio.wait({self._task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not started.is_set():
            waiting.cancel()
            await self._task
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stop()
        if self._task is not None:
            await self._task

    def __enter__(self) -> Self:
        started = threading.Event()
        serving = self._prepare(started.set)
        self._thread = threading.Thread(target=asyncio.run, args=(serving,), name="outlast-gateway", daemon=True)
        self._thread.start()
        if not started.wait(GRACE):
            raise RuntimeError(f"the gateway did not start within {GRACE} s")
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop()
        if self._thread is not None:
            self._thread.join()

    def _prepare(self, on_started: Callable[[], None]) -> Coroutine[Any, Any, None]:
        server = self._server = _server(self.gateway, signals=False, on_started=on_started)
        listener = _bind(*self._address)
        self.url = url_of(listener)
        return server.serve(sockets=[listener])

    def _stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
