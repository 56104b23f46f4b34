from __future__ import annotations

import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.webhooks.receiver import Receiver, receiver

from outlast import Queue
from outlast.protocol import Keys
from outlast_worker.tcp import AsyncTcpTransport
from outlast_worker.webhooks import Delivery, Webhooks, new_secret

SECRET = new_secret()


@pytest.fixture
async def hooked() -> AsyncIterator[Receiver]:
    async with receiver() as found:
        yield found


@pytest.fixture
async def transport(valkey_url: str) -> AsyncIterator[AsyncTcpTransport]:
    transport = AsyncTcpTransport(valkey_url)
    yield transport
    await transport.aclose()


class Deliverer:
    """One delivery, attempt by attempt, without a worker around it."""

    def __init__(self, transport: AsyncTcpTransport, queue_name: str) -> None:
        self.queue: Queue[Any, Any] = Queue(queue_name)
        self._transport = transport
        self._keys = Keys(f"{{{queue_name}}}:hooks")

    async def __call__(
        self,
        webhooks: Webhooks,
        url: str,
        *,
        id: str = "job-1",
        delivery: str = "1-1",
        attempt: int = 1,
        starts: int | None = None,
        **options: Any,
    ) -> dict[str, int]:
        given = {"status": "completed", "at": int(time.time() * 1000), "queue": self.queue.name, **options}
        lease = SimpleNamespace(keys=self._keys)
        job: Any = SimpleNamespace(
            id=delivery,
            attempt=attempt,
            starts=attempt if starts is None else starts,
            payload=Delivery(id=id, url=url, **given),
            _output=SimpleNamespace(_lease=lease, _transport=self._transport),
        )
        return await webhooks._deliver(job, self.queue)


@pytest.fixture
def deliver(transport: AsyncTcpTransport, queue_name: str) -> Deliverer:
    return Deliverer(transport, queue_name)
