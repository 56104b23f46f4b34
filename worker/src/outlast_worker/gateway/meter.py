"""Counts the commands that Upstash would bill, exactly, whoever else uses the server.

A script is billed as itself plus every `redis.call`. MONITOR shows those calls as lines of the client "lua", right
after the line of the EVALSHA that made them. Each counted batch is sent between two ECHO marks on its connection:
the first makes its client known, the second ends its account. So requests may run at the same time, over any number
of connections and beside TCP clients of the same server, and still each call goes to the request that caused it. (INFO
commandstats, the other source, is one sum for everybody.) The marks themselves are not counted. What a request did
is lost with its reply if the database goes away; an ACL user without +echo is billed for its commands, not for the
calls of its scripts.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterable

from outlast_worker.gateway.commands import FREE
from outlast_worker.gateway.resp import Reply, encode_command


class Bill:
    """What was counted since it was opened: `total`, and `commands` by name."""

    def __init__(self) -> None:
        self.commands: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.commands.total()

    def add(self, names: Iterable[str]) -> None:
        self.commands.update(names)

    def __repr__(self) -> str:
        return f"Bill(total={self.total}, commands={dict(self.commands.most_common())})"


def billed(names: Iterable[str]) -> list[str]:
    """Of the commands that ran, those that cost."""
    return [name for name in names if name not in FREE]


class MeterLost(Exception):
    """MONITOR ended: the calls of a request that did run were not counted."""


class Meter:
    """Reads one MONITOR stream."""

    def __init__(self) -> None:
        self.lost = False
        self._secret = secrets.token_hex(8)  # nobody else's ECHO is a mark
        self._next = 0
        self._due: dict[int, asyncio.Future[list[str]]] = {}
        self._accounts: dict[bytes, list[str]] = {}  # by client address, while a batch of it runs
        self._current: list[str] | None = None  # the account of whoever sent the last line that was not a script's

    def mark(self) -> tuple[bytes, bytes, asyncio.Future[list[str]]]:
        """What to send before and after a batch, and the future names of the calls its scripts make."""
        self._next += 1
        future: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._due[self._next] = future
        word = self._secret
        before = encode_command([b"ECHO", f"{word}:0".encode()])
        return before, encode_command([b"ECHO", f"{word}:{self._next}".encode()]), future

    def line(self, line: Reply) -> None:
        if not isinstance(line, bytes):
            return
        head, _, rest = line.partition(b'] "')
        client = head.rpartition(b" ")[2]
        name, _, rest = rest.partition(b'"')
        if client == b"lua":
            if self._current is not None:
                self._current.append(name.decode("utf-8", "replace").upper())
            return
        if name == b"ECHO" and rest.startswith(f' "{self._secret}:'.encode()):
            number = int(rest.rpartition(b":")[2][:-1])
            if not number:
                self._accounts[client] = []
            elif (future := self._due.pop(number, None)) is not None and not future.done():
                future.set_result(self._accounts.pop(client, []))
            self._current = None
            return
        self._current = self._accounts.get(client)

    def stop(self) -> None:
        self.lost = True
        for future in self._due.values():
            if not future.done():
                future.set_exception(MeterLost("MONITOR ended: the calls of this request were not counted"))
                future.exception()  # seen, whether or not somebody still waits for it
        self._due.clear()
