from collections.abc import Iterator
from typing import Any

import pytest
from tests.protocol.conftest import connection as connection
from tests.protocol.conftest import lab as lab
from tests.servers import start_valkey
from tests.worker.conftest import aclient as aclient
from tests.worker.conftest import client as client
from tests.worker.conftest import queue as queue
from tests.worker.conftest import spawn as spawn


@pytest.fixture
def own_valkey() -> Iterator[Any]:
    """A server that counts the commands of one test only."""
    with start_valkey() as server:
        yield server
