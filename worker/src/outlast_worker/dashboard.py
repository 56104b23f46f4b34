"""Serves the dashboard of outlast-edge: for ``outlast dashboard``."""

from __future__ import annotations

import json
import signal
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.middleware.trustedhost import TrustedHostMiddleware

from outlast import AsyncClient, ConfigurationError, Queue
from outlast._config import Address
from outlast_edge import ANY, Edge
from outlast_edge.dashboard import Dashboard, TokenGate

from .cli.show import note, put
from .gateway.config import is_loopback
from .gateway.server import listen, url_of

__all__ = ["serve"]

GRACE = 1
"""Seconds that streams to browsers get at the end. They would come back."""


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        # uvicorn's own raises the signal again after an orderly end, which would look like a violent one.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        yield


async def serve(
    address: Address,
    queues: Sequence[Queue[Any, Any]],
    host: str,
    port: int,
    token: str,
    *,
    payloads: bool,
    as_json: bool,
) -> int:
    """Serve until SIGINT or SIGTERM, and say where. 1 if the server did not start."""
    try:
        listener = listen(host, port)
    except OSError as error:
        raise ConfigurationError(
            f"port {port} on {host} cannot be used: {error.strerror}; choose another with --port or --host"
        ) from None
    client = AsyncClient(redis_url=address.url) if address.token is None else AsyncClient(address.url, address.token)
    with listener:
        async with client:
            edge = Edge(client, queues=queues, authorize=lambda request, action, job: ANY)
            # The gate has asked for the token before the edge is asked.
            app: Any = TokenGate(Dashboard(edge, payloads=payloads).app(), token)
            if is_loopback(host):
                # Any web page can make its own name resolve to loopback; the Host header tells its requests from ours.
                hosts = ["127.0.0.1", "localhost", "[::1]"]
                app = TrustedHostMiddleware(app, allowed_hosts=hosts, www_redirect=False)
            else:
                note(f"warning: the dashboard listens on {host}, and plain HTTP shows its token to the network")
            where = url_of(listener)
            if as_json:
                put(json.dumps({"url": f"{where}/?token={token}", "queues": [queue.name for queue in queues]}))
            else:
                put(f"{where}/?token={token}")
            config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE)
            server = _Server(config)
            await server.serve(sockets=[listener])
    return 0 if server.started else 1
