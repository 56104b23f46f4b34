"""Fixtures for the tests of your own code. pytest finds them as soon as outlast-worker is installed.

The server and the gateway are real and start when the first test asks for them, once a process. Tests share them and
do not meet: each has a namespace of its own, so nothing is flushed. Needs the extra `testing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

if TYPE_CHECKING:
    from outlast import Client
    from outlast_worker.gateway import GatewayServer
    from outlast_worker.testing import ScriptedProvider

_ADDRESSES = (
    "REDIS_URL",
    "UPSTASH_REDIS_REST_URL",
    "UPSTASH_REDIS_REST_TOKEN",
    "KV_REST_API_URL",
    "KV_REST_API_TOKEN",
)
_TOKEN = "the-token-of-the-tests"


@pytest.fixture(scope="session")
def outlast_redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real Valkey server, which ends with the session."""
    from outlast_worker.dev.server import EmbeddedServer

    with EmbeddedServer(tmp_path_factory.mktemp("outlast")) as server:
        yield server.url


@pytest.fixture(scope="session")
def outlast_gateway(outlast_redis_url: str) -> Iterator[GatewayServer]:
    """A gateway that speaks the REST protocol of Upstash, in front of the same server. `url` is its address."""
    from outlast_worker.gateway import Database, Faults, GatewayConfig, GatewayServer

    database = Database(redis_url=outlast_redis_url, token=_TOKEN)
    with GatewayServer(GatewayConfig(databases=[database], faults=Faults())) as server:
        yield server


@pytest.fixture
def outlast_env(outlast_redis_url: str, outlast_gateway: GatewayServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The environment of this test: clients talk to the gateway, workers to the server, in a namespace that it gives.

    No address of the developer's own database is left.
    """
    for name in _ADDRESSES:
        monkeypatch.delenv(name, raising=False)
    namespace = f"test-{uuid4().hex[:12]}"
    monkeypatch.setenv("OUTLAST_REST_URL", outlast_gateway.url)
    monkeypatch.setenv("OUTLAST_REST_TOKEN", _TOKEN)
    monkeypatch.setenv("OUTLAST_REDIS_URL", outlast_redis_url)
    monkeypatch.setenv("OUTLAST_NAMESPACE", namespace)
    return namespace


@pytest.fixture
def outlast_client(outlast_env: str) -> Iterator[Client]:
    """A client as a function has it: over HTTP."""
    from outlast import Client

    with Client() as client:
        yield client


@pytest.fixture
def outlast_provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedProvider]:
    """A chat endpoint that says what its `script` says; OPENAI_BASE_URL and OPENAI_API_KEY lead to it."""
    from outlast_worker.testing import ScriptedProvider

    with ScriptedProvider() as provider:
        monkeypatch.setenv("OPENAI_BASE_URL", provider.url)
        monkeypatch.setenv("OPENAI_API_KEY", "scripted")
        yield provider
