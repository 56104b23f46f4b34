"""Calls over TCP: `TcpTransport` for threads, `AsyncTcpTransport` for coroutines; single servers, clusters, sentinels.

redis-py opens the connections (addresses, TLS, login, database); what travels on them is ours. Its own command path
hides what a queue must know: it sends a script again on its own after a time-out, turns a refusal in mid-pipeline
into a lost connection, and awaits every line of a reply (36 a reserved job).

An async connection belongs to one task, which sends all calls of a loop turn in one pipeline. So a cancelled caller
takes nothing with it: its reply is read and dropped, and the next one goes to whom it belongs.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import ssl
import threading
import time
from asyncio import AbstractEventLoop, Future, Task
from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeVar, cast
from urllib.parse import parse_qs, urlsplit

import redis.asyncio.connection
import redis.connection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    InvalidResponse,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from outlast.errors import (
    AuthError,
    ConfigurationError,
    InvalidArgumentError,
    OutlastError,
    ServerError,
    TransportError,
)
from outlast.protocol.calls import Call, items, text
from outlast.transport import TRANSIENT, code_of, server_error

__all__ = ["AsyncTcpTransport", "SilentError", "TcpTransport", "TlsError", "is_metered"]

T = TypeVar("T")

TIMEOUT = 10.0
"""Seconds for one call with all its repeats. A repeat gets a fresh connection, so a single try gets half of it."""
CONNECT_TIMEOUT = 3.0
"""Seconds to connect and log in, TLS included."""
GOODBYE = 0.5
"""Seconds that closing a connection may take before it is cut."""
IDLE = 30.0
"""Seconds after which a connection for blocking reads that nobody uses is closed."""
BATCH_CALLS, BATCH_BYTES = 512, 4 * 1024 * 1024
"""The most that goes out in one write: a reply has to come back before the next batch leaves."""

Address = tuple[str, int]


# -- the wire --------------------------------------------------------------------------------------------------------


class Refusal:
    """An error reply. It is a value, not an exception: its neighbours in the pipeline have replies of their own."""

    __slots__ = ("code", "text")

    def __init__(self, line: bytes) -> None:
        self.text = line.decode("utf-8", "replace")
        self.code = code_of(self.text)


def pack(command: Sequence[str]) -> bytes:
    """One command as the server reads it."""
    whole = f"*{len(command)}\r\n" + "".join([f"${len(argument)}\r\n{argument}\r\n" for argument in command])
    if whole.isascii():  # characters are bytes: no need to encode each argument by itself
        return whole.encode()
    parts = [b"*%d\r\n" % len(command)]
    for argument in command:
        data = argument.encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


class _Incomplete(Exception):
    """The reply goes on; it cannot be whole before `need` bytes are there."""

    def __init__(self, need: int) -> None:
        self.need = need


def _parse(data: bytes, at: int) -> tuple[Any, int]:
    """The RESP2 reply at `at`, and where it ends."""
    end = data.find(b"\r\n", at)
    if end < 0:
        raise _Incomplete(len(data) + 1)
    kind = data[at]
    line = data[at + 1 : end]
    end += 2
    if kind == 36:  # $
        size = int(line)
        if size < 0:
            return None, end
        stop = end + size
        if len(data) < stop + 2:
            raise _Incomplete(stop + 2)
        return data[end:stop], stop + 2
    if kind == 58:  # :
        return int(line), end
    if kind == 42:  # *
        size = int(line)
        if size < 0:
            return None, end
        out: list[Any] = []
        for _ in range(size):
            # Nearly all of what comes is text in lists, so its case is here once more, without a call for each.
            if data[end : end + 1] == b"$" and (line_end := data.find(b"\r\n", end)) > 0:
                length = int(data[end + 1 : line_end])
                stop = line_end + 2 + length
                if length >= 0 and stop + 2 <= len(data):
                    out.append(data[line_end + 2 : stop])
                    end = stop + 2
                    continue
            value, end = _parse(data, end)
            out.append(value)
        return out, end
    if kind == 43:  # +
        return line, end
    if kind == 45:  # -
        return Refusal(line), end
    raise ValueError(kind)


class _Replies:
    """Bytes in, whole replies out."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._need = 1

    def feed(self, data: bytes, out: list[Any]) -> None:
        """Append to `out` what `data` completes. ValueError: the other end does not speak RESP2."""
        self._parts.append(data)
        self._size += len(data)
        if self._size < self._need:
            return  # in the middle of a long payload: parsing again would find the same
        data = b"".join(self._parts)
        at = 0
        self._need = 1
        while at < len(data):
            try:
                value, at = _parse(data, at)
            except _Incomplete as more:
                self._need = more.need - at
                break
            out.append(value)
        self._parts = [data[at:]] if at < len(data) else []
        self._size = len(data) - at


# -- where to connect ------------------------------------------------------------------------------------------------


@dataclass
class _Place:
    """What a URL says: where the database is and as whom to log in."""

    nodes: list[Address]
    service: str | None = None
    cluster: bool = False
    options: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    sentinel_options: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    tls: bool = False
    path: str | None = None
    patience: float = CONNECT_TIMEOUT

    @property
    def label(self) -> str:
        """Where, without user and password: for messages."""
        return ",".join(map(self.at, self.nodes))

    @property
    def metered(self) -> bool:
        return any(host.endswith(".upstash.io") for host, _ in self.nodes)

    def at(self, address: Address) -> str:
        return self.path or f"{address[0]}:{address[1]}"


_SCHEMES = (
    "redis://, rediss:// (TLS), unix://, redis+cluster://, rediss+cluster://, redis+sentinel://, rediss+sentinel://"
)
_OURS = (
    *("host", "port", "path", "connection_class", "socket_timeout", "socket_connect_timeout", "retry_on_timeout"),
    *("retry_on_error", "max_connections", "timeout", "health_check_interval", "decode_responses", "protocol"),
)
"""What the URL may ask of redis-py but which is decided here, or means nothing here."""


def _read_url(url: object) -> tuple[_Place, float | None]:
    """The place, and the socket_timeout that the URL asks for. No message quotes the URL: it may hold a password."""
    if not isinstance(url, str):
        raise InvalidArgumentError(f"redis_url is {type(url).__name__}; give a str such as redis://localhost:6379/0")
    place: _Place | None
    timeout: float | None = None
    try:
        parts = urlsplit(url)
        base, _, kind = parts.scheme.partition("+")
        if base not in ("redis", "rediss", "unix") or kind not in ("", "cluster", "sentinel"):
            raise ConfigurationError(f"redis_url starts with {parts.scheme[:20]!r}://; use one of {_SCHEMES}")
        user, at, hosts = parts.netloc.rpartition("@")
        first, *others = hosts.split(",")
        path, service = parts.path, None
        if kind == "sentinel":
            service, _, number = path.strip("/").partition("/")
            path = f"/{number}"
            if not service:
                raise ConfigurationError("redis_url names no service; write redis+sentinel://host:26379/SERVICE")
        # Each address goes through redis-py's own parser, so IPv6 and escapes mean what they mean there.
        query = "&".join(pair for pair in parts.query.split("&") if not pair.startswith("sentinel_"))
        found = [
            cast(
                "dict[str, Any]",
                redis.connection.parse_url(  # type: ignore[no-untyped-call]
                    f"{base}://{user}{at}{host}{path}?{query}"
                ),
            )
            for host in (first, *others)
        ]
        wanted = found[0]
        timeout = wanted.get("socket_timeout")
        port = 26379 if kind == "sentinel" else 6379
        nodes = [(cast("str", item.get("host", "localhost")), cast("int", item.get("port", port))) for item in found]
        sentinel = {key[9:]: values[0] for key, values in parse_qs(parts.query).items() if key.startswith("sentinel_")}
        options = {key: value for key, value in wanted.items() if key not in _OURS}
        if kind == "cluster":
            options.pop("db", None)
        place = _Place(nodes, service, kind == "cluster", options, sentinel, base == "rediss")
        if base == "unix":
            place.path = wanted.get("path")
    except ConfigurationError:
        raise
    except (ValueError, TypeError):
        place = None  # the error itself quotes the URL, so ours must not even have it as its context
    if place is None:
        raise ConfigurationError(
            "redis_url cannot be read (a password with / @ : # ? or % must be percent-encoded); "
            "write redis://user:password@host:6379/0"
        )
    if timeout is not None and not timeout > 0:
        raise ConfigurationError(f"redis_url has socket_timeout={timeout!r}; give seconds above 0, or leave it out")
    return place, timeout


def is_metered(url: str) -> bool:
    """Whether the database bills each command, as far as its address tells. Raises ConfigurationError."""
    return _read_url(url)[0].metered


def _connection(place: _Place, address: Address, *, aio: bool, sentinel: bool = False) -> Any:
    """A redis-py connection, not yet open. It never repeats anything by itself."""
    module = redis.asyncio.connection if aio else redis.connection
    options: dict[str, Any] = {**place.options}
    if sentinel:
        options = {key: value for key, value in options.items() if key not in ("username", "password", "db")}
        options |= place.sentinel_options
    options |= {
        "socket_timeout": place.patience,
        "socket_connect_timeout": place.patience,
        "protocol": 2,
        "retry": (AsyncRetry if aio else Retry)(NoBackoff(), 0),
    }
    try:
        if place.path:
            return module.UnixDomainSocketConnection(path=place.path, **options)
        options.setdefault("socket_keepalive", True)
        kind = module.SSLConnection if place.tls else module.Connection
        return kind(host=address[0], port=address[1], **options)
    except TypeError:
        known = ", ".join(sorted(place.options.keys() - {"username", "password"}))
        raise ConfigurationError(f"redis_url has an option that redis-py does not know, one of: {known}") from None
    except RedisError as error:
        raise ConfigurationError(f"redis_url cannot be used: {error}") from None


class TlsError(TransportError):
    """TLS cannot work with this server as it is configured, here or there: trying again does not help."""


def _not_connected(error: BaseException, place: _Place, address: Address) -> AuthError | ServerError | TransportError:
    """What a failed connect means."""
    label = place.at(address)
    link: BaseException | None = error
    while link is not None and place.tls:
        if isinstance(link, ssl.SSLError):
            return TlsError(f"cannot connect to {label}: TLS failed ({link.reason or link})", maybe_applied=False)
        link = link.__cause__ or link.__context__
    if isinstance(error, (AuthenticationError, AuthenticationWrongNumberOfArgsError, NoPermissionError)):
        return AuthError(f"{label} refused user or password: {error}", code="WRONGPASS")
    if isinstance(error, InvalidResponse):
        return TransportError(
            f"{label} does not answer like Redis; if it expects TLS, use rediss://", maybe_applied=False
        )
    if isinstance(error, ResponseError):
        return server_error(f"{getattr(error, 'status_code', None) or ''} {error}".strip())
    if isinstance(error, RedisTimeoutError):
        if place.tls and _answers_without_tls(address):
            return TlsError(f"cannot connect to {label}: it does not speak TLS; use redis://", maybe_applied=False)
        kind = TransportError if "connecting" in str(error) else SilentError  # else it was the login
        return kind(f"no answer from {label} while connecting", maybe_applied=False)
    return TransportError(f"cannot connect to {label}: {error or type(error).__name__}", maybe_applied=False)


class SilentError(TransportError):
    """Connected, and no answer in time. Whatever stands still there may stand still for everybody."""


def _answers_without_tls(address: Address) -> bool:
    """A server without TLS waits for the rest of the handshake that it does not understand; ask it in plain words.

    It blocks for at most half a second, once, where nothing works anyway.
    """
    try:
        with socket.create_connection(address, 0.25) as plain:
            plain.settimeout(0.25)
            plain.sendall(pack(["PING"]))
            return plain.recv(1) in (b"+", b"-")
    except OSError:
        return False


def _late(label: str, limit: float) -> TransportError:
    return SilentError(f"no answer from {label} within {limit:.3g} s")


def _closed(label: str, *, sent: bool) -> TransportError:
    return TransportError(f"{label} closed the connection", maybe_applied=sent)


def _strange(label: str) -> TransportError:
    return TransportError(f"{label} sent something that is not RESP2")


# -- what to do with an answer: one conversation, two drivers -------------------------------------------------------


class _Ask(NamedTuple):
    """Send `call` to the node, and bring back its raw reply or raise TransportError."""

    call: Call[Any]
    address: Address
    asking: bool
    limit: float
    block: bool


def _key_of(call: Call[Any]) -> str | None:
    """The first key. Every key starts with its hash tag, and comes before any value."""
    if call.script is not None:
        return call.args[1]
    return next((argument for argument in call.args[1:] if argument.startswith("{")), None)


class _Base:
    """Everything that does no I/O."""

    blocking = True
    sync_token: str | None = None

    def __init__(self, url: str, *, timeout: float = TIMEOUT) -> None:
        self._place, limit = _read_url(url)
        self._timeout = timeout
        self._limit = min(timeout / 2, limit or timeout)
        self._place.patience = min(CONNECT_TIMEOUT, self._limit)
        self._locking = self._place.metered
        """Whether scripts say that they touch no key but their own, until the server refuses it."""
        self._slots: dict[int, Address] = {}
        self._seeds = list(self._place.nodes)

    @property
    def cluster(self) -> bool:
        """Whether keys of several queues may live on several nodes: one command may then name one queue only."""
        return self._place.cluster or bool(self._slots)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._place.label})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} holds a password and connections; make one where it is used")

    def _home(self, key: str | None) -> Address:
        if key is not None and self._slots:
            known = self._slots.get(key_slot(key.encode()))
            if known is not None:
                return known
        return self._seeds[0]

    def _moved(self, refusal: Refusal, asked: Address) -> Address:
        """MOVED 3999 127.0.0.1:6381, with an empty host for the node that said it."""
        _, slot, where = refusal.text.split(" ")[:3]
        host, _, port = where.rpartition(":")
        address = (host or asked[0], int(port))
        if refusal.code == "MOVED":
            self._slots[int(slot)] = address
            if address not in self._seeds:
                self._seeds.append(address)
        return address

    def _unreachable(self, address: Address) -> None:
        """Ask another node where the slots of this one went."""
        if len(self._seeds) > 1 and self._place.service is None:
            self._slots = {slot: node for slot, node in self._slots.items() if node != address}
            if self._seeds[0] == address:
                self._seeds = [*self._seeds[1:], address]

    def _talk(self, call: Call[T], block: float | None, key: str | None = None) -> Generator[_Ask | float, Any, T]:
        """Send, follow, repeat. Yields what to ask, or seconds to sleep."""
        end = time.monotonic() + self._timeout + (block or 0)
        key = _key_of(call) or key
        address: Address | None = None
        asking = sent = False
        hops, pause = 0, 0.025
        while True:
            node = address or self._home(key)
            ask = _Ask(call, node, asking, self._limit + (block or 0), block is not None)
            address, asking = None, False
            failure: TransportError | ServerError
            try:
                reply = yield ask
            except TransportError as error:
                sent = error.maybe_applied = error.maybe_applied or sent
                if isinstance(error, TlsError) or ((error.maybe_applied or ask.block) and not call.replayable):
                    raise
                self._unreachable(node)
                failure = error
            else:
                if not isinstance(reply, Refusal):
                    return call.decode(reply)
                moved = reply.code in ("MOVED", "ASK")
                if moved:
                    address, asking = self._moved(reply, node), reply.code == "ASK"
                    hops += 1
                    if hops <= 5:  # nodes that send each other's callers in circles settle within seconds
                        continue
                if "allow-key-locking" in reply.text:
                    self._locking = False  # it knows no such flag, or found a key not named: nothing was written
                    continue
                failure = server_error(reply.text)
                if reply.code not in TRANSIENT and not moved:
                    raise failure
            if time.monotonic() + pause > end:
                raise failure
            yield pause * random.uniform(0.5, 1.5)
            pause = min(pause * 2, 1.0)


_ASKING = pack(["ASKING"])
_CLIENT_ID = pack(["CLIENT", "ID"])
_PING = Call(("PING",), bytes)
_MASTER = "GET-MASTER-ADDR-BY-NAME"


def _no_master(place: _Place, last: Exception | None) -> TransportError:
    error = TransportError(f"no sentinel of {place.label} knows the master of {place.service!r}", maybe_applied=False)
    error.__cause__ = last
    return error


def _master(reply: Any) -> Address | None:
    if reply is None or isinstance(reply, Refusal):
        return None
    host, port = items(reply)
    return text(host), int(text(port))


def _unknown_script(call: Call[Any], reply: Any) -> bool:
    return isinstance(reply, Refusal) and reply.code == "NOSCRIPT" and call.script is not None


# -- threads ---------------------------------------------------------------------------------------------------------


class _Link:
    """One open connection of a thread."""

    def __init__(self, place: _Place, address: Address, *, sentinel: bool = False) -> None:
        self.label = place.at(address)
        self._connection = _connection(place, address, aio=False, sentinel=sentinel)
        try:
            self._connection.connect()
        except (RedisError, OSError) as error:
            raise _not_connected(error, place, address) from error
        self._socket = self._connection._sock
        self._replies = _Replies()

    def alive(self) -> bool:
        """Whether the server has kept the connection while it was idle."""
        try:
            self._socket.settimeout(0)
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            pass
        return False

    def exchange(self, data: bytes, count: int, limit: float) -> list[Any]:
        end = time.monotonic() + limit
        out: list[Any] = []
        try:
            self._socket.settimeout(limit)
            self._socket.sendall(data)
            while len(out) < count:
                self._socket.settimeout(max(0.001, end - time.monotonic()))
                received = self._socket.recv(65536)
                if not received:
                    raise _closed(self.label, sent=True)
                self._replies.feed(received, out)
        except TimeoutError as error:
            raise _late(self.label, limit) from error
        except OSError as error:
            raise _closed(self.label, sent=True) from error
        except ValueError as error:
            raise _strange(self.label) from error
        return out

    def close(self) -> None:
        with suppress(RedisError, OSError):
            self._connection.disconnect()


class TcpTransport(_Base):
    """Calls over TCP, for any number of threads; each call in flight has a connection of its own.

    `url` is one of redis://, rediss:// (TLS), unix://, redis+cluster://host:port,host:port and
    redis+sentinel://host:port,host:port/service; the last two also as rediss+…. A redis:// address of a cluster's node
    works, too. `timeout` (10 s) bounds a call with its repeats; a try gets half of it, or the URL's socket_timeout.
    Safe to use after a fork.
    """

    def __init__(self, url: str, *, timeout: float = TIMEOUT) -> None:
        super().__init__(url, timeout=timeout)
        self._idle: defaultdict[Address, deque[_Link]] = defaultdict(deque)
        self._pid = os.getpid()

    def send(self, call: Call[T], *, block: float | None = None) -> T:
        """See `outlast.transport.Transport.send`."""
        return self._drive(self._talk(call, block))

    def _drive(self, talk: Generator[_Ask | float, Any, T]) -> T:
        try:
            step = next(talk)
            while True:
                if not isinstance(step, _Ask):
                    time.sleep(step)
                    step = next(talk)
                    continue
                try:
                    reply = self._exchange(step.address, [step.call], step.limit, asking=step.asking)[0]
                except TransportError as error:
                    step = talk.throw(error)
                else:
                    step = talk.send(reply)
        except StopIteration as stop:
            return cast("T", stop.value)

    def send_many(self, calls: Sequence[Call[Any]], *, outcomes: bool = False) -> list[Any]:
        """See `outlast.transport.Transport.send_many`."""
        key = next((key for call in calls if (key := _key_of(call)) is not None), None)
        replies: list[Any]
        try:
            replies = self._exchange(self._home(key), calls, self._limit) if calls else []
        except TransportError as error:
            if error.maybe_applied and not all(call.replayable for call in calls):
                raise
            replies = [None] * len(calls)
            again = [True] * len(calls)
        else:
            again = [isinstance(reply, Refusal) for reply in replies]
        answers: list[Any] = []
        failure: Exception | None = None
        for call, reply, repeat in zip(calls, replies, again, strict=True):
            try:
                # A refused call did not run; the conversation of a single call knows what that asks for.
                answers.append(self._drive(self._talk(call, None, key)) if repeat else call.decode(reply))
            except TransportError:
                raise  # the server does not answer: it will not answer the others either
            except Exception as error:
                if outcomes and isinstance(error, OutlastError):
                    answers.append(error)
                else:
                    failure = failure or error
        if failure is not None:
            raise failure
        return answers

    def _exchange(
        self, address: Address, calls: Sequence[Call[Any]], limit: float, *, asking: bool = False
    ) -> list[Any]:
        link = self._take(address)
        try:
            packed = [pack(call.command(locking=self._locking)) for call in calls]
            if asking:
                packed.insert(0, _ASKING)
            replies = link.exchange(b"".join(packed), len(packed), limit)[-len(calls) :]
            again = [at for at, call in enumerate(calls) if _unknown_script(call, replies[at])]
            if again:
                # The first call of a script brings its text for all.
                first = {calls[at].script: at for at in reversed(again)}
                packed = [
                    pack(calls[at].command(source=first[calls[at].script] == at, locking=self._locking)) for at in again
                ]
                for at, reply in zip(again, link.exchange(b"".join(packed), len(packed), limit), strict=True):
                    replies[at] = reply
            if any(isinstance(reply, Refusal) and reply.code == "READONLY" for reply in replies):
                link.close()  # no longer the master: the address may point to another server by now
                return replies
        except BaseException:
            link.close()
            raise
        self._idle[address].append(link)
        return replies

    def _take(self, address: Address) -> _Link:
        if self._pid != os.getpid():
            self._pid, self._idle = os.getpid(), defaultdict(deque)
        idle = self._idle[address]
        while True:
            try:
                link = idle.pop()
            except IndexError:
                break
            if link.alive():
                return link
            link.close()
        if self._place.service is None:
            return _Link(self._place, address)
        return _Link(self._place, self._find_master())

    def _find_master(self) -> Address:
        last: Exception | None = None
        for at, address in enumerate(self._place.nodes):
            try:
                link = _Link(self._place, address, sentinel=True)
                try:
                    command = pack(["SENTINEL", _MASTER, cast("str", self._place.service)])
                    found = _master(link.exchange(command, 1, self._limit)[0])
                finally:
                    link.close()
            except TransportError as error:
                last = error
                continue
            if found is not None:
                self._place.nodes.insert(0, self._place.nodes.pop(at))
                return found
        raise _no_master(self._place, last)

    def close(self) -> None:
        """Close the idle connections. The transport may be used again."""
        for idle in list(self._idle.values()):
            while idle:
                idle.pop().close()


# -- coroutines ------------------------------------------------------------------------------------------------------


class _AsyncLink:
    """One open connection of an event loop."""

    def __init__(self, label: str, connection: Any) -> None:
        self.label = label
        self._connection = connection
        self._reader = cast("asyncio.StreamReader", connection._reader)
        self._writer = cast("asyncio.StreamWriter", connection._writer)
        self._replies = _Replies()

    @classmethod
    async def open(cls, place: _Place, address: Address, *, sentinel: bool = False) -> _AsyncLink:
        connection = _connection(place, address, aio=True, sentinel=sentinel)
        try:
            await connection.connect()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # redis-py connects with asyncio.wait_for, which before Python 3.12 can swallow a cancel.
                raise asyncio.CancelledError
        except (RedisError, OSError) as error:
            raise _not_connected(error, place, address) from error
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return cls(place.at(address), connection)

    def alive(self) -> bool:
        return not (self._reader.at_eof() or self._writer.is_closing())

    async def exchange(self, data: bytes, count: int, limit: float) -> list[Any]:
        out: list[Any] = []
        try:
            async with asyncio.timeout(limit):
                self._writer.write(data)
                await self._writer.drain()
                while len(out) < count:
                    received = await self._reader.read(262144)
                    if not received:
                        raise _closed(self.label, sent=True)
                    self._replies.feed(received, out)
        except TimeoutError as error:
            raise _late(self.label, limit) from error
        except OSError as error:
            raise _closed(self.label, sent=True) from error
        except ValueError as error:
            raise _strange(self.label) from error
        return out

    async def close(self) -> None:
        writer = self._writer
        with suppress(RedisError, OSError):
            await self._connection.disconnect(nowait=True)
        try:
            async with asyncio.timeout(GOODBYE):
                await writer.wait_closed()
        except OSError:  # TimeoutError too: with TLS the other end has to say goodbye as well
            writer.transport.abort()


class _Slot(NamedTuple):
    call: Call[Any]
    data: bytes
    future: Future[Any]
    limit: float


class _Lane:
    """One connection and the task that owns it. Calls that are handed over in one loop turn leave in one write."""

    def __init__(self, transport: AsyncTcpTransport, address: Address, *, idle: float | None = None) -> None:
        self._transport = transport
        self._address = address
        self._idle = idle
        self._waiting: deque[_Slot] = deque()
        self._wake = asyncio.Event()
        self._link: _AsyncLink | None = None
        self._loop = asyncio.get_running_loop()
        self.open = True
        self.client_id: int | None = None
        """The server's name for this connection, where reads may wait on it."""
        self.task: Task[None] = self._loop.create_task(self._run(), name="outlast-tcp")

    def submit(self, call: Call[Any], limit: float, *, asking: bool = False) -> Future[Any]:
        data = pack(call.command(locking=self._transport._locking))
        if asking:
            data = _ASKING + data
        slot = _Slot(call, data, self._loop.create_future(), limit)
        self._waiting.append(slot)
        self._wake.set()
        return slot.future

    async def _run(self) -> None:
        try:
            while True:
                if not self._waiting:
                    self._wake.clear()
                    try:
                        async with asyncio.timeout(self._idle):
                            await self._wake.wait()
                    except TimeoutError:
                        return
                await self._send(self._batch())
        finally:
            self.open = False
            self._fail(self._waiting, _closed(self._transport._place.label, sent=False))
            if self._link is not None:
                await self._link.close()

    def _batch(self) -> list[_Slot]:
        batch: list[_Slot] = []
        size = 0
        while self._waiting and len(batch) < BATCH_CALLS and size < BATCH_BYTES:
            slot = self._waiting.popleft()
            if not slot.future.done():  # cancelled before it left
                batch.append(slot)
                size += len(slot.data)
        return batch

    async def _send(self, batch: list[_Slot]) -> None:
        if not batch:
            return
        try:
            if self._link is None or not self._link.alive():
                await self._drop()
                self._link = await self._transport._open(self._address)
                if self._idle is not None:
                    [id] = await self._link.exchange(_CLIENT_ID, 1, self._transport._limit)
                    self.client_id = id if isinstance(id, int) else None
            await self._exchange(self._link, batch, source=False)
        except (TransportError, ServerError, ConfigurationError) as error:
            await self._drop()
            self._fail(batch, error)
        except BaseException:
            self._fail(batch, _closed(self._transport._place.label, sent=True))
            raise

    async def _exchange(self, link: _AsyncLink, batch: list[_Slot], *, source: bool) -> None:
        locking = self._transport._locking
        data = [pack(slot.call.command(source=True, locking=locking)) if source else slot.data for slot in batch]
        # A slot that goes through an ASK has two replies; the first says only that it may.
        doubles = [chunk.startswith(_ASKING) for chunk in data]
        replies = await link.exchange(b"".join(data), len(batch) + sum(doubles), max(slot.limit for slot in batch))
        stream = iter(replies)
        again: list[_Slot] = []
        demoted = False
        for slot, double in zip(batch, doubles, strict=True):
            if double:
                next(stream)
            reply = next(stream)
            if not source and _unknown_script(slot.call, reply):
                again.append(slot)
                continue
            demoted = demoted or (isinstance(reply, Refusal) and reply.code == "READONLY")
            if not slot.future.done():  # the caller was cancelled; its reply had to be read all the same
                slot.future.set_result(reply)
        if again:
            await self._exchange(link, again, source=True)
        if demoted:
            await self._drop()  # no longer the master: the address may point to another server by now

    def _fail(self, slots: Sequence[_Slot] | deque[_Slot], error: Exception) -> None:
        for slot in slots:
            if slot.future.done():
                continue
            # An error of its own for each caller: they run on with different tracebacks.
            if isinstance(error, TransportError):
                own: Exception = type(error)(str(error), maybe_applied=error.maybe_applied)
                own.__cause__ = error.__cause__
            elif isinstance(error, ServerError):
                own = type(error)(str(error), code=error.code)
            else:
                own = ConfigurationError(str(error))
            slot.future.set_exception(own)

    async def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


class _Loop:
    """What the transport has open on one event loop."""

    def __init__(self) -> None:
        self.lanes: dict[Address, _Lane] = {}
        self.blocking: defaultdict[Address, list[_Lane]] = defaultdict(list)
        self.freeing: set[Task[None]] = set()


class AsyncTcpTransport(_Base):
    """Calls over TCP, for coroutines: one connection for all of them, and one more for each blocking read in flight.

    URLs and `timeout` as for `TcpTransport`. Each event loop has connections of its own, which close when the loop
    ends its tasks (asyncio.run does): one transport serves a program that calls asyncio.run again and again.
    """

    def __init__(self, url: str, *, timeout: float = TIMEOUT) -> None:
        super().__init__(url, timeout=timeout)
        self._loops: dict[AbstractEventLoop, _Loop] = {}
        self._lock = threading.Lock()

    def _here(self) -> _Loop:
        loop = asyncio.get_running_loop()
        here = self._loops.get(loop)
        if here is None:
            with self._lock:
                for old in [old for old in self._loops if old.is_closed()]:
                    del self._loops[old]
                here = self._loops[loop] = _Loop()
        return here

    async def send(self, call: Call[T], *, block: float | None = None) -> T:
        """See `outlast.transport.Transport.send`. Cancelling it is safe at any time; the call may still take effect."""
        return await self._drive(self._talk(call, block))

    async def _drive(self, talk: Generator[_Ask | float, Any, T]) -> T:
        try:
            step = next(talk)
            while True:
                if not isinstance(step, _Ask):
                    await asyncio.sleep(step)
                    step = next(talk)
                    continue
                try:
                    reply = await (self._alone(step) if step.block else self._shared(step))
                except TransportError as error:
                    step = talk.throw(error)
                else:
                    step = talk.send(reply)
        except StopIteration as stop:
            return cast("T", stop.value)

    def _shared(self, ask: _Ask) -> Future[Any]:
        lanes = self._here().lanes
        lane = lanes.get(ask.address)
        if lane is None or not lane.open:
            lane = lanes[ask.address] = _Lane(self, ask.address)
        return lane.submit(ask.call, ask.limit, asking=ask.asking)

    async def _alone(self, ask: _Ask) -> Any:
        """A read that may take long, on a connection that nobody else uses meanwhile."""
        idle = self._here().blocking[ask.address]
        lane: _Lane | None = None
        while idle and lane is None:
            lane = idle.pop()
            lane = lane if lane.open else None
        lane = lane or _Lane(self, ask.address, idle=IDLE)
        try:
            reply = await lane.submit(ask.call, ask.limit, asking=ask.asking)
        except asyncio.CancelledError:
            # Its reply is still to come. Only of a read it does not matter whether it brings something.
            freeing = self._here().freeing
            if ask.call.args[0] != "XREAD" or lane.client_id is None or len(freeing) > 1 or lane.task.cancelling():
                lane.task.cancel()
            else:
                task = asyncio.get_running_loop().create_task(self._free(lane, ask.address), name="outlast-tcp")
                freeing.add(task)
                task.add_done_callback(freeing.discard)
            raise
        except BaseException:
            idle.append(lane)
            raise
        idle.append(lane)
        return reply

    async def _free(self, lane: _Lane, address: Address) -> None:
        """Have the server answer a read that nobody waits for any more. Where it will not, the connection is cut."""
        unblock = Call(("CLIENT", "UNBLOCK", str(lane.client_id)), int)
        clear = lane.submit(_PING, self._limit)
        try:
            for pause in (0.01, 0.05, 0.25):  # the first may overtake the read
                if isinstance(await self._shared(_Ask(unblock, address, False, self._limit, False)), Refusal):
                    break
                await asyncio.wait((clear,), timeout=pause)
                if clear.done() and clear.exception() is None:
                    self._here().blocking[address].append(lane)
                    return
        except TransportError:
            pass
        finally:
            if not clear.done() or clear.exception() is not None:
                clear.cancel()
                lane.task.cancel()

    async def send_many(self, calls: Sequence[Call[Any]], *, outcomes: bool = False) -> list[Any]:
        """See `outlast.transport.AsyncTransport.send_many`."""
        key = next((key for call in calls if (key := _key_of(call)) is not None), None)
        # All of them are handed over before the connection's task runs: one write.
        talks = [self._drive(self._talk(call, None, key)) for call in calls]
        answers = await asyncio.gather(*talks, return_exceptions=True)
        for answer in answers:
            refused = isinstance(answer, OutlastError) and not isinstance(answer, TransportError)
            if isinstance(answer, BaseException) and not (outcomes and refused):
                raise answer
        return answers

    async def _open(self, address: Address) -> _AsyncLink:
        place = self._place
        if place.service is None:
            return await _AsyncLink.open(place, address)
        last: Exception | None = None
        for at, sentinel in enumerate(place.nodes):
            try:
                link = await _AsyncLink.open(place, sentinel, sentinel=True)
                try:
                    found = _master(
                        (await link.exchange(pack(["SENTINEL", _MASTER, place.service]), 1, self._limit))[0]
                    )
                finally:
                    await link.close()
            except TransportError as error:
                last = error
                continue
            if found is not None:
                place.nodes.insert(0, place.nodes.pop(at))
                return await _AsyncLink.open(place, found)
        raise _no_master(place, last)

    async def aclose(self) -> None:
        """Close what is open on this event loop; calls in flight fail. The transport may be used again."""
        here = self._loops.pop(asyncio.get_running_loop(), None)
        if here is not None:
            for task in here.freeing:
                task.cancel()
            if here.freeing:
                await asyncio.wait(here.freeing)
            lanes = [*here.lanes.values(), *(lane for lanes in here.blocking.values() for lane in lanes)]
            await asyncio.gather(*(lane.close() for lane in lanes))
