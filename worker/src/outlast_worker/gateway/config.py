"""What a gateway is told: which databases it fronts, which token opens which, and what it may do."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

from outlast import InvalidArgumentError
from outlast_worker.gateway.faults import Faults

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, kw_only=True)
class Database:
    """One database behind the gateway and the tokens that open it.

    `token` is Upstash's standard token: it may do all that the gateway allows. `readonly_token` may only read
    (no SCAN, no KEYS, no scripts). The URL is `redis://`, `rediss://` (TLS) or `unix://`, with user, password and
    `/number` as usual; `?ssl_ca_certs=FILE` names the authority of a private TLS server.
    """

    redis_url: str = field(repr=False)
    token: str = field(repr=False)
    readonly_token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.token:
            raise InvalidArgumentError("token is empty: nobody is served without one; give any long random string")
        if self.readonly_token == "":
            raise InvalidArgumentError("readonly_token is empty: leave it out, or give any long random string")
        if self.readonly_token == self.token:
            raise InvalidArgumentError("readonly_token equals token, so it could write: give each its own value")


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """How one gateway behaves. Every default is the careful one.

    `allow_admin`: pass on CONFIG, DEBUG, REPLICAOF and the like, which can take over a whole server.
    `faults`: test switches; with a `Faults` here, `/-/faults` arms them over HTTP.
    `count_billed`: answer each request with `outlast-billed` and the total at `/-/billed`.
    `max_request_bytes`: the limit of one command and of one command's result, as on Upstash (10 MB there).
    `allowed_hosts`: the Host headers that are answered, without port; "*" for any. A page in a browser can make
    its own name resolve to 127.0.0.1, and only this header tells its requests apart.
    `allow_remote`: permit a bind address other than loopback.
    `timeout`: seconds that the database may take for one request. `keepalive`: seconds between SSE comments.
    """

    databases: Sequence[Database]
    allow_admin: bool = False
    faults: Faults | None = None
    count_billed: bool = False
    access_log: bool = False
    max_request_bytes: int = 10 * 1024 * 1024
    allowed_hosts: Sequence[str] = LOOPBACK_NAMES
    allow_remote: bool = False
    connections: int = 4
    timeout: float = 60.0
    keepalive: float = 15.0

    def __post_init__(self) -> None:
        if not self.databases:
            raise InvalidArgumentError("databases is empty: name at least one Database(redis_url=…, token=…)")
        tokens = [t for d in self.databases for t in (d.token, d.readonly_token) if t is not None]
        if len(set(tokens)) != len(tokens):
            raise InvalidArgumentError(
                "two databases share a token, but the token chooses the database: give each its own"
            )
        for name in ("max_request_bytes", "connections", "timeout", "keepalive"):
            if not getattr(self, name) > 0:
                raise InvalidArgumentError(f"{name}={getattr(self, name)!r} must be more than 0")

    @classmethod
    def load(cls, path: str | Path, **overrides: Any) -> GatewayConfig:
        """A configuration from a TOML file: the fields above, and a `[[databases]]` table for each database.

        A text value `env:NAME` is read from that environment variable, which keeps secrets out of the file.
        """
        with open(path, "rb") as file:
            data = _resolve(tomllib.load(file), str(path))
        tables = data.pop("databases", [])
        known = {f.name for f in dataclasses.fields(cls)} - {"faults"}
        if unknown := sorted(set(data) - known):
            raise InvalidArgumentError(f"{path}: unknown setting {unknown[0]!r}; known are {', '.join(sorted(known))}")
        try:
            databases = [Database(**table) for table in tables]
        except TypeError as error:
            raise InvalidArgumentError(f"{path}: a [[databases]] table is wrong: {error}") from None
        return cls(databases=databases, **{**data, **overrides})


def _resolve(table: Mapping[str, object], where: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, str) and value.startswith("env:"):
            name = value.removeprefix("env:")
            if name not in os.environ:
                raise InvalidArgumentError(f"{where}: {key} asks for the environment variable {name}, which is not set")
            out[key] = os.environ[name]
        elif isinstance(value, list):
            items = cast("list[object]", value)
            out[key] = [_resolve(cast("Mapping[str, object]", i), where) if isinstance(i, dict) else i for i in items]
        else:
            out[key] = value
    return out


def is_loopback(host: str) -> bool:
    """Whether a server bound to `host` can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
