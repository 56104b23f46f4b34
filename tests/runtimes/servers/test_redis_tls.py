"""Debian's Redis with TLS of its own: certificates are verified, and nothing falls back to plain text."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from tests.servers import free_port

from outlast import Client, Queue, TransportError
from outlast_worker import JobContext, Worker

REDIS = Path("/usr/bin/redis-server")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The server's rediss:// address, and the file of the authority that signed its certificate."""
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    port = free_port()
    options = {
        **{"--port": "0", "--tls-port": str(port), "--tls-auth-clients": "no", "--save": ""},
        **{"--tls-cert-file": "cert.pem", "--tls-key-file": "key.pem", "--tls-ca-cert-file": "ca.pem"},
    }
    command = [str(REDIS), *(word for pair in options.items() for word in pair)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as server:
        try:
            end = time.monotonic() + 20
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert time.monotonic() < end
                time.sleep(0.05)
            yield f"rediss://localhost:{port}", tmp_path / "ca.pem"
        finally:
            server.terminate()


@pytest.mark.filterwarnings("ignore:unclosed")  # the probing sockets of the fixture
def test_a_job_runs_over_tls_and_an_unknown_authority_is_refused(address: tuple[str, Path]) -> None:
    url, authority = address
    queue: Queue[Any, Any] = Queue("tls")
    trusted = f"{url}?ssl_ca_certs={authority}"
    worker = Worker(trusted)

    @worker.handles(queue)
    async def run(job: JobContext[Any]) -> str:
        return job.payload + "!"

    with Client(redis_url=trusted) as client:
        job = client.queue(queue).enqueue("over TLS")
        worker.run(burst=True)
        assert client.queue(queue).wait(job.id, timeout=10) == "over TLS!"
    with Client(redis_url=url) as client, pytest.raises(TransportError, match="CERTIFICATE_VERIFY_FAILED"):
        client.queue(queue).enqueue("to somebody else")
    with Client(redis_url=trusted.replace("localhost", "127.0.0.1")) as client, pytest.raises(TransportError):
        client.queue(queue).enqueue("a name that is not on the certificate")
