"""Where the database is: from arguments or from the environment, looked up at the first call and not before.

A build step, a test collection or an import on a machine without secrets must not fail, so nothing here runs while a
client is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple, cast

from ._checks import check_queue_name
from .errors import ConfigurationError

__all__ = ["Address", "find_address", "find_namespace", "tcp_transport"]

REST_PAIRS = (
    ("OUTLAST_REST_URL", "OUTLAST_REST_TOKEN"),
    ("UPSTASH_REDIS_REST_URL", "UPSTASH_REDIS_REST_TOKEN"),
    ("KV_REST_API_URL", "KV_REST_API_TOKEN"),
)
TCP_NAMES = ("OUTLAST_REDIS_URL", "REDIS_URL")
TCP_SCHEMES = ("redis://", "rediss://", "redis+", "rediss+", "unix://")


class Address(NamedTuple):
    """A database. With a `token` it is spoken to over HTTP, without one over TCP."""

    url: str
    token: str | None


def lookup(env: Any, name: str) -> str | None:
    """One setting of a mapping such as os.environ, or of an object with attributes such as Cloudflare's env."""
    value: Any = cast("Mapping[str, Any]", env).get(name) if isinstance(env, Mapping) else getattr(env, name, None)
    text = value.strip() if isinstance(value, str) else ""
    return text or None


def find_address(url: str | None, token: str | None, redis_url: str | None, env: Any) -> Address:
    """The first that is there: arguments, OUTLAST_REST_*, UPSTASH_REDIS_REST_*, KV_REST_API_*, then a Redis URL.

    Raises ConfigurationError that names what is missing. A half-set pair is an error rather than a reason to look
    further: the next pair may be another database.
    """
    if url is not None and redis_url is not None:
        raise ConfigurationError("url and redis_url are two databases; give one of them")
    url = redis_url if url is None else url
    if url is not None:
        if url.startswith(TCP_SCHEMES):
            if token is not None:
                raise ConfigurationError("token is for HTTP; a Redis URL has its password in it: leave token out")
            return Address(url, None)
        if redis_url is not None:
            raise ConfigurationError("redis_url starts with none of redis://, rediss:// and unix://; use url for HTTP")
        if not token:
            # Never the environment's token: it may belong to another database.
            raise ConfigurationError("url was given without token; give both, or neither to read the environment")
        return Address(url, token)
    if token is not None:
        raise ConfigurationError("token was given without url; give both, or neither to read the environment")
    for url_name, token_name in REST_PAIRS:
        found, secret = lookup(env, url_name), lookup(env, token_name)
        if found and secret:
            return Address(found, secret)
        if found or secret:
            missing, there = (token_name, url_name) if found else (url_name, token_name)
            raise ConfigurationError(f"{there} is set, but {missing} is not; set both")
    for name in TCP_NAMES:
        found = lookup(env, name)
        if found:
            if not found.startswith(TCP_SCHEMES):
                raise ConfigurationError(f"{name} starts with none of redis://, rediss:// and unix://")
            return Address(found, None)
    raise ConfigurationError(
        "no database: set OUTLAST_REST_URL and OUTLAST_REST_TOKEN (or UPSTASH_REDIS_REST_URL and _TOKEN, or "
        "KV_REST_API_URL and _TOKEN), or REDIS_URL with outlast-worker installed, or give url and token"
    )


def find_namespace(namespace: str | None, env: Any) -> str:
    """What stands in front of each queue's name: the argument, else OUTLAST_NAMESPACE, else nothing."""
    found = lookup(env, "OUTLAST_NAMESPACE") if namespace is None else namespace
    return check_queue_name(found, "namespace") + "." if found else ""


def tcp_transport(name: str, url: str) -> Any:
    """The transport called `name` of outlast-worker, which alone depends on a Redis client."""
    try:
        module = import_module("outlast_worker.tcp")
    except ImportError as error:
        raise ConfigurationError(
            "a Redis URL needs the package outlast-worker (pip install outlast-worker); "
            "over HTTP set OUTLAST_REST_URL and OUTLAST_REST_TOKEN instead"
        ) from error
    return getattr(module, name)(url)
