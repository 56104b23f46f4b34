"""Where a database is and how to connect to it, and what it means when that fails. redis-py opens the connections."""

from __future__ import annotations

import re
import socket
import ssl
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import redis.asyncio.connection
import redis.connection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
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

from outlast.errors import AuthError, ConfigurationError, InvalidArgumentError, ServerError, TransportError
from outlast.transport import server_error

from .resp import pack

__all__ = [
    "Address",
    "Place",
    "SilentError",
    "TlsError",
    "closed",
    "connection",
    "is_metered",
    "late",
    "not_connected",
    "read_url",
    "strange",
]

CONNECT_TIMEOUT = 3.0
"""Seconds to connect and log in, TLS included."""

Address = tuple[str, int]


@dataclass
class Place:
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
    def unchecked(self) -> str:
        """The option that switches a check of TLS off, if there is one."""
        if self.options.get("ssl_cert_reqs") == "none":
            return "ssl_cert_reqs=none"
        return "" if self.options.get("ssl_check_hostname", True) else "ssl_check_hostname=false"

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
    "socket_keepalive_options",
)
"""What the URL may ask of redis-py but which is decided here, or means nothing here."""


def read_url(url: object) -> tuple[Place, float | None]:
    """The place, and the socket_timeout that the URL asks for. No message quotes the URL: it may hold a password."""
    if not isinstance(url, str):
        raise InvalidArgumentError(f"redis_url is {type(url).__name__}; give a str such as redis://localhost:6379/0")
    place: Place | None
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
        if parts.fragment or (base != "unix" and not re.fullmatch(r"/?[0-9]*/?", path)):
            raise ValueError  # redis-py would leave it out: a password cut short, and database 0
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
        place = Place(nodes, service, kind == "cluster", options, sentinel, base == "rediss")
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
    if "ssl_keyfile" in place.options and "ssl_certfile" not in place.options:
        raise ConfigurationError("redis_url has ssl_keyfile without ssl_certfile; give both")
    if timeout is not None and not timeout > 0:
        raise ConfigurationError(f"redis_url has socket_timeout={timeout!r}; give seconds above 0, or leave it out")
    return place, timeout


def is_metered(url: str) -> bool:
    """Whether the database bills each command, as far as its address tells. Raises ConfigurationError."""
    return read_url(url)[0].metered


def connection(place: Place, address: Address, *, aio: bool, sentinel: bool = False) -> Any:
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


_CUT_OFF = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""What TLS says of a handshake that the other end did not go through with: as when it restarts just then."""


def not_connected(error: BaseException, place: Place, address: Address) -> AuthError | ServerError | TransportError:
    """What a failed connect means."""
    label = place.at(address)
    link: BaseException | None = error
    while link is not None and place.tls:
        if isinstance(link, ssl.SSLError) and not isinstance(link, _CUT_OFF):
            why = getattr(link, "reason", None) or link  # one that Python raises itself has no reason
            return TlsError(f"cannot connect to {label}: TLS failed ({why})", maybe_applied=False)
        if isinstance(link, FileNotFoundError):
            return TlsError(
                f"cannot connect to {label}: a file that the URL's ssl_ options name is not there", maybe_applied=False
            )
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


def late(label: str, limit: float) -> TransportError:
    return SilentError(f"no answer from {label} within {limit:.3g} s")


def closed(label: str, *, sent: bool) -> TransportError:
    return TransportError(f"{label} closed the connection", maybe_applied=sent)


def strange(label: str) -> TransportError:
    return TransportError(f"{label} sent something that is not RESP2")
