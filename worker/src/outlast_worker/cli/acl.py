"""``outlast acl``: what each part of a deployment has to be allowed on the database, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

from typer import Argument, Option

from outlast._checks import check_queue_name
from outlast.protocol import calls as calls  # so that every script is known
from outlast.protocol.scripts import SCRIPTS

from . import show
from .app import AsJson, command

__all__ = ["Role", "rules"]


class Role(StrEnum):
    PRODUCER = "producer"
    WATCHER = "watcher"
    WORKER = "worker"
    OPERATOR = "operator"


CONNECTION = ("PING", "SELECT", "CLIENT|SETINFO", "CLIENT|ID", "CLIENT|UNBLOCK", "CLUSTER|SLOTS", "TIME")
"""What every connection needs. CLIENT UNBLOCK ends only this client's own blocking read, to let a new watch join it."""
READS = (
    "HMGET",
    "HGETALL",
    "EXISTS",
    "XREAD",
    "XREVRANGE",
    "XRANGE",
    "ZCARD",
    "ZCOUNT",
    "ZRANGE",
    "ZRANGEBYSCORE",
    "HLEN",
)

_SCRIPTS = {
    Role.PRODUCER: ("enqueue", "cancel"),
    Role.WATCHER: (),
    Role.WORKER: ("reserve", "flush", "renew", "settle", "retry", "release", "step", "admit", "prune_dead"),
    Role.OPERATOR: ("enqueue", "cancel", "retry_dead", "prune_dead"),
}
_COMMANDS = {
    Role.PRODUCER: READS,
    Role.WATCHER: READS,
    Role.WORKER: (
        *("BLPOP", "LPUSH", "RPUSH", "LTRIM", "PEXPIRE", "DEL", "HSET", "HDEL"),
        *("HMGET", "HGETALL", "EXISTS", "SET", "ZCARD", "ZRANGEBYSCORE"),
    ),
    # Rules, pauses, purges, the list of workers, and what `outlast doctor` looks at.
    Role.OPERATOR: (
        *READS,
        *("HSET", "HDEL", "DEL", "SET", "GET", "ZADD", "ZREM", "LPUSH", "LTRIM", "SCAN", "INFO", "CONFIG|GET"),
    ),
}


_PRODUCED = (
    *("job:*", "events:*", "steps:*", "idem:*", "owner:*", "ctl:*", "hooks:*"),
    *("ready", "scheduled", "seq", "dead", "signal", "config"),
)
"""Keys that a producer's scripts name. The server asks for the right to write to each, so `config` is among them
although they only read it: a producer's login could set the queue's rules, with commands of its own."""
_PRODUCER_READS = ("leases", "usage:*", "workers")


def rules(role: Role, pattern: str) -> list[str]:
    """The words after ``ACL SETUSER name``. `pattern`: of the keys, as `key_pattern` makes it."""
    base = pattern.removesuffix("*")
    match role:
        case Role.WATCHER:
            keys = [f"%R~{pattern}"]
        case Role.PRODUCER:
            keys = [*(f"~{base}{key}" for key in _PRODUCED), *(f"%R~{base}{key}" for key in _PRODUCER_READS)]
        case _:
            keys = [f"~{pattern}"]
    scripts = _SCRIPTS[role]
    commands = {*CONNECTION, *_COMMANDS[role]}
    if scripts:
        # A script may do what its caller may, so its caller has to be allowed each command in it.
        commands |= {"EVALSHA", "EVAL", *called(SCRIPTS[name].source for name in scripts)}
    return ["reset", "on", ">A-LONG-RANDOM-PASSWORD", *keys, *sorted(f"+{name.lower()}" for name in commands)]


def called(sources: Iterable[str]) -> set[str]:
    """The commands that scripts send."""
    return {name for source in sources for name in re.findall(r"redis\.call\('([A-Z]+)'", source)}


def key_pattern(namespace: str | None, queue: str | None) -> str:
    """Of one queue with its delivery queue, of all in a namespace, or of all queues."""
    name = "*" if queue is None else escaped(queue)
    return f"{{{'' if namespace is None else escaped(namespace)}{name}}}:*"


def escaped(text: str) -> str:
    return re.sub(r"([*?\[\]\\^])", r"\\\1", text)


def acl(
    role: Annotated[Role | None, Argument(show_default=False, help="One of them; without it all four.")] = None,
    queue: Annotated[str | None, Option(show_default=False, help="Only this queue; default all.")] = None,
    namespace: Annotated[
        str | None,
        Option(show_default=False, help="Only queues of this OUTLAST_NAMESPACE.", envvar="OUTLAST_NAMESPACE"),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Print ACL rules of least privilege: one line for each user, as redis-cli takes it.

    A producer enqueues, cancels and reads; a watcher only reads; a worker runs jobs; an
    operator sets rules, purges and runs doctor. Put your own passwords in. %R~ needs Redis 7 or any Valkey.
    """
    if queue is not None:
        check_queue_name(queue)
    pattern = key_pattern(namespace, queue)
    users = {each.value: rules(each, pattern) for each in ([role] if role else list(Role))}
    if as_json:
        show.dump(users)
    else:
        for name, words in users.items():
            show.put(f"ACL SETUSER outlast-{name} {' '.join(words)}")
    return 0


command(acl)
