"""Which database a command talks to, and what is found in it without knowing names."""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from outlast import Client, ConfigurationError, ServerError
from outlast.protocol import Call, Keys, calls, holding
from outlast.protocol.wire import items, text
from outlast.transport import Transport

__all__ = ["connect", "live_workers", "queue_names", "redis_url_or_environment"]

HINT = (
    "give --redis-url, or --rest-url with --rest-token, or set OUTLAST_REDIS_URL (`outlast dev` starts a database here)"
)


FORGET = 3_600_000
"""ms after which the entry of a worker that died is removed by whoever comes across it."""


def live_workers(client: Client, queue: str) -> dict[str, dict[str, Any]]:
    """Worker id to what it last said of itself, with `seen`, the seconds since then."""
    keys = Keys(client._prefix + queue)
    said, now = client._transport.send_many([calls.workers(keys), calls.CLOCK])
    heard = calls.heard(said, now)
    if gone := [id for id, told in heard.items() if told["seen"] > FORGET]:
        with suppress(ServerError):  # a read-only login sees them and lets them be
            client._transport.send_many([holding.seen(keys, id, None) for id in gone])
    return {id: {**told, "seen": told["seen"] / 1000} for id, told in heard.items() if told["seen"] <= calls.LIVE}


def redis_url_or_environment(redis_url: str | None) -> str | None:
    return redis_url or os.environ.get("OUTLAST_REDIS_URL") or os.environ.get("REDIS_URL") or None


def connect(redis_url: str | None, rest_url: str | None, rest_token: str | None) -> Client:
    """A client of the database that the options name, else of the environment's: over TCP rather than HTTP."""
    if redis_url is not None and (rest_url is not None or rest_token is not None):
        raise ConfigurationError("--redis-url and --rest-url are two databases; give one of them")
    if (rest_url is None) != (rest_token is None):
        raise ConfigurationError("--rest-url and --rest-token belong together; give both, or neither")
    if rest_url is not None:
        return Client(rest_url, rest_token)
    redis_url = redis_url_or_environment(redis_url)
    if redis_url is not None:
        return Client(redis_url=redis_url)
    try:
        client = Client()
        client._find_address()
    except ConfigurationError as error:
        if str(error).startswith("no database"):
            raise ConfigurationError(f"no database: {HINT}") from None
        raise
    return client


_MARK = re.compile(r"\{([^{}]+)\}:(seq|scheduled|workers)")
"""Keys that a queue has as soon as anything has happened to it."""


def queue_names(client: Client) -> list[str]:
    """The queues of the database, those of the client's namespace without it. Walks all keys by SCAN, 1,000 a call."""
    found: set[str] = set()
    with _nodes(client) as nodes:
        for node in nodes:
            cursor = "0"
            while True:
                cursor, keys = node.send(Call(("SCAN", cursor, "MATCH", "{*}:[sw]*", "COUNT", "1000"), _scan_page))
                found.update(match[1] for key in keys if (match := _MARK.fullmatch(key)))
                if cursor == "0":
                    break
    prefix = client._prefix
    names = sorted(name.removeprefix(prefix) for name in found if name.startswith(prefix))
    hooks = [f"{{{name}}}:hooks" for name in names]
    pages = [hooks[at : at + 100] for at in range(0, len(hooks), 100)]
    used = [
        flag
        for page in pages
        for flag in client._transport.send_many([Call(("EXISTS", Keys(prefix + name).seq), int) for name in page])
    ]
    return sorted(names + [name for name, flag in zip(hooks, used, strict=True) if flag])


def _scan_page(reply: Any) -> tuple[str, list[str]]:
    cursor, keys = items(reply)
    return text(cursor), [text(key) for key in items(keys)]


@contextmanager
def _nodes(client: Client) -> Generator[list[Transport]]:
    """SCAN sees one node: all masters of a cluster, else the one server."""
    address = client._find_address()
    if address.token is not None:
        yield [client._transport]
        return
    try:
        masters = client._transport.send(Call(("CLUSTER", "SLOTS"), _masters))
    except ServerError:  # not a cluster
        yield [client._transport]
        return
    from outlast_worker.tcp import TcpTransport

    scheme, netloc, path, query, _ = urlsplit(address.url)
    user, at, _ = netloc.rpartition("@")
    nodes = [
        TcpTransport(urlunsplit((scheme.partition("+")[0], f"{user}{at}{master}", path, query, "")))
        for master in masters
    ]
    try:
        yield [*nodes]
    finally:
        for node in nodes:
            node.close()


def _masters(reply: Any) -> list[str]:
    """[first slot, last slot, [host, port, …], replicas …] for each range of slots."""
    masters = [items(items(entry)[2]) for entry in items(reply)]
    hosts = {(text(master[0]), text(master[1])) for master in masters}
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in sorted(hosts)]
