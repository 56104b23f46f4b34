"""The database side: pipelined connections for everything, exclusive ones for transactions, subscriptions, MONITOR.

A command is never sent twice: once its bytes have left, a lost connection means "perhaps applied", and only the
caller knows whether repeating is safe.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from outlast import InvalidArgumentError
from outlast_worker.gateway.meter import Meter, MeterLost
from outlast_worker.gateway.resp import Error, Parser, ProtocolError, Reply, encode_command

MAX_IN_FLIGHT = 1024  # requests of one database at a time; the rest wait their turn
MAX_EXCLUSIVE = 32  # transactions of one database at a time
MAX_UNREAD = 1000  # messages that a slow subscriber may leave unread before the database is told to wait

_MULTI = encode_command([b"MULTI"])


class UpstreamError(Exception):
    """The database did not answer. `sent`: the commands may have been applied."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class Refused(UpstreamError):
    """The database refused user and password."""

    def __init__(self) -> None:
        super().__init__("the database refused the user and password that it was given", sent=False)


@dataclass(frozen=True)
class Address:
    """Where the database listens and as whom the gateway logs in, from a URL."""

    host: str
    port: int
    path: str | None = None
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    number: int = 0

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises InvalidArgumentError; its message never holds the URL, which may hold a password."""
        try:
            parts = urlsplit(url)
            port = parts.port or 6379
        except ValueError:
            raise InvalidArgumentError("redis_url is not a URL: write redis://user:password@host:port/0") from None
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise InvalidArgumentError(f"redis_url has the scheme {parts.scheme!r}: use redis://, rediss:// or unix://")
        options = dict(parse_qsl(parts.query))
        number = options.pop("db", "") if parts.scheme == "unix" else parts.path.strip("/")
        if parts.fragment or (number and not number.isdecimal()):
            raise InvalidArgumentError(  # what stands there may be the rest of a password: it is not quoted
                "redis_url does not end in the number of a database, as redis://host/0 does "
                "(a password with / @ : # ? or % must be percent-encoded)"
            )
        context = None
        if parts.scheme == "rediss":
            context = ssl.create_default_context(cafile=options.pop("ssl_ca_certs", None))
            if options.pop("ssl_cert_reqs", "required") == "none":
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
        if options:
            known = "ssl_ca_certs and ssl_cert_reqs (with rediss://) and db (with unix://)"
            raise InvalidArgumentError(f"redis_url has the option {min(options)!r}: known are {known}")
        return cls(
            host=parts.hostname or "localhost",
            port=port,
            path=unquote(parts.path) if parts.scheme == "unix" else None,
            tls=context,
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            number=int(number or 0),
        )

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


@dataclass(slots=True)
class _Batch:
    future: asyncio.Future[list[Reply]]
    expected: int
    replies: list[Reply]


class Connection(asyncio.Protocol):
    """One TCP connection: replies belong to batches in the order of sending; what nobody asked for is a push."""

    def __init__(self, limit: int, on_lost: Callable[[Connection], None] | None = None) -> None:
        self.parser = Parser(limit)
        self.on_push: Callable[[Reply], None] | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_lost = on_lost
        self._waiting: deque[_Batch] = deque()
        self.transport: asyncio.Transport | None = None
        self._full: asyncio.Future[None] | None = None  # set while the server reads slower than we write

    @property
    def load(self) -> int:
        return len(self._waiting)

    async def execute(self, payload: bytes, count: int) -> list[Reply]:
        """Send commands, already encoded; their `count` replies. Raises UpstreamError."""
        while self._full is not None:
            await asyncio.shield(self._full)
        transport = self.transport
        if transport is None or transport.is_closing():
            raise UpstreamError("the connection to the database is closed", sent=False)
        future: asyncio.Future[list[Reply]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Batch(future, count, []))
        transport.write(payload)
        return await future

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            replies = self.parser.feed(data)
        except ProtocolError:
            self.close()
            return
        for reply in replies:
            if not self._waiting:
                if self.on_push is not None:
                    self.on_push(reply)
                continue
            batch = self._waiting[0]
            batch.replies.append(reply)
            if len(batch.replies) == batch.expected:
                self._waiting.popleft()
                if not batch.future.done():  # the request may be gone; its replies still had to be read
                    batch.future.set_result(batch.replies)

    def pause_writing(self) -> None:
        self._full = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        full, self._full = self._full, None
        if full is not None:
            full.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.resume_writing()
        if not self.lost.done():
            self.lost.set_result(None)
        while self._waiting:
            future = self._waiting.popleft().future
            if not future.done():
                future.set_exception(UpstreamError("the connection to the database was lost", sent=True))
        if self._on_lost is not None:
            self._on_lost(self)


class Subscription:
    """Messages of one exclusive connection; ends when either side closes it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: asyncio.Queue[Reply | EOFError] = asyncio.Queue()
        self._paused = False
        connection.on_push = self._push
        connection.lost.add_done_callback(lambda _: self._messages.put_nowait(EOFError()))

    def _push(self, message: Reply) -> None:
        self._messages.put_nowait(message)
        if not self._paused and self._messages.qsize() >= MAX_UNREAD:
            self._pause(True)

    def _pause(self, paused: bool) -> None:
        """Stop or resume reading, so that a slow subscriber makes the database wait and not our memory grow."""
        self._paused = paused
        transport = self._connection.transport
        if transport is not None and not transport.is_closing():
            transport.pause_reading() if paused else transport.resume_reading()

    async def next(self, timeout: float) -> Reply:
        """The next message. Raises TimeoutError, or EOFError at the end."""
        if self._messages.empty():
            async with asyncio.timeout(timeout):
                message = await self._messages.get()
        else:
            message = self._messages.get_nowait()
        if self._paused and self._messages.qsize() < MAX_UNREAD // 2:
            self._pause(False)
        if isinstance(message, EOFError):
            raise message
        return message

    def close(self) -> None:
        self._connection.close()


class Outcome(NamedTuple):
    """The replies of a batch and, while commands are counted, the names of the calls its scripts made."""

    replies: list[Reply]
    inner: list[str]


class Upstream:
    """One database and user: opens connections when they are first needed, up to `size` shared ones."""

    def __init__(
        self, address: Address, *, size: int, limit: int, timeout: float, main: Upstream | None = None
    ) -> None:
        self.address = address
        self._main = main  # whose MONITOR to use: this one's user may not
        self.metering = False  # whether the calls inside scripts are to be counted
        self._size = size
        self._limit = limit
        self._timeout = timeout
        self._shared: list[Connection] = []
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._growing: asyncio.Task[None] | None = None
        self._metered: asyncio.Task[Meter] | None = None
        self._in_flight = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._exclusive = asyncio.Semaphore(MAX_EXCLUSIVE)

    async def execute(self, payload: bytes, count: int) -> Outcome:
        """Run a batch on a shared connection: in order, whole, but not atomic. Raises UpstreamError."""
        async with self._in_flight:
            connection: Connection | None = None
            try:
                async with asyncio.timeout(self._timeout):
                    connection = await self._pick()
                    return await self._run(connection, payload, count)
            except TimeoutError:
                raise self._late(connection) from None

    async def execute_alone(self, payload: bytes, count: int, *, transaction: bool = False) -> Outcome:
        """Run a batch on a connection that nobody else uses meanwhile: MULTI … EXEC, or what may block.

        `transaction` puts MULTI in front; if that is refused, its error is the only reply.
        """
        async with self._exclusive:
            connection: Connection | None = None
            try:
                async with asyncio.timeout(self._timeout):
                    connection = self._idle.pop() if self._idle else await self.open()
                    connection.parser.depth = 1 if transaction else 0
                    outcome = await self._run(connection, payload, count, transaction)
            except BaseException as error:
                if connection is not None:
                    connection.close()  # given up half-way: MULTI may still be open on it
                if isinstance(error, TimeoutError):
                    raise self._late(connection) from None
                raise
            if not connection.lost.done():
                self._idle.append(connection)
            return outcome

    @asynccontextmanager
    async def subscription(self, *command: bytes) -> AsyncGenerator[Subscription]:
        """A connection of its own on which `command` has been sent; what comes back are the messages."""
        connection = await self.open()
        subscription = Subscription(connection)
        try:
            if connection.transport is not None:
                connection.transport.write(encode_command(command))
            yield subscription
        finally:
            connection.close()

    async def aclose(self) -> None:
        """Close every connection. Requests that still wait for a reply fail."""
        for task in (self._growing, self._metered):
            if task is not None:
                task.cancel()
        connections = list(self._all)
        for connection in connections:
            connection.close()
        await asyncio.gather(*[connection.lost for connection in connections])

    def close_subscriptions(self) -> None:
        """End what would otherwise never end, so that a server can shut down."""
        for connection in list(self._all):
            if connection.on_push is not None:
                connection.close()

    def _late(self, connection: Connection | None) -> UpstreamError:
        # What waits behind the late reply on this connection would wait as long, so give the connection up.
        if connection is not None:
            connection.close()
        message = f"the database did not answer within {self._timeout:g} s"
        return UpstreamError(message, sent=connection is not None)

    async def _run(self, connection: Connection, payload: bytes, count: int, multi: bool = False) -> Outcome:
        before = after = b""
        calls: asyncio.Future[list[str]] | None = None
        if self.metering:
            before, after, calls = (await self._meter()).mark()
        if multi:
            # MULTI on its own first: were it refused (an ACL may), what follows would run without it.
            first = (await connection.execute(before + _MULTI, 1 + bool(before)))[-1]
            if isinstance(first, Error):
                return Outcome([first], [])
            before = b""
        replies = await connection.execute(before + payload + after, bool(before) + count + bool(after))
        if calls is None:
            return Outcome(replies, [])
        mark = replies.pop()
        if before:
            replies.pop(0)
        # A server that is loading or busy refuses the mark, and ran no script either.
        try:
            return Outcome(replies, [] if isinstance(mark, Error) else await calls)
        except MeterLost as error:
            raise UpstreamError(str(error), sent=True) from error

    async def _meter(self) -> Meter:
        if self._main is not None:
            return await self._main._meter()
        task = self._metered
        if task is None or (task.done() and (task.cancelled() or task.exception() or task.result().lost)):
            task = self._metered = asyncio.ensure_future(self._start_meter())
        return await asyncio.shield(task)

    async def _start_meter(self) -> Meter:
        connection = await self.open()
        meter = Meter()
        reply = (await connection.execute(encode_command([b"MONITOR"]), 1))[0]
        if isinstance(reply, Error):
            connection.close()
            raise UpstreamError(f"billed commands cannot be counted, MONITOR is refused: {reply.text}", sent=False)
        connection.on_push = meter.line
        connection.lost.add_done_callback(lambda _: meter.stop())
        return meter

    async def _pick(self) -> Connection:
        """An idle shared connection, a new one, or, when there are enough of them, the one with the least to do."""
        while True:
            best = min(self._shared, key=lambda c: c.load, default=None)
            if best is not None and (not best.load or len(self._shared) >= self._size):
                return best
            if self._growing is None or self._growing.done():
                self._growing = asyncio.ensure_future(self._grow())
                self._growing.add_done_callback(lambda task: task.cancelled() or task.exception())
            try:
                await asyncio.shield(self._growing)
            except UpstreamError:
                if best is None or best.lost.done():
                    raise
                return best

    async def _grow(self) -> None:
        self._shared.append(await self.open())

    async def open(self) -> Connection:
        """A new connection, logged in. Raises UpstreamError, or Refused for a wrong user or password."""
        address, loop = self.address, asyncio.get_running_loop()

        def create() -> Connection:
            return Connection(self._limit, self._forget)

        opening: Awaitable[tuple[asyncio.Transport, Connection]]
        if address.path:
            opening = loop.create_unix_connection(create, address.path)
        else:
            opening = loop.create_connection(create, address.host, address.port, ssl=address.tls)
        try:
            async with asyncio.timeout(min(10.0, self._timeout)):
                _, connection = await opening
        except (OSError, TimeoutError) as error:
            raise UpstreamError(f"no database answers at {address}: {error or 'time-out'}", sent=False) from error
        self._all.add(connection)
        login: list[list[str]] = []
        if address.password is not None:
            login.append(["AUTH", *([address.username] if address.username else []), address.password])
        if address.number:
            login.append(["SELECT", str(address.number)])
        try:
            # A server that has too many clients accepts, complains and hangs up: find out before a command does.
            for words in login or [["PING"]]:
                reply = (await connection.execute(encode_command([word.encode() for word in words]), 1))[0]
                if isinstance(reply, Error) and words[0] == "AUTH":
                    raise Refused
                if isinstance(reply, Error) and (words[0] == "SELECT" or reply.startswith(b"ERR max number")):
                    raise UpstreamError(reply.text, sent=False)
        except BaseException as error:
            connection.close()
            if isinstance(error, UpstreamError):
                error.sent = False
            raise
        return connection

    def _forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        for pool in (self._shared, self._idle):
            if connection in pool:
                pool.remove(connection)
