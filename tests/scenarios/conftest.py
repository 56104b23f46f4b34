from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.worker.conftest import aclient, spawn

from outlast_worker.gateway import Database, GatewayConfig, GatewayServer

__all__ = ["aclient", "spawn"]

TOKEN = "the-token-of-the-scenarios"


@pytest.fixture
def gateway(valkey_url: str) -> Iterator[GatewayServer]:
    with GatewayServer(GatewayConfig(databases=[Database(redis_url=valkey_url, token=TOKEN)])) as server:
        yield server
