from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from tests.servers import start_valkey

from outlast.protocol import Keys

from .lab import Lab, connect


@pytest.fixture(scope="session")
def connection(valkey_url: str) -> Iterator[redis.Redis]:
    connection = connect(valkey_url)
    yield connection
    connection.close()


@pytest.fixture
def lab(connection: redis.Redis, keys: Keys) -> Lab:
    """A queue of its own on the shared server."""
    return Lab(connection, keys)


@pytest.fixture(scope="package")
def own_connection() -> Iterator[redis.Redis]:
    """A server of this package's own: for counting commands and for filling its memory."""
    with start_valkey() as server:
        connection = connect(f"redis://{server.host}:{server.port}")
        yield connection
        connection.close()


@pytest.fixture
def own_lab(own_connection: redis.Redis, keys: Keys) -> Lab:
    return Lab(own_connection, keys)
