"""Which commands are passed on, which are refused, and how both are worded.

The texts are Upstash's: SDKs and their users' code match on them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outlast_worker.gateway.resp import OK, Error, Reply, Status, size_error

MAX_KEY_BYTES = 32 * 1024

WRONGPASS = (
    "WRONGPASS invalid or missing auth token."
    " See https://docs.upstash.com/redis/troubleshooting/http_unauthorized for details."
)


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# They change or take over the connection, which here is shared; MULTI, SUBSCRIBE and MONITOR have paths of their own.
CONNECTION_COMMANDS = names(
    "ASKING AUTH CLIENT DISCARD EXEC HELLO MONITOR MULTI PSUBSCRIBE PSYNC PUNSUBSCRIBE READONLY READWRITE REPLCONF"
    " RESET SSUBSCRIBE SUBSCRIBE SUNSUBSCRIBE SYNC UNSUBSCRIBE UNWATCH WATCH"
)
BLOCKING_COMMANDS = names("BLMOVE BLMPOP BLPOP BRPOP BRPOPLPUSH BZMPOP BZPOPMAX BZPOPMIN")
# Absent from Upstash. Those marked admin by the server itself are refused as well, so that a command which a newer
# server or a module brings is not let through because nobody here had heard of it.
ADMIN_COMMANDS = names(
    "ACL BGREWRITEAOF BGSAVE CLUSTER COMMANDLOG CONFIG DEBUG FAILOVER LASTSAVE LATENCY MIGRATE MODULE MOVE OBJECT"
    " PFDEBUG PFSELFTEST REPLICAOF RESTORE-ASKING ROLE SAVE SHUTDOWN SLAVEOF SLOWLOG SWAPDB"
)
# Reads that a read-only token may not do: they show the names of keys it was not told.
HIDDEN_READS = names("KEYS SCAN")
SCRIPT_COMMANDS = names("EVAL EVAL_RO EVALSHA EVALSHA_RO FCALL FCALL_RO SCRIPT FUNCTION")
HARMLESS = names("COMMAND ECHO INFO PING QUIT SELECT TIME")
FREE = names("AUTH HELLO SELECT COMMAND CONFIG INFO PING RESET QUIT MULTI EXEC")  # not billed


@dataclass(frozen=True, slots=True)
class Traits:
    """What the server's COMMAND says of one command or subcommand."""

    flags: frozenset[str]
    first_key: int
    last_key: int
    step: int

    def keys(self, args: Sequence[bytes]) -> list[bytes]:
        """The keys at fixed places; none for commands such as EVAL that say themselves where theirs are."""
        if not self.first_key:
            return []
        last = self.last_key if self.last_key >= 0 else len(args) + self.last_key
        return list(args[self.first_key : last + 1 : max(self.step, 1)])


UNKNOWN = Traits(frozenset(), 0, 0, 0)


def read_table(reply: Reply) -> dict[str, Traits]:
    """The reply to COMMAND, by upper-case name, subcommands as `XGROUP|CREATE`; empty if it was refused."""
    table: dict[str, Traits] = {}
    for entry in reply if isinstance(reply, list) else []:
        match entry:
            case [bytes() as name, _, list() as flags, int() as first, int() as last, int() as step, *more]:
                words = frozenset(flag.decode() for flag in flags if isinstance(flag, bytes))
                table[name.decode().upper()] = Traits(words, first, last, step)
                if len(more) > 3:
                    table |= read_table(more[3])
            case _:
                pass
    return table


class Commands:
    """The rules for one database, which depend on the commands that its server has."""

    def __init__(self, table: Mapping[str, Traits], *, allow_admin: bool, max_bytes: int) -> None:
        self._table = table
        self._allow_admin = allow_admin
        self._max_bytes = max_bytes

    def traits(self, name: str, args: Sequence[bytes]) -> Traits:
        if len(args) > 1:
            sub = self._table.get(f"{name}|{args[1].decode('utf-8', 'replace').upper()}")
            if sub is not None:
                return sub
        return self._table.get(name, UNKNOWN)

    def public_name(self, name: str) -> str:
        """The name for a log; what is no command may be anything, even a token in the wrong place."""
        return name if name in self._table else "?"

    def writes(self, name: str, traits: Traits) -> bool:
        """Whether the command moves the sync token. SCRIPT LOAD does not."""
        if name in SCRIPT_COMMANDS:
            return name in ("EVAL", "EVALSHA", "FCALL")
        return traits is UNKNOWN or "write" in traits.flags

    def answer(self, name: str, args: Sequence[bytes], traits: Traits, *, readonly: bool) -> Reply | None:
        """What the gateway answers itself, without asking the server; None if the command is to be sent."""
        if name in CONNECTION_COMMANDS or name in BLOCKING_COMMANDS or _holds_connection(name, args):
            return Error(f'ERR Command "{name}" is not allowed in REST or it has a special context path'.encode())
        admin = name in ADMIN_COMMANDS or "admin" in traits.flags
        if admin and not self._allow_admin and not _is_notification_setting(name, args):
            return not_available(name)
        if readonly:
            reads = "readonly" in traits.flags and name not in SCRIPT_COMMANDS and name not in HIDDEN_READS
            if not reads and name not in HARMLESS:
                return no_permission(name)
        if name == "SELECT" and len(args) == 2:
            # The number in the URL is the database of this token; another one is somebody else's.
            return OK if args[1] == b"0" else Error(b"ERR DB index is out of range")
        if name == "QUIT":
            return OK
        if name == "COMMAND" and len(args) == 1:
            return []
        size = sum(map(len, args))
        if size > self._max_bytes:
            return size_error(self._max_bytes, size)
        if size > MAX_KEY_BYTES:
            longest = max((len(key) for key in traits.keys(args)), default=0)
            if longest > MAX_KEY_BYTES:
                text = f"ERR max key size exceeded. Limit: {MAX_KEY_BYTES} bytes, Actual: {longest} bytes"
                return Error(text.encode())
        return None


def _holds_connection(name: str, args: Sequence[bytes]) -> bool:
    """SCRIPT DEBUG, and XREAD and XREADGROUP with BLOCK among their options (a stream may be *called* BLOCK)."""
    if name not in ("XREAD", "XREADGROUP"):
        return name == "SCRIPT" and len(args) > 1 and args[1].upper() == b"DEBUG"
    at = 1
    while at < len(args):
        match args[at].upper():
            case b"STREAMS":
                return False
            case b"BLOCK":
                return True
            case b"COUNT":
                at += 2
            case b"GROUP":
                at += 3
            case _:
                at += 1
    return False


def _is_notification_setting(name: str, args: Sequence[bytes]) -> bool:
    return (
        name == "CONFIG"
        and len(args) > 2
        and (args[1].upper(), len(args)) in ((b"GET", 3), (b"SET", 4))
        and args[2].lower() == b"notify-keyspace-events"
    )


def not_available(name: str) -> Error:
    text = f"ERR Command is not available: '{name}'."
    return Error(f"{text} See https://upstash.com/docs/redis/overall/rediscompatibility for details".encode())


def no_permission(name: str) -> Error:
    text = f"NOPERM this user has no permissions to run the '{name.lower()}' command or its subcommand"
    return Error(text.encode())


_IN_SCRIPT = re.compile(rb"(?s)(.*) script: (?:[0-9a-f]{40}, )?on @?user_script:(\d+)\.$")
_DENIED = re.compile(rb"NOPERM .*permissions to run the '([^']*)' command")


def reword(error: Error, name: str) -> Error:
    """The server's error as Upstash would have put it."""
    if failed := _IN_SCRIPT.match(error):
        # The code of the inner error is no longer the first word there, and a caller who relied on it must notice.
        text = b"ERR Error running script: @user_script:%b: %b\nstack traceback:\n\t[G]: in function 'call'"
        return Error(text % (failed[2], failed[1]))
    if error.startswith(b"NOSCRIPT"):
        return Error(b"NOSCRIPT No matching script. Please use EVAL.")
    if error.startswith(b"ERR unknown command"):
        return not_available(name)
    if error.startswith(b"ERR value is not an integer or out of range"):
        return Error(b"ERR value is not an int or out of range")
    if error.startswith(b"OOM "):
        return Error(b"ERR DB capacity quota exceeded")
    if denied := _DENIED.match(error):
        return no_permission(denied[1].decode("utf-8", "replace"))
    return error


def is_ok(reply: Reply) -> bool:
    """The status OK, which base64 mode leaves alone; not the value "OK"."""
    return isinstance(reply, Status) and reply == b"OK"
