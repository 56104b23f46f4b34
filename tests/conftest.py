"""One real Valkey server for each test process, one queue name for each test: nothing is flushed between them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
import redis
from tests.servers import start_valkey

from outlast.protocol import Keys

_names = itertools.count()


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """The URL of a real server. Tests that stop, flush or freeze a server start one of their own."""
    if url := os.environ.get("OUTLAST_TEST_REDIS"):  # one that `tests.everywhere` has started in a container
        yield url
        return
    with start_valkey() as server:
        yield f"redis://{server.host}:{server.port}"


@pytest.fixture
def raw(valkey_url: str) -> Iterator[redis.Redis]:
    """A plain connection to look at keys with, past all of our code."""
    connection = redis.Redis.from_url(valkey_url, protocol=2)
    yield connection
    connection.close()


@pytest.fixture
def queue_name() -> str:
    """A name that no other test uses."""
    return f"q{next(_names)}"


@pytest.fixture
def keys(queue_name: str) -> Keys:
    return Keys(queue_name)
