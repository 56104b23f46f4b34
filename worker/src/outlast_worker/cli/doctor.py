"""``outlast doctor``: looks at a real database and says what is wrong with it, and how to mend it."""

from __future__ import annotations

import re
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from typer import Option

from outlast import AuthError, Client, OutlastError, ServerError
from outlast._checks import check_queue_name
from outlast.protocol import Call
from outlast.protocol.scripts import SCRIPTS
from outlast.protocol.wire import items, text
from outlast.transport import Transport

from . import show
from .app import NO, AsJson, Connect, command

__all__ = ["Finding", "examine"]

Mark = Literal["ok", "warn", "bad", "unknown"]
MARKS: dict[Mark, str] = {"ok": "ok  ", "warn": "warn", "bad": "BAD ", "unknown": "?   "}
PINGS = 20
SLOW = 0.1
"""Seconds of a round trip from which a stream of 20 flushes a second lags behind."""
OFFSET = 1.0


class Finding(NamedTuple):
    """One line of the report. `mend`: what to do about it."""

    mark: Mark
    what: str
    found: str
    mend: str = ""


class Patient:
    """A database under examination: `ask` sends one raw command. It writes one key, which lives 10 s at most."""

    def __init__(self, transport: Transport, address: str, queue: str) -> None:
        self._transport = transport
        self.address = urlsplit(address)
        self.rest = self.address.scheme in ("http", "https")
        self.key = f"{{{queue}}}:doctor:{secrets.token_hex(8)}"

    def ask(self, *words: str) -> Any:
        return self._transport.send(Call(words, lambda reply: reply, replayable=False))

    def script(self, source: str, *arguments: str) -> Any:
        return self.ask("EVAL", source, "1", self.key, *arguments)


def examine(client: Client, queue: str = "outlast-doctor") -> Iterator[Finding]:
    """The findings, in their order. Raises OutlastError only when the database cannot be reached at all."""
    patient = Patient(client._transport, client._find_address().url, client._prefix + queue)
    yield _latency(patient)
    yield _tls(patient)
    for look in (
        _server,
        _eviction,
        _persistence,
        _clock,
        _scripts,
        _in_scripts,
        _writing,
        *((_quirks,) if patient.rest else ()),
    ):
        try:
            yield from look(patient)
        except ServerError as error:
            name = look.__name__.removeprefix("_").replace("_", " ")
            yield Finding(
                "unknown",
                name,
                f"this login may not look: {_first(error)}",
                "run it as an operator: outlast acl operator",
            )
    with suppress(OutlastError):  # it ends by itself within 10 s
        patient.ask("DEL", patient.key)


def _first(error: OutlastError) -> str:
    return str(error).partition("\n")[0][:160]


def _latency(patient: Patient) -> Finding:
    times: list[float] = []
    for _ in range(PINGS):
        began = time.perf_counter()
        patient.ask("PING")
        times.append(time.perf_counter() - began)
    middle, worst = statistics.median(times), max(times)
    slow = middle > SLOW
    return Finding(
        "warn" if slow else "ok",
        "round trip",
        f"{middle * 1e3:.1f} ms, at most {worst * 1e3:.1f} ms in {PINGS}",
        "put workers into the database's region" if slow else "",
    )


def _tls(patient: Patient) -> Finding:
    from outlast_worker.place import read_url

    scheme, host = patient.address.scheme, patient.address.hostname or ""
    if scheme.startswith("rediss") and (option := read_url(patient.address.geturl())[0].unchecked):
        mend = "name your authority instead: ?ssl_ca_certs=FILE"
        return Finding("warn", "TLS", f"on, but {option}: whoever is in between can pass for the database", mend)
    if scheme.startswith(("https", "rediss")):
        return Finding("ok", "TLS", "on, and the certificate was verified")
    if scheme == "unix" or host in ("localhost", "::1") or host.startswith("127."):
        return Finding("ok", "TLS", "off, on this machine only")
    return Finding("bad", "TLS", "off: prompts, answers and the password travel readably", "use rediss:// or https://")


def _info(patient: Patient, section: str) -> dict[str, str]:
    lines = text(patient.ask("INFO", section)).splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def _server(patient: Patient) -> Iterator[Finding]:
    info = _info(patient, "server")
    name, version = next(
        ((name, info[f"{name}_version"]) for name in ("valkey", "upstash", "redis") if f"{name}_version" in info),
        ("", ""),
    )
    if not version:
        yield Finding("unknown", "version", "the server does not tell it")
        return
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    old = name == "redis" and numbers < [6, 2]
    mend = "XRANGE with exclusive ids and XTRIM MINID need Redis 6.2 or any Valkey" if old else ""
    yield Finding("bad" if old else "ok", "version", f"{name} {version}", mend)


def _eviction(patient: Patient) -> Iterator[Finding]:
    info = _info(patient, "memory")
    policy = info.get("maxmemory_policy")
    limit = int(info.get("maxmemory", "0"))
    if policy is None:
        yield Finding(
            "unknown", "eviction", "the server does not tell its policy", "choose a database without eviction"
        )
    elif policy == "noeviction" or limit == 0:
        yield Finding("ok", "eviction", policy if limit else f"{policy}, and no limit to reach")
    else:
        yield Finding(
            "bad", "eviction", f"{policy}: a full server drops jobs", "CONFIG SET maxmemory-policy noeviction"
        )
    if limit:
        used = int(info.get("used_memory", "0")) / limit
        full = used > 0.8
        mend = "raise maxmemory, or shorten result_ttl; a full database refuses new jobs" if full else ""
        yield Finding("warn" if full else "ok", "memory", f"{used:.0%} of {limit / 2**20:,.0f} MiB in use", mend)


def _persistence(patient: Patient) -> Iterator[Finding]:
    info = _info(patient, "persistence")
    if info.get("aof_enabled") == "1":
        yield Finding(
            "ok", "persistence", "append-only file: a crash loses at most a second, or nothing with appendfsync always"
        )
    elif "aof_enabled" not in info:
        yield Finding("unknown", "persistence", "the server does not tell")
    else:
        yield Finding(
            "warn",
            "persistence",
            "no append-only file: a restart loses what came after the last snapshot, or everything",
            "CONFIG SET appendonly yes, and in the configuration file",
        )


def _clock(patient: Patient) -> Iterator[Finding]:
    began = time.time()
    seconds, micros = (int(text(part)) for part in items(patient.ask("TIME")))
    ended = time.time()
    offset = seconds + micros / 1e6 - (began + ended) / 2
    off = abs(offset) - (ended - began) / 2 > OFFSET
    yield Finding(
        "warn" if off else "ok",
        "clock",
        f"{offset:+.3f} s against this machine's",
        "outlast goes by the server's clock; log lines of this machine will not fit" if off else "",
    )


def _scripts(patient: Patient) -> Iterator[Finding]:
    source = SCRIPTS["enqueue"].source
    try:
        patient.script("return redis.sha1hex('')")
    except ServerError as error:
        yield Finding("bad", "scripts", f"refused: {_first(error)}", "allow EVAL and EVALSHA: outlast acl")
        return
    # The largest kind of thing that is asked of it: a real script's text, run for no job at all.
    try:
        patient.ask("EVAL", "if true then return 'ok' end\n" + source, "1", patient.key)
    except ServerError as error:
        yield Finding("bad", "scripts", f"a script of outlast does not run: {_first(error)}", "report it, please")
        return
    yield Finding("ok", "scripts", "EVAL and EVALSHA run")


def _in_scripts(patient: Patient) -> Iterator[Finding]:
    def can(what: str, source: str, need: str, *arguments: str) -> Finding:
        try:
            patient.script(source, *arguments)
        except ServerError as error:
            return Finding("bad" if need else "warn", what, f"refused: {_first(error)}", need)
        return Finding("ok", what, "works")

    yield can("TIME in scripts", "return redis.call('TIME')", "outlast goes by the server's clock; allow TIME")
    other = patient.key + ":undeclared"
    yield can(
        "undeclared keys in scripts",
        "return redis.call('GET', ARGV[1])",
        "cancel and reserve reach keys of the same hash tag that they find out",
        other,
    )
    yield can("PUBLISH in scripts", "return redis.call('PUBLISH', KEYS[1], '')", "")


WRITING = {
    "READONLY": "this is a replica: give the primary's address, or redis+sentinel://, which finds it",
    "OOM": "raise maxmemory, or shorten result_ttl; running jobs still end",
    "NOREPLICAS": "bring the replicas back, or lower min-replicas-to-write",
    "MISCONF": "the server cannot save to its disk: make room there",
}


def _writing(patient: Patient) -> Iterator[Finding]:
    try:
        patient.ask("SET", patient.key, "x", "PX", "10000")
    except ServerError as error:
        if isinstance(error, AuthError):
            raise
        yield Finding("bad", "writing", f"refused: {_first(error)}", WRITING.get(error.code, "no job can be made"))
    else:
        yield Finding("ok", "writing", "works")


def _quirks(patient: Patient) -> Iterator[Finding]:
    """What Upstash's documents leave open: told, not judged."""

    def tried(what: str, read: Callable[[Any], str], *words: str) -> Finding:
        try:
            return Finding("ok", what, read(patient.ask(*words)))
        except OutlastError as error:
            return Finding("ok", what, f"refused: {_first(error)}")

    def shown(reply: Any) -> str:
        return f"answers {text(reply) if isinstance(reply, (bytes, str, int)) else type(reply).__name__}"

    patient.ask("SET", patient.key, "9007199254740993", "PX", "10000")
    yield tried("REST: XREAD with BLOCK", shown, "XREAD", "BLOCK", "10", "STREAMS", patient.key + ":none", "0")
    yield tried("REST: integers above 2^53", shown, "INCRBY", patient.key, "0")
    yield tried("REST: EVAL_RO", shown, "EVAL_RO", "return redis.call('GET', KEYS[1])", "1", patient.key)
    flag = "#!lua flags=allow-key-locking\nreturn redis.call('GET', KEYS[1])"
    yield tried("REST: key locking", shown, "EVAL", flag, "1", patient.key)
    yield tried(
        "REST: cjson under key locking",
        shown,
        "EVAL",
        flag.replace("redis.call('GET', KEYS[1])", "cjson.encode({1})"),
        "1",
        patient.key,
    )


def doctor(
    *,
    connect: Connect,
    queue: Annotated[
        str, Option(show_default=False, help="Whose keys to try, for a login that may use no others.")
    ] = "outlast-doctor",
    as_json: AsJson = False,
) -> int:
    """Examine the database: is it reachable, safe and fast enough?

    And able to do what outlast asks of it.

    Writes one key of its own, which lives 10 seconds. Exit code 1 if something is BAD, 3 if the database cannot be
    reached.
    """
    from outlast_worker.costs import COMMANDS

    with connect() as client:
        found = list(examine(client, check_queue_name(queue)))
    bad = any(finding.mark == "bad" for finding in found)
    if as_json:
        show.dump({"well": not bad, "findings": [finding._asdict() for finding in found], "billed": COMMANDS})
        return NO if bad else 0
    width = max(len(finding.what) for finding in found)
    for mark, what, said, mend in found:
        show.put(f"{MARKS[mark]}  {what.ljust(width)}  {said}")
        if mend:
            show.put(f"      {' ' * width}  -> {mend}")
    show.put("\nbilled commands, where commands are billed:")
    show.table(("operation", "commands"), [(name, count) for name, count in COMMANDS.items()])
    return NO if bad else 0


command(doctor)
