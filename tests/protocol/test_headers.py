"""The header of each script is a contract: it says what the body reads and what `calls` sends, or this fails."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

import outlast.protocol
from outlast import IdempotencyConflictError, InvalidArgumentError, JobInUseError, ReplyShapeError
from outlast.protocol import Call, Keys, calls, holding, scripts
from outlast.protocol.digests import DIGESTS
from outlast.protocol.keys import BATCH, KEY_TABLE, LARGE, LATER, RANK

from .lab import LEASE, RESULT_TTL, Lab
from .tour import tour

FOLDER = Path(outlast.protocol.__file__).parent / "lua"
FILES = sorted(path.stem for path in FOLDER.glob("*.lua") if path.stem != "_prelude")


@dataclass
class Header:
    name: str
    keys: list[str]
    argv: list[str]
    replies: list[list[str]]
    body: str


def header_of(name: str) -> Header:
    source = (FOLDER / f"{name}.lua").read_text(encoding="utf-8")
    match = re.match(r"--\[\[ (\w+): (?:.+\n)+?KEYS  (.+)\nARGV  (.+)\nREPLY (.+)\n(?:.*\n)*?\]\]\n", source)
    assert match, f"{name}.lua does not begin with a header"
    answers = match[4].partition(",")[0]
    replies = [alternative.split() for alternative in answers.split("|")]
    return Header(match[1], match[2].split(), match[3].split(), replies, source[match.end() :])


def code_of(text: str) -> str:
    """Lua without comments."""
    return re.sub(r"--.*", "", re.sub(r"--\[\[.*?\]\]", "", text, flags=re.DOTALL))


# -- headers, declarations, bodies -----------------------------------------------------------------------------------


def test_every_script_is_declared() -> None:
    assert sorted(scripts.SCRIPTS) == FILES


@pytest.mark.parametrize("name", FILES)
def test_header_and_declaration_agree(name: str) -> None:
    header, script = header_of(name), scripts.SCRIPTS[name]
    assert header.name == name
    assert (header.keys, header.argv) == (script.keys, script.argv)


def bindings(body: str) -> Iterator[tuple[str, str]]:
    """Each `local name = expression` of a body, of lists one by one."""
    for names, expressions in re.findall(r"^local ([\w, ]+) = (.+(?:\n  .+)?)$", body, re.MULTILINE):
        yield from zip(names.split(", "), re.split(r", *(?![^()]*\))", expressions), strict=False)


@pytest.mark.parametrize("name", FILES)
def test_body_reads_what_the_header_says(name: str) -> None:
    """Each KEYS and ARGV index is bound once, to a name that is the header's, in the header's order."""
    header = header_of(name)
    body = code_of(header.body)
    fixed = [key for key in header.keys if key[-1] not in "?."]
    optional = [key.rstrip("?") for key in header.keys if key.endswith("?")]
    keys: dict[int, str] = {}
    late: list[str] = []
    argv: dict[int, str] = {}
    for local, expression in bindings(body):
        if found := re.fullmatch(r"KEYS\[(\d+)\]", expression):
            keys[int(found[1])] = local
        elif re.search(r"\bKEYS\b", expression) or expression.startswith("optional("):
            late.append(local)
            if at := re.search(r"KEYS\[(\d+)\]", expression):
                assert header.keys[int(at[1]) - 1] == f"{local}?"
        elif found := re.search(r"ARGV\[(\d+)\]", expression):
            argv[int(found[1])] = local
    assert [keys[index] for index in sorted(keys)] == [key.rstrip("?") for key in header.keys[: len(keys)]]
    assert [*list(keys.values())[len(fixed) :], *late] == optional

    rest = header.argv[-1].endswith("...")
    named = header.argv[:-1] if rest else header.argv
    wanted = {index: _local(argument) for index, argument in enumerate(named, 1)}
    assert {index: _local(local) for index, local in argv.items()} == wanted
    # What is left of KEYS and ARGV are loops over what may repeat, and they start where the names end.
    for start in re.findall(r"for \w+ = (\d+), #ARGV", body):
        assert rest
        assert int(start) == len(named) + 1
    for count in re.findall(r"#ARGV > (\d+)", body):
        assert rest
        assert int(count) == len(named)
    loops = re.findall(r"(?:KEYS|ARGV)\[(?!\d|#KEYS\])([^\]]+)\]", body)
    assert not loops or rest or header.keys[-1][-1] in "?."


def _local(name: str) -> str:
    return re.sub(r"_(ms|arg)$", "", name)


def test_bindings_of_renew_are_where_its_loop_expects_them() -> None:
    """renew pairs KEYS[i] with ARGV[2i] and ARGV[2i + 1], so its fixed parts are one key and three arguments."""
    header = header_of("renew")
    assert header.keys == ["leases", "job..."]
    assert header.argv == ["now", "lease_ms", "relief", "job..."]
    assert "local id, token = ARGV[2 * i], ARGV[2 * i + 1]" in header.body
    assert "for i = 2, #KEYS do" in header.body


@pytest.mark.parametrize("name", FILES)
def test_body_answers_what_the_header_says(name: str) -> None:
    header = header_of(name)
    words = {alternative[0] for alternative in header.replies}
    body = code_of(header.body)
    answered = set(re.findall(r"return (?:\{ )?'(\w+)'", body))
    for yes, no in re.findall(r"(?:return|=) [^\n]*== '\w+' and '(\w+)' or '(\w+)'", body):
        answered |= {yes, no} & words
    answered |= set(re.findall(r"reply(?:, \w+)* = \{ '(\w+)'", body)) | set(re.findall(r"\] = '(lost)'", body))
    if name == "settle":  # answers the status that it was given, or the one that a cancel made of it
        assert "return status" in body
        answered |= {"completed", "failed"} | ({"cancelled"} if "status, body, ttl = 'cancelled'" in body else set())
    if name in NUMBERS:
        assert re.search(r"return #\w+$", body)
        answered = words
    assert answered == words


NUMBERS = ("prune_dead", "purge_dead")
"""Scripts whose answer is a number."""

ANSWERS = {
    "enqueue": {"created": ["j"], "duplicate": ["j"], "conflict": ["j"], "in_use": ["waiting"], "too_large": ["9"]},
    "reserve": {"ok": ["0", "-1", "0", [b"", b"5", b"", b"", b"", b""]], "stale": ["0"]},
    "prune_dead": {},
    "purge_dead": {},
}


@pytest.mark.parametrize("name", FILES)
def test_every_answer_is_understood_and_no_other(name: str, keys: Keys) -> None:
    decode = next(call for call in sent(keys) if call.script is scripts.SCRIPTS[name]).decode
    for word, *shape in header_of(name).replies:
        rest = ANSWERS.get(name, {}).get(word)
        if rest is not None:
            assert len(rest) == len([part for part in shape if not part.endswith("...")])
            reply: Any = [word.encode(), *rest]
        else:
            reply = [word.encode()] if name == "renew" else 7 if name in NUMBERS else word.encode()
        if word in ("conflict", "in_use", "too_large"):
            with pytest.raises((IdempotencyConflictError, JobInUseError, InvalidArgumentError)) as refused:
                decode(reply)
            assert word == "too_large" or refused.value.job_id
        else:
            decode(reply)
    if name not in NUMBERS:
        for nonsense in (b"surprise", [b"surprise"], [b"surprise", b"x"], None, 5):
            with pytest.raises(ReplyShapeError):
                decode(nonsense)


# -- what calls send -------------------------------------------------------------------------------------------------

USAGE_TTL_MS = 400 * 86_400_000

JOB = holding.Reserved(
    "id-7", "p", 3, 5, 2, 1, 4, "100", "200", 6, "rank-9", "", None, None, None, None, None, None, "", "", "", "w:8"
)


def job(key: str = "") -> holding.Reserved:
    fields = {name: getattr(JOB, name) for name in JOB.__slots__}
    return holding.Reserved(**{**fields, "key": key})


def variants(keys: Keys) -> Iterator[tuple[Call[Any], dict[str, str], dict[str, str], list[str]]]:
    """Every combination of options: the call, the KEYS it must have, the named ARGV, and the ARGV that repeat."""
    for own, key, payload, delay, hashed, check, expires, deadline, schedule, extra, now in itertools.product(
        (False, True),
        ("", "kk"),
        ("pp", "x" * LARGE, "é" * (LARGE // 2 + 1)),
        (0, 77),
        ("", "hh"),
        (False, True),
        (None, 5),
        (None, 6),
        (None, ("nightly", 7)),
        ((), (("owner", "o"),)),
        (None, 9),
    ):
        yield (
            calls.enqueue(
                keys,
                id="id-1",
                nonce="nn",
                payload=payload,
                max_attempts=4,
                priority=6,
                delay_ms=delay,
                own_id=own,
                key=key,
                key_ttl_ms=88,
                payload_hash=hashed,
                check_payload=check,
                expires_ms=expires,
                deadline_ms=deadline,
                schedule=schedule,
                extra=extra,
                now=now,
            ),
            {
                "job": keys.job("id-1"),
                "signal": keys.signal,
                "lane": keys.scheduled if delay else keys.ready,
                **({} if delay else {"seq?": keys.seq}),
                **({"events?": keys.events("id-1"), "dead?": keys.dead, "steps?": keys.steps("id-1")} if own else {}),
                **({"idem?": keys.idem("kk")} if key else {}),
                **({"config?": keys.config} if "é" in payload else {}),
                **({"schedules?": keys.schedules} if schedule else {}),
            },
            {
                "now": _opt(now),
                "id": "id-1",
                "nonce": "nn",
                "payload": payload,
                "max_attempts": "4",
                "priority": "6",
                "delay_ms": str(delay),
                "own": str(int(own)),
                "key": key,
                "key_ttl_ms": "88",
                "hash": hashed if check else "",
                "expires_ms": _opt(expires),
                "deadline_ms": _opt(deadline),
                "schedule": schedule[0] if schedule else "",
                "due": str(schedule[1]) if schedule else "",
            },
            [*itertools.chain(*extra), *(("payloadHash", hashed) if key and hashed else ())],
        )
    for relief, now in itertools.product((False, True), (None, 9)):
        yield (
            calls.cancel(keys, "id-1", result_ttl_ms=55, relief=relief, now=now),
            {
                "job": keys.job("id-1"),
                "events": keys.events("id-1"),
                "ready": keys.ready,
                "scheduled": keys.scheduled,
                "config": keys.config,
                "absent": keys.absent,
            },
            {
                "now": _opt(now),
                "id": "id-1",
                "result_ttl_ms": "55",
                "base": keys.base,
                "relief": str(int(relief)),
                "ctl_ttl_ms": str(calls.CTL_TTL_MS),
                "before": "",
            },
            [],
        )
        held = [job() for _ in range(3 if relief else 1)]
        yield (
            holding.renew(keys, held, lease_ms=44, relief=relief, now=now),
            {"leases": keys.leases, **{f"job...{i}": keys.job("id-7") for i in range(len(held))}},
            {"now": _opt(now), "lease_ms": "44", "relief": str(int(relief))},
            ["id-7", "w:8"] * len(held),
        )
    for flag in (False, True):
        yield (
            calls.retry_dead(keys, "id-1", nonce="nn", max_attempts=4, given=not flag, keep_steps=flag, now=9),
            {
                "job": keys.job("id-1"),
                "events": keys.events("id-1"),
                "dead": keys.dead,
                "ready": keys.ready,
                "seq": keys.seq,
                "signal": keys.signal,
                "steps": keys.steps("id-1"),
            },
            {
                "now": "9",
                "id": "id-1",
                "nonce": "nn",
                "max_attempts": "4",
                "steps_ttl_ms": str(calls.STEPS_TTL_MS if flag else 0),
                "given": str(int(not flag)),
            },
            [],
        )
        yield (
            holding.step(keys, job(), name="gen", value="vv", ttl_ms=55, stale=flag),
            {"job": keys.job("id-7"), "steps": keys.steps("id-7")},
            {
                "token": "w:8",
                "gen": "100",
                "field": "s:gen",
                "value": "vv",
                "ttl_ms": "55",
                "stale": str(int(flag)),
            },
            [],
        )
    yield holding.prune_dead(keys), {"dead": keys.dead, "absent": keys.absent}, {"base": keys.base}, []
    yield (
        calls.purge_dead(keys, 5),
        {"dead": keys.dead, "absent": keys.absent},
        {"base": keys.base, "before": "5"},
        [],
    )
    yield (
        holding.admit(keys, "id-1", "me"),
        {
            "owner": keys.owner("me"),
            "ready": keys.ready,
            "scheduled": keys.scheduled,
            "signal": keys.signal,
            "leases": keys.leases,
        },
        {"id": "id-1"},
        [],
    )
    for again, stale, grace, bell, limited in itertools.product(
        (False, True), (None, 66), (None, 33), (False, True), ("", "room")
    ):
        yield (
            holding.reserve(
                keys,
                worker="wid",
                request=12,
                k=3,
                lease_ms=44,
                result_ttl_ms=55,
                dead_ttl_ms=77,
                again=again,
                stale_at_ms=stale,
                bell=bell,
                limited=limited,
                grace=grace,
                max_bytes=99,
                now=9,
            ),
            {
                "ready": keys.ready,
                "scheduled": keys.scheduled,
                "leases": keys.leases,
                "signal": keys.signal,
                "seq": keys.seq,
                "take": keys.take("wid"),
                "config": keys.config,
                "dead": keys.dead,
                "room": keys.room,
                "watch": keys.watch,
                "absent": keys.absent,
            },
            {
                "now": "9",
                "token": "wid:12",
                "k": "3",
                "lease_ms": "44",
                "again": str(int(again)),
                "stale_at": _opt(stale),
                "grace_ms": str(44 // 3 if grace is None else grace),
                "result_ttl_ms": "55",
                "dead_ttl_ms": "77",
                "bell": str(int(bell)),
                "base": keys.base,
                "max_bytes": "99",
                "was_limited": limited or "0",
            },
            [],
        )
    for lease, progress, usage, again, events in itertools.product(
        (None, 44), ("", "0.5"), ("", "{}"), (False, True), ([], [("chunk", "x"), ("data", "{}")])
    ):
        yield (
            holding.flush(
                keys,
                job(),
                first=21,
                events=events,
                max_len=31,
                lease_ms=lease,
                progress=progress,
                usage=usage,
                again=again,
                now=9,
            ),
            {
                "job": keys.job("id-7"),
                "events": keys.events("id-7"),
                **({} if lease is None else {"leases?": keys.leases}),
            },
            {
                "now": "9",
                "token": "w:8",
                "id": "id-7",
                "again": str(int(again)),
                "lease_ms": _opt(lease),
                "progress": progress,
                "usage": usage,
                "max_len": "31",
                "b": "200",
                "n": "21",
                "attempt": "3",
            },
            [*itertools.chain(*events)],
        )
    for key, flag in itertools.product(("", "kk"), (False, True)):
        held_by_key = {"idem?": keys.idem("kk")} if key else {}
        own = {"job": keys.job("id-7"), "events": keys.events("id-7"), "leases": keys.leases}
        used = holding.Used("{}", "2026-11-30", [("cost", "0.5"), ("tokens", "7")]) if flag else holding.Used()
        totals = {"usage?": keys.usage("2026-11-30")} if flag else {}
        amounts = ["cost", "0.5", "tokens", "7"] if flag else []
        for status in ("completed", "failed", "cancelled"):
            yield (
                holding.settle(
                    keys,
                    job(key),
                    status=status,
                    body="bb",
                    ttl_ms=22,
                    cancel_ttl_ms=23,
                    count=24,
                    steps=flag,
                    used=used,
                    now=9,
                ),
                {
                    **own,
                    "absent": keys.absent,
                    **({"dead?": keys.dead} if status == "failed" else {}),
                    **({"steps?": keys.steps("id-7")} if flag else {}),
                    **totals,
                    **held_by_key,
                },
                {
                    "now": "9",
                    "token": "w:8",
                    "id": "id-7",
                    "status": status,
                    "body": "bb",
                    "ttl_ms": "22",
                    "cancel_ttl_ms": "23",
                    "attempt": "3",
                    "count": "24",
                    "has_key": str(int(bool(key))),
                    "has_steps": str(int(flag)),
                    "used": used.text,
                },
                amounts,
            )
        yield (
            holding.retry(
                keys, job(key), error="ee", delay_ms=25, cancel_ttl_ms=23, count=24, ring=flag, used=used, now=9
            ),
            {
                **own,
                "scheduled": keys.scheduled,
                "absent": keys.absent,
                **({"signal?": keys.signal} if flag else {}),
                **totals,
                **held_by_key,
            },
            {
                "now": "9",
                "token": "w:8",
                "id": "id-7",
                "reason": "ee",
                "delay_ms": "25",
                "cancel_ttl_ms": "23",
                "attempt": "3",
                "count": "24",
                "has_key": str(int(bool(key))),
                "rings": str(int(flag)),
                "used": used.text,
            },
            amounts,
        )
        for emitted in (False, True):
            yield (
                holding.release(
                    keys,
                    job(key),
                    cancel_ttl_ms=23,
                    count=24,
                    emitted=emitted,
                    error="ee",
                    pause_ms=26 if flag else None,
                    used=used,
                    now=9,
                ),
                {
                    **own,
                    "ready": keys.ready,
                    "signal": keys.signal,
                    "absent": keys.absent,
                    **({"config?": keys.config} if flag else {}),
                    **totals,
                    **held_by_key,
                },
                {
                    "now": "9",
                    "token": "w:8",
                    "id": "id-7",
                    "reason": "ee",
                    "rank": "rank-9",
                    "pause_ms": "26" if flag else "",
                    "cancel_ttl_ms": "23",
                    "attempt": "3",
                    "starts": "4",
                    "count": "24",
                    "emitted": str(int(emitted)),
                    "has_key": str(int(bool(key))),
                    "used": used.text,
                },
                amounts,
            )


def _opt(value: int | None) -> str:
    return "" if value is None else str(value)


def sent(keys: Keys) -> Iterator[Call[Any]]:
    return (variant[0] for variant in variants(keys))


@pytest.mark.parametrize("name", FILES)
def test_calls_send_what_the_header_says(name: str, keys: Keys) -> None:
    header = header_of(name)
    count = 0
    for call, names, named, repeated in variants(keys):
        if call.script is not scripts.SCRIPTS[name]:
            continue
        count += 1
        numkeys = int(call.args[0])
        assert all(isinstance(part, str) for part in call.args)
        assert list(call.args[1 : 1 + numkeys]) == list(names.values())
        # In the header's order, and everything that the header does not mark as optional is there.
        order = [key if not key[-1].isdigit() else "job..." for key in names]
        assert [key for key in header.keys if key in order] == list(dict.fromkeys(order))
        assert {key for key in header.keys if key[-1] not in "?."} <= set(order)
        arguments = [argument for argument in header.argv if not argument.endswith("...")]
        assert list(named) == arguments
        assert list(call.args[1 + numkeys :]) == [*named.values(), *repeated]
        assert not repeated or header.argv[-1].endswith("...")
        assert call.command() == ("EVALSHA", DIGESTS[name], *call.args)
        assert call.command(source=True) == ("EVAL", scripts.load(name), *call.args)
    assert count


def test_a_call_shows_neither_payload_nor_result(keys: Keys) -> None:
    for call in sent(keys):
        assert repr(call) == f"Call({call.script.name})"  # type: ignore[union-attr]
    assert repr(calls.get(keys, "x", None)) == "Call(HMGET)"  # type: ignore[arg-type]


def test_only_what_may_be_sent_twice_is_marked_replayable(keys: Keys) -> None:
    unsafe = {call.script.name for call in sent(keys) if not call.replayable}  # type: ignore[union-attr]
    assert unsafe == {"reserve", "flush"}
    for call, _, named, repeated in variants(keys):
        if call.script and call.script.name in unsafe:
            assert call.replayable == (named["again"] == "1" or (call.script.name == "flush" and not repeated))


# -- digests, constants, rules of the house --------------------------------------------------------------------------


def test_digests_are_those_of_the_files(connection: redis.Redis) -> None:
    assert sorted(DIGESTS) == FILES
    for name in FILES:
        assert scripts.digest(name) == DIGESTS[name] == scripts.SCRIPTS[name].sha, "run scripts/digests"
        assert connection.execute_command("SCRIPT", "LOAD", scripts.load(name)).decode() == DIGESTS[name]


def test_constants_of_the_prelude_are_those_of_python() -> None:
    prelude = (FOLDER / "_prelude.lua").read_text(encoding="utf-8")
    found = dict(re.findall(r"^local ([A-Z_]+) = (.+?)(?: *--.*)?$", prelude, re.MULTILINE))
    assert float(found["RANK"]) == RANK
    assert int(found["BATCH"]) == BATCH
    table = {row[0]: row[2] for row in KEY_TABLE}
    assert f"at most {int(found['SIGNAL_CAP']):,}" in table["signal"]
    assert int(found["USAGE_TTL"]) == USAGE_TTL_MS
    assert int(found["LARGE"]) == LARGE
    assert int(found["LATER"]) == LATER
    assert found["LEASE_TEXT"] == "'Worker lease expired before the job finished'"  # the wire format's words
    assert set(found) == {
        "RANK",
        "BATCH",
        "HOOK_ATTEMPTS",
        "SIGNAL_CAP",
        "LEASE_TEXT",
        "LATER",
        "PEEK",
        "ELSEWHERE",
        "USAGE_TTL",
        "LARGE",
        "PARKED",
        "OWNER_TTL",
    }


COMMANDS = {
    # command: a pattern of what must follow its key
    "DEL": "",
    "UNLINK": "",
    "GET": "",
    "HDEL": "",
    "HMGET": "",
    "HSET": "",
    "INCR": "",
    "INCRBY": "",
    "LPUSH": "",
    "LTRIM": ", 0, (SIGNAL_CAP - 1|0)",
    "PERSIST": "",
    "PEXPIRE": "",
    "RPUSH": "",
    "SET": "",
    "TIME": None,
    "XADD": "",
    "XREVRANGE": r", '\+', '-', 'COUNT', 1",
    "XTRIM": ", 'MINID'",
    "ZADD": "",
    "ZCARD": "",
    "ZCOUNT": r", '-inf', '\(0'",
    "ZMSCORE": r", unpack\(ids\)",
    "ZPOPMIN": r", wanted\)",
    "ZRANGE": r", 0, (0|PEEK|BATCH|BATCH - 1|running\[owner\] - 1)(?!\w)",
    "ZRANGEBYSCORE": r", ('\(0', '\+inf', 'WITHSCORES', 'LIMIT', 0, PEEK|'-inf', before, 'LIMIT', 0, BATCH)\)",
    "ZREM": "",
    "ZSCORE": "",
}


@pytest.mark.parametrize("name", ["_prelude", *FILES])
def test_scripts_do_only_bounded_and_plain_things(name: str) -> None:
    """No cjson on user data, no read of a whole set, no loop without a bound, no shebang, nothing but redis.call."""
    body = code_of((FOLDER / f"{name}.lua").read_text(encoding="utf-8"))
    assert not re.search(r"cjson|cmsgpack|SCRIPT|pcall|error_reply|error\(|loadstring|replicate|math\.random", body)
    assert not body.startswith("#!")
    assert set(re.findall(r"redis\.(\w+)", body)) <= {"call"}
    for command, rest in re.findall(r"redis\.call\('(\w+)'(.*)", body):
        assert command in COMMANDS, f"{command} is not among the known commands: is it bounded?"
        if COMMANDS[command]:
            after_key = re.sub(r"^, [^,]+", "", rest)
            assert re.match(COMMANDS[command] or "", after_key), f"{command}{rest} has no bound"
    for loop in re.findall(r"\b(?:while|for|repeat)\b.*", body):
        assert re.match(
            r"for _, \w+ in ipairs\(|for \w+, \w+ in i?pairs\(|for \w+ = \d+, (#\w+|math\.min\(times, BATCH\))|"
            r"for last = #row, 1, -1 do|while at <= #taken do|"
            r"for name, amount in string\.gmatch\(",  # of a job: at most MAX_COUNTERS
            loop,
        ), f"is this loop bounded? {loop}"
    if name == "reserve":
        assert "k = math.min(k, BATCH)" in body
        assert "wanted = cap and BATCH or allowed" in body
        assert "allowed = math.min(k, left)" in body


def test_the_protocol_imports_only_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import outlast.protocol;"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - sys.stdlib_module_names))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "['outlast']"


# -- keys ------------------------------------------------------------------------------------------------------------

PATTERNS = {row[0]: re.compile(re.sub(r"<\w+>", ".+", row[0])) for row in KEY_TABLE}


def row_of(name: str) -> str:
    return max((row for row, pattern in PATTERNS.items() if pattern.fullmatch(name)), key=len)


def test_the_key_table_is_what_the_scripts_create(lab: Lab) -> None:
    tour(lab)
    state = lab.state()
    rows = {row[0]: row for row in KEY_TABLE}
    statuses = {name: key["fields"]["status"] for name, key in state.items() if "job:" in name}
    for name, key in state.items():
        _, kind, _, lives = rows[row_of(name.removeprefix("hooks:"))]
        assert key["type"] == kind, name
        ttl = key["ttl_ms"]
        id = name.partition(":")[2]
        ended = statuses.get(f"job:{id}") in ("completed", "failed", "cancelled")
        match lives:
            case "7 days":
                assert 6 * 86_400_000 < ttl <= 7 * 86_400_000
            case "always" | "always; pruned with their records" | "pruned by readers":
                assert ttl is None, name
            case "result_ttl or dead_ttl after the end" | "as the record":
                assert (0 < ttl <= RESULT_TTL) if ended else ttl is None, (name, ttl)
            case "idempotency_ttl after completion":
                done = statuses[f"job:{key['value']}"] == "completed"
                assert (0 < ttl <= RESULT_TTL) if done else ttl is None, name
            case "2 x lease":
                assert LEASE < ttl <= 2 * LEASE
            case "30 days; then as the record":
                assert (0 < ttl <= RESULT_TTL) if ended else RESULT_TTL < ttl <= calls.STEPS_TTL_MS, name
            case "400 days":
                assert 399 * 86_400_000 < ttl <= USAGE_TTL_MS
            case "a second longer":
                assert ttl > 0
            case "10 minutes":
                assert 0 < ttl <= 600_000 == calls.CTL_TTL_MS
            case _:
                pytest.fail(f"the test does not know what {lives!r} means")
    assert {row_of(name) for name in state} == set(rows) - {"absent"}


#: Keys whose names only the database knows are followed inside; all of one hash tag (DESIGN §3.6).
FOLLOWED = {
    # (The record of an enqueue is not there either.)
    "enqueue": {"job:<id>", "idem:<key>", "ready", "scheduled", "leases", "dead"},
    "cancel": {"idem:<key>", "ctl:<worker>", "steps:<id>", "hooks:<key>"},
    "retry": {"steps:<id>", "hooks:<key>"},
    "release": {"steps:<id>", "hooks:<key>"},
    "settle": {"hooks:<key>"},
    "prune_dead": {"job:<id>"},
    "purge_dead": {"job:<id>", "events:<id>", "steps:<id>"},
    "reserve": {"job:<id>", "events:<id>", "idem:<key>", "steps:<id>", "owner:<owner>", "hooks:<key>"},
}


def test_scripts_touch_the_keys_that_they_declare_and_declare_those_that_they_touch(
    own_lab: Lab, own_connection: redis.Redis
) -> None:
    """MONITOR shows every command inside every script: none strays from its KEYS, but for the names listed above.

    Nor does any number leave a script in a form that is not exact.
    """
    for name in FILES:
        own_connection.execute_command("SCRIPT", "LOAD", scripts.load(name))
    names = {sha: name for name, sha in DIGESTS.items()}
    touched: dict[str, set[str]] = {name: set() for name in FILES}
    declared: dict[str, set[str]] = {name: set() for name in FILES}
    base = own_lab.keys.base
    script, keys = "", set[str]()
    with own_connection.monitor() as monitor:
        tour(own_lab)
        own_lab.raw("ECHO", "end-of-tour")
        while (shown := monitor.next_command())["command"] != "ECHO end-of-tour":
            words = shown["command"].split(" ")
            if words[0] == "EVALSHA":
                script, keys = names[words[1]], set(words[3 : 3 + int(words[2])])
                # What finds keys by itself runs only where all keys of the queue are; see `Keys.absent`.
                assert (own_lab.keys.absent in keys) == (script in FOLLOWED and script != "enqueue"), script
                keys.discard(own_lab.keys.absent)
                declared[script] |= {row_of(key.removeprefix(base)) for key in keys}
            elif shown["client_type"] == "lua" and words[0] != "TIME":
                used = words[1:] if words[0] in ("DEL", "UNLINK") else words[1:2]
                touched[script] |= {row_of(key.removeprefix(base)) for key in used}
                # Upstash cuts Lua numbers to integers, and Lua would write a time as 1.8e+12: all leave as text.
                assert not [word for word in words if re.fullmatch(r"-?[\d.]+e[+-]?\d+|\d+\.0", word)], words
                for key in used:
                    assert key in keys or row_of(key.removeprefix(base)) in FOLLOWED.get(script, set()), (script, key)
    for name in FILES:
        followed = FOLLOWED.get(name, set()) - declared[name]
        assert declared[name] == touched[name] - followed, f"{name} declares keys that it never touches"
