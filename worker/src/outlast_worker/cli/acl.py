"""``outlast acl``: least-privilege logins for a Redis or Valkey server. It connects to nothing.

A script runs with the rights of who calls it. So what a role needs is read off the scripts that it runs: the commands
in them and in what they use of the prelude, the keys of their headers, and those that they follow by name. Only what
is sent outside of scripts stands here. A script that is refused midway would leave half a transition, so a role can
run a script as a whole, or is refused before it writes: a test compares each role with each script.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, NamedTuple

from typer import Argument, Option

from outlast._checks import check_queue_name
from outlast._config import find_namespace
from outlast.protocol import calls, holding
from outlast.protocol.keys import KEY_TABLE
from outlast.protocol.scripts import SCRIPTS, _read, load

from . import show
from .app import AsJson, command, usage

__all__ = ["ROLES", "needs", "rules"]

_CALLED = re.compile(r"redis\.call\('(\w+)'")
_FUNCTION = re.compile(r"^local function (\w+)\(.*?^end$", re.DOTALL | re.MULTILINE)
_STEMS = {name.partition("<")[0] for name, *_ in KEY_TABLE}
"""`ready`, `job:`, …: what follows ``{queue}:`` in a key."""
_LANES = {"lane": ("ready", "scheduled")}
"""The one name of a header that stands for either of two keys."""

_CONNECTION = frozenset({"ping", "select", "asking", "client|id", "client|unblock"})
"""What the transport sends. CLIENT SETINFO is refused without harm; older servers do not know it."""
_READ = frozenset({"time", "hmget", "hgetall", "xread", "xrevrange", "zcard", "zcount"}) | {
    *("zrange", "zrevrange", "zrangebyscore", "zrevrangebyscore"),
}
_WATCHED = frozenset(["job:", "events:", "ready", "scheduled", "leases", "dead", "usage:", "config"])


class Role(NamedTuple):
    """What a login is for; `runs` are its scripts, the rest is what it sends besides."""

    purpose: str
    runs: tuple[str, ...]
    commands: frozenset[str]
    keys: frozenset[str]


ROLES = {
    "producer": Role(
        "enqueues, cancels, retries the dead, watches and reads; also the HTTP routes of outlast-edge",
        ("enqueue", "cancel", "retry_dead"),
        _READ | {"get", "set"},  # GET and SET: what the facades of outlast-edge remember of a chat or a repeated POST
        _WATCHED | {"chat:", "posted:"},
    ),
    "watcher": Role("watches and reads, and changes nothing", (), _READ, _WATCHED),
    "worker": Role(
        "takes jobs and ends them, delivers webhooks; its handlers may enqueue and cancel",
        (
            *("reserve", "flush", "renew", "settle", "retry", "release", "step", "admit", "prune_dead"),
            *("enqueue", "cancel", "retry_dead"),
        ),
        _READ
        | frozenset(["blpop", "lpush", "ltrim", "rpush", "pexpire", "hsetnx", "hset", "hdel", "del", "exists", "set"]),
        _WATCHED | {"ctl:", "workers", "room", "steps:", "hooks:", "schedules"},
    ),
    "operator": Role(
        "what the command does: cancels, retries, purges, sets rules, lists queues and workers, examines",
        ("enqueue", "cancel", "retry_dead", "purge_dead", "prune_dead"),
        _READ
        | frozenset(["hset", "hdel", "hlen", "zadd", "lpush", "ltrim", "exists", "scan", "info", "cluster|slots"]),
        _WATCHED | {"room", "workers", "hooks:", "schedules", "doctor:"},
    ),
}


def _prelude() -> tuple[str, dict[str, str]]:
    text = _read("_prelude")
    return text, {match[1]: match[0] for match in _FUNCTION.finditer(text)}


def needs(name: str) -> tuple[set[str], set[str]]:
    """Commands and keys of one script."""
    prelude, functions = _prelude()
    body = load(name)[len(prelude) :]
    used: dict[str, str] = {}
    open_ = [body]
    while open_:
        code = open_.pop()
        for function, source in functions.items():
            if function not in used and re.search(rf"\b{function}\(", code):
                used[function] = source
                open_.append(source)
    code = "\n".join([body, *used.values()])
    commands = {found.lower() for found in _CALLED.findall(code)}
    # A delivery is a job of the queue's own delivery queue.
    keys = {f"hooks:{key}" for key in re.findall(r"hooks \.\. '(\w+:?)'", code)}
    if "announce" in used:
        keys.add("hooks:signal")
    code = re.sub(r"hooks \.\. '\w+:?'", "", code)
    keys |= {stem for stem in _STEMS if stem.endswith(":") and stem != "hooks:" and f"'{stem}'" in code}
    for named in SCRIPTS[name].keys:
        plain = named.rstrip("?.")
        keys |= {key for key in _LANES.get(plain, (plain, plain + ":")) if key in _STEMS}
    return commands, keys


def rules(role: str, tags: list[str]) -> list[str]:
    """What follows the password in ACL SETUSER. `tags` are patterns of queue names, namespace included."""
    wanted = ROLES[role]
    commands, keys = set(wanted.commands | _CONNECTION), set(wanted.keys)
    for name in wanted.runs:
        more = needs(name)
        commands |= more[0] | {"eval", "evalsha"}
        keys |= more[1]
    keys = {key for key in keys if not (key.startswith("hooks:") and key != "hooks:" and "hooks:" in keys)}
    patterns = [f"~{{{tag}}}:{key}{'*' if key.endswith(':') else ''}" for tag in tags for key in sorted(keys)]
    return ["resetchannels", *patterns, "-@all", *(f"+{name}" for name in sorted(commands))]


_GLOB = re.compile(r"([\\*?\[\]^])")


def _tags(queues: list[str], namespace: str) -> list[str]:
    prefix = _GLOB.sub(r"\\\1", namespace)
    names = [_GLOB.sub(r"\\\1", check_queue_name(queue, "--queue")) for queue in queues]
    tags = [prefix + name for name in names] or [prefix + "*"]
    if any(re.search(r"[\s\"']", tag) for tag in tags):
        raise usage("a queue or namespace with blanks or quotes cannot be written as an ACL rule; rename it")
    return tags


@command
def acl(
    roles: Annotated[
        list[str] | None, Argument(metavar="[ROLE]...", show_default=False, help=f"Of {', '.join(ROLES)}; default all.")
    ] = None,
    queue: Annotated[
        list[str] | None, Option(metavar="QUEUE", show_default=False, help="Only this queue; may be repeated.")
    ] = None,
    namespace: Annotated[
        str | None, Option(show_default=False, help="Only queues of this namespace; default OUTLAST_NAMESPACE.")
    ] = None,
    file: Annotated[bool, Option("--file", help="Print lines of an aclfile instead of commands.")] = False,
    as_json: AsJson = False,
) -> int:
    """Print ACL rules: for a producer, watcher, worker or operator.

    Each may do its part and nothing else.

    In place of each password stands PASSWORD_SHA256, which a server refuses: put the digest of a real one there
    (`printf %s "$PASSWORD" | sha256sum`). The rules need Redis 6.2 or newer, or Valkey.
    """
    assert all((calls, holding))  # importing them declares the scripts
    for role in roles or ():
        if role not in ROLES:
            raise usage(f"{role!r} is no role; give one of {', '.join(ROLES)}")
    tags = _tags(queue or [], find_namespace(namespace, os.environ))
    made: dict[str, Any] = {role: rules(role, tags) for role in roles or ROLES}
    if as_json:
        show.dump({role: {"user": f"outlast-{role}", "rules": made[role]} for role in made})
        return 0
    start = "user" if file else "ACL SETUSER"
    for role, parts in made.items():
        if not file:  # an aclfile has no comments
            show.note(f"# {role}: {ROLES[role].purpose}")
        show.put(" ".join([start, f"outlast-{role}", "reset", "on", "#PASSWORD_SHA256", *parts]))
    if tags == ["*"]:
        show.note("# for all queues of the database; --namespace or --queue narrows that")
    return 0
