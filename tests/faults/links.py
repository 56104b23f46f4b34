"""Things that go wrong between a process and its database, on loopback, each in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

T = TypeVar("T")

LOOPBACK = Path(__file__).with_name("loopback.pem")
"""A self-signed certificate of 127.0.0.1 and its key, made for these tests alone."""


class Background:
    """An event loop in a thread: its servers live on while a test blocks, freezes processes or runs its own loop."""

    def __enter__(self) -> Any:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.tasks: set[asyncio.Task[None]] = set()
        self.do(self.open())
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def open(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        pass

    async def listen(
        self,
        serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        tls: ssl.SSLContext | None = None,
    ) -> int:
        async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self.tasks.add(task)
            try:
                await serve(reader, writer)
            except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass
            finally:
                self.tasks.discard(task)
                writer.close()
                try:
                    async with asyncio.timeout(0.2):
                        await writer.wait_closed()
                except OSError:
                    writer.transport.abort()

        self._server = await asyncio.start_server(client, "127.0.0.1", 0, ssl=tls)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _close(self) -> None:
        await self.close()
        self._server.close()
        for _ in range(3):  # what was accepted a moment ago may not have a task yet
            await asyncio.sleep(0.01)
            for task in list(self.tasks):
                task.cancel()
            if self.tasks:
                await asyncio.wait(self.tasks)
        await self._server.wait_closed()


class Proxy(Background):
    """Stands between a worker and a server.

    Per message from the client (a batch of commands in one write): `drop_every` lets each n-th run and then closes
    the connection without the reply. `hold()` lets nothing through until `heal()`, like a network that loses
    packets, on connections that exist or (`new=True`) on new ones too; `down()` closes all and serves none until
    `heal()`; `cut()` closes all once. `delay` are seconds by which each reply is late, and `trickle` seconds between
    the fiftieths of a reply.
    """

    def __init__(self, url: str, *, tls: bool = False) -> None:
        self._tls = tls
        self.aim(url)
        self.messages = 0
        self.connections = 0
        self.dropped = 0
        self.delay = self.trickle = 0.0
        self.drop_every = 0
        self.drop_next = 0
        self._down = False

    def aim(self, url: str) -> None:
        """Where new connections lead."""
        host, _, port = url.rpartition("/")[2].rpartition(":")
        self._target = (host, int(port))

    @property
    def url(self) -> str:
        return f"{'rediss' if self._tls else 'redis'}://127.0.0.1:{self.port}"

    async def open(self) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH) if self._tls else None
        if context is not None:
            context.load_cert_chain(LOOPBACK)
        self._gates: set[asyncio.Event] = set()
        self._holds_new = False
        self.port = await self.listen(self._serve, context)

    def hold(self, *, new: bool = True) -> None:
        async def hold() -> None:
            self._holds_new = new
            for gate in self._gates:
                gate.clear()

        self.do(hold())

    def down(self) -> None:
        async def close() -> None:
            self._down = True
            for task in list(self.tasks):
                task.cancel()

        self.do(close())

    def cut(self) -> None:
        """Close every connection; new ones are fine."""
        self.down()
        self.heal()

    def redirect(self, url: str) -> None:
        """Lead to another server from now on, as an address does after a failover."""
        host, _, port = url.rpartition("/")[2].rpartition(":")
        self._target = (host, int(port))
        self.cut()

    def heal(self) -> None:
        async def heal() -> None:
            self._down = self._holds_new = False
            self.delay = self.trickle = 0.0
            self.drop_every = self.drop_next = 0
            for gate in self._gates:
                gate.set()

        self.do(heal())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._down:
            return
        self.connections += 1
        up_reader, up_writer = await asyncio.open_connection(*self._target)
        gate = asyncio.Event()
        if not self._holds_new:
            gate.set()
        self._gates.add(gate)
        swallow = asyncio.Event()

        async def replies() -> None:
            while data := await up_reader.read(65536):
                await gate.wait()
                if swallow.is_set():
                    self.dropped += 1
                    break
                if self.delay:
                    await asyncio.sleep(self.delay)
                step = len(data) // 50 + 1 if self.trickle else len(data)
                for at in range(0, len(data), step):
                    writer.write(data[at : at + step])
                    await writer.drain()
                    await asyncio.sleep(self.trickle)

        async def requests() -> None:
            while data := await reader.read(1 << 20):
                await gate.wait()
                if b"BLPOP" not in data and b"CLIENT" not in data:
                    self.messages += 1
                    if self.drop_next or (self.drop_every and self.messages % self.drop_every == 0):
                        self.drop_next = max(0, self.drop_next - 1)
                        swallow.set()
                up_writer.write(data)
                await up_writer.drain()

        ways = [asyncio.ensure_future(replies()), asyncio.ensure_future(requests())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up_writer.close()  # first: this task may be cancelled again while it waits
            self._gates.discard(gate)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            with suppress(OSError):
                await up_writer.wait_closed()


class Canned(Background):
    """A server that answers the next `script` lines instead of doing anything, then +OK / whatever `then` says.

    Handshake commands (CLIENT, AUTH, SELECT) are answered as a server would. `hangs_up`: after how many of them the
    next connections are closed, with the last answer where the system can do that; -1: reset as soon as they are made.
    """

    def __init__(self, *script: bytes, then: bytes = b"*1\r\n$2\r\nok\r\n") -> None:
        self.script = list(script)
        self.then = then
        self.commands: list[list[bytes]] = []
        self.connections = 0
        self.hangs_up: list[int] = []

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def open(self) -> None:
        self.port = await self.listen(self._serve)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        answers = self.hangs_up.pop(0) if self.hangs_up else None
        connection = cast("socket.socket", writer.get_extra_info("socket"))
        if answers == -1:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        if answers == 0:
            await reader.read(1)
        while answers != 0:
            count = int((await reader.readuntil(b"\r\n"))[1:])
            command: list[bytes] = []
            for _ in range(count):
                size = int((await reader.readuntil(b"\r\n"))[1:])
                command.append((await reader.readexactly(size + 2))[:-2])
            if command[0] in (b"CLIENT", b"AUTH", b"SELECT"):
                if answers == 1 and hasattr(socket, "TCP_CORK"):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
                writer.write(b"+OK\r\n")
                if answers is not None:
                    answers -= 1
            else:
                self.commands.append(command)
                answer = self.script.pop(0) if self.script else self.then
                if answer == b"":
                    return  # closes
                writer.write(answer)
            await writer.drain()


class Provider(Background):
    """A model on loopback: streams a word each `every` seconds over plain HTTP and notes when its caller leaves."""

    def __init__(self, words: int = 600, every: float = 0.05) -> None:
        self.words = words
        self.every = every
        self.calls = 0
        self.left = threading.Event()
        self.called = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    async def open(self) -> None:
        self.port = await self.listen(self._serve)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.calls += 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n")
        self.called.set()
        leaves = asyncio.ensure_future(reader.read(1))
        try:
            for n in range(self.words):
                writer.write(b"word%d " % n)
                await writer.drain()
                await asyncio.wait([leaves], timeout=self.every)
                if leaves.done():
                    self.left.set()
                    return
        except OSError:
            self.left.set()
        finally:
            leaves.cancel()
