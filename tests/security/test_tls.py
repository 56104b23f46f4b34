"""Certificates and names are checked over https, and the password of a child's database is in no process list."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import redis
import trustme
from tests.cli.conftest import Start, start, until
from tests.faults.links import Background
from tests.servers import start_valkey

from outlast import AsyncClient, Client, Queue, TransportError
from outlast_worker.gateway import Database, GatewayConfig, GatewayServer

__all__ = ["start"]

TOKEN = "a-token-of-this-test"


class Front(Background):
    """Speaks TLS and passes on what it hears; counts what came through in clear."""

    def __init__(self, url: str, tls: ssl.SSLContext) -> None:
        self._to = urlsplit(url)
        self._tls = tls
        self.served = 0

    async def open(self) -> None:
        self.port = await self.listen(self._serve, self._tls)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.served += 1
        inner, outer = await asyncio.open_connection(self._to.hostname, self._to.port)

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
            sink.close()

        await asyncio.gather(copy(reader, outer), copy(inner, writer))


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def front(valkey_url: str, authority: trustme.CA) -> Iterator[Front]:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server)
    config = GatewayConfig(databases=[Database(redis_url=valkey_url, token=TOKEN)])
    with GatewayServer(config) as gateway, Front(gateway.url, server) as front:
        yield front


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> str:
    file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(file))
    return str(file)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_https_of_an_unknown_authority_is_refused_with_its_cause_and_the_token_stays_here(
    front: Front, queue_name: str, kind: str
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)

    async def over_asyncio() -> None:
        async with AsyncClient(f"https://localhost:{front.port}", TOKEN, timeout=2) as client:
            await client.queue(queue).enqueue("x")

    def enqueue() -> None:
        if kind == "async":
            asyncio.run(over_asyncio())
        else:
            with Client(f"https://localhost:{front.port}", TOKEN, timeout=2) as client:
                client.queue(queue).enqueue("x")

    with pytest.raises(TransportError, match=r"(?i)certificate.verify.failed") as refused:
        enqueue()
    assert not refused.value.maybe_applied
    assert TOKEN not in str(refused.value)
    assert front.served == 0, "no request came through"


def test_https_with_the_file_of_ones_own_authority_works_for_its_name_only(
    front: Front, ca_file: str, queue_name: str
) -> None:
    context = ssl.create_default_context(cafile=ca_file)
    with httpx.Client(verify=context) as http:
        with Client(f"https://localhost:{front.port}", TOKEN, http_client=http) as client:
            assert client.queue(Queue(queue_name)).enqueue("x").id
        with (
            Client(f"https://127.0.0.1:{front.port}", TOKEN, http_client=http, timeout=2) as client,
            pytest.raises(TransportError, match=r"(?i)certificate"),
        ):
            client.queue(Queue(queue_name)).enqueue("x")


def test_h71_passwords_and_payloads_are_in_no_process_list(start: Start, tmp_path: Path, queue_name: str) -> None:
    (tmp_path / "jobs.py").write_text(
        "import time\nfrom outlast import Queue\nfrom outlast_worker import Worker\n"
        f"worker = Worker()\nworker.handles(Queue({queue_name!r}))(lambda job: time.sleep(60))\n"
    )
    secret, prompt = "pw-of-this-test", "a-private-prompt"
    with start_valkey() as server, redis.Redis(port=server.port) as admin:
        admin.config_set("requirepass", secret)
        address = f"redis://:{secret}@127.0.0.1:{server.port}"
        worker = start("worker", "jobs:worker", "--processes", "2", OUTLAST_REDIS_URL=address)
        with Client(redis_url=address) as client:
            jobs = client.queue(Queue[Any, Any](queue_name))
            job = jobs.enqueue(prompt)
            until(lambda: jobs.get(job.id).status == "active", "it runs")  # type: ignore[union-attr]
        lines = worker.children()
        assert len(lines) >= 2
        assert [line for line in lines.values() if secret in line or prompt in line] == []
        assert secret not in worker.said
        assert prompt not in worker.said
