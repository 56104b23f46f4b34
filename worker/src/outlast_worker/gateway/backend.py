"""One database as the gateway sees it: connections, rules, scripts, the sync token, the tokens of ACL users."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from contextlib import suppress

from outlast_worker.gateway.commands import Commands, read_table
from outlast_worker.gateway.config import Database, GatewayConfig
from outlast_worker.gateway.faults import Rule
from outlast_worker.gateway.replica import Replica
from outlast_worker.gateway.resp import Error, Reply, encode_command
from outlast_worker.gateway.scripts import Scripts
from outlast_worker.gateway.upstream import Address, Refused, Upstream, UpstreamError


class Backend:
    def __init__(self, database: Database, config: GatewayConfig) -> None:
        self.address = Address.parse(database.redis_url)
        self.scripts = Scripts()
        # The sync token: rises with each write. It starts at the time, so that a restarted gateway does not fall back
        # behind tokens that clients still hold.
        self.version = time.time_ns() // 1_000_000
        self._config = config
        self._key = database.token.encode()
        self._commands: Commands | None = None
        self._users: dict[tuple[str, str], Upstream] = {}
        self._replica: Replica | None = None
        self._replica_lock = asyncio.Lock()
        self.upstream = self.connect(self.address)

    def connect(self, address: Address, main: Upstream | None = None) -> Upstream:
        size, limit, timeout = self._config.connections, self._config.max_request_bytes, self._config.timeout
        return Upstream(address, size=size, limit=limit, timeout=timeout, main=main)

    async def commands(self) -> Commands:
        """The rules, from the server's own list of commands."""
        if self._commands is not None:
            return self._commands
        reply = (await self.upstream.execute(encode_command([b"COMMAND"]), 1)).replies[0]
        config = self._config
        rules = Commands(read_table(reply), allow_admin=config.allow_admin, max_bytes=config.max_request_bytes)
        if not isinstance(reply, Error):  # while it loads its data, a server refuses even this: ask again
            self._commands = rules
        return rules

    async def replica(self, rule: Rule | None) -> Replica | None:
        """The copy for `rule`, made at its first request; without a rule, or with a newer one, the old copy goes."""
        async with self._replica_lock:
            copy = self._replica
            if copy is not None and copy.rule is not rule:
                self._replica = None
                await copy.drop()
            if rule is not None and self._replica is None:
                self._replica = await Replica.freeze(self.upstream, self.version, rule, self.connect)
            return self._replica

    def user(self, name: str, password: str) -> Upstream:
        """The connections of an ACL user."""
        if (name, password) not in self._users:
            address = dataclasses.replace(self.address, username=name, password=password)
            self._users[name, password] = self.connect(address, self.upstream)
        return self._users[name, password]

    def open_token(self, token: bytes) -> Upstream | None:
        """The connections of the user whose token `rest_token` made; None for any other token."""
        with suppress(ValueError):
            raw = urlsafe_b64decode(token.removeprefix(b"AU")) if token.startswith(b"AU") else b""
            if hmac.compare_digest(raw[:32], hmac.digest(self._key, raw[32:], "sha256")):
                name, _, password = raw[32:].decode().partition("\0")
                return self.user(name, password)
        return None

    async def rest_token(self, args: Sequence[bytes]) -> Reply:
        """ACL RESTTOKEN user password: a token that holds both, sealed with the database's own token.

        So it stays good over restarts and nothing is stored; whoever reads one could also log in with it.
        """
        if len(args) != 4:
            return Error(b"ERR wrong number of arguments for 'acl|resttoken' command")
        name, password = args[2].decode("utf-8", "replace"), args[3].decode("utf-8", "replace")
        try:
            trial = self.connect(dataclasses.replace(self.address, username=name, password=password))
            (await trial.open()).close()
        except Refused:
            return Error(f'ERR Wrong password or user "{name}" does not exist'.encode())
        content = f"{name}\0{password}".encode()
        return b"AU" + urlsafe_b64encode(hmac.digest(self._key, content, "sha256") + content)

    def begin_shutdown(self) -> None:
        for upstream in (self.upstream, *self._users.values()):
            upstream.close_subscriptions()

    async def aclose(self) -> None:
        with suppress(UpstreamError):
            await self.replica(None)
        for upstream in (self.upstream, *self._users.values()):
            await upstream.aclose()


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """What a token opens."""

    backend: Backend
    upstream: Upstream
    readonly: bool = False
