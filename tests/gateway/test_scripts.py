"""Scripts with Upstash's flags run on a server that refuses them, under the digests that their callers know."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest
import redis

from outlast_worker.gateway.scripts import Scripts, strip_flags

if TYPE_CHECKING:
    from tests.gateway.conftest import Wire

NOSCRIPT = "NOSCRIPT No matching script. Please use EVAL."


def flagged(body: str, flags: str = "allow-key-locking") -> tuple[str, str]:
    script = f"#!lua flags={flags}\n{body}"
    return script, hashlib.sha1(script.encode()).hexdigest()


def test_the_server_itself_refuses_the_flag(raw: redis.Redis) -> None:
    with pytest.raises(redis.ResponseError, match="Unexpected flag in script shebang: allow-key-locking"):
        raw.eval(flagged("return 1")[0], 0)


def test_a_flagged_script_runs_and_is_then_known_by_its_own_digest(wire: Wire, key: str) -> None:
    script, sha = flagged(f"return redis.call('SET', KEYS[1], '{key}')")
    assert wire.error("EVALSHA", sha, 1, key) == NOSCRIPT
    assert wire.command("EVAL", script, 1, key) == "OK"
    assert wire.command("EVALSHA", sha, 1, key) == "OK"
    assert wire.command("EVALSHA", sha.upper(), 1, key) == "OK"
    assert wire("POST", "/pipeline", [["EVALSHA", sha, 1, key]]).json == [{"result": "OK"}]
    assert wire("POST", "/multi-exec", [["EVALSHA", sha, 1, key]]).json == [{"result": "OK"}]


def test_script_load_answers_with_the_digest_of_what_was_sent(wire: Wire, key: str) -> None:
    script, sha = flagged(f"return '{key}'", "no-writes,allow-key-locking")
    assert wire.command("SCRIPT", "EXISTS", sha, "0" * 40) == [0, 0]
    assert wire.command("script", "load", script) == sha
    assert wire.command("SCRIPT", "EXISTS", sha, "0" * 40) == [1, 0]
    assert wire.command("EVALSHA_RO", sha, 0) == key
    plain = f"return '{key} plain'"
    assert wire.command("SCRIPT", "LOAD", plain) == hashlib.sha1(plain.encode()).hexdigest()


def test_the_digest_survives_script_flush_and_the_script_does_not(wire: Wire, raw: redis.Redis, key: str) -> None:
    script, sha = flagged(f"return '{key}'")
    wire.command("SCRIPT", "LOAD", script)
    raw.script_flush()
    assert wire.command("SCRIPT", "EXISTS", sha) == [0]
    assert wire.error("EVALSHA", sha, 0) == NOSCRIPT
    raw.script_load(strip_flags(script.encode()).decode())  # as another gateway would have
    assert wire.command("EVALSHA", sha, 0) == key


def test_flags_that_the_server_knows_stay_in_force(wire: Wire, key: str) -> None:
    script, _ = flagged("return redis.call('SET', KEYS[1], 1)", "allow-key-locking,no-writes")
    assert "Write commands are not allowed from read-only scripts" in wire.error("EVAL", script, 1, key)


def test_errors_name_the_line_of_the_script_as_it_was_written(wire: Wire) -> None:
    script, _ = flagged("\nreturn nothing.at.all")
    assert "@user_script:3:" in wire.error("EVAL", script, 0)


@pytest.mark.parametrize(
    ("script", "sent"),
    [
        (b"return 1", b"return 1"),
        (b"#!lua\nreturn 1", b"#!lua\nreturn 1"),
        (b"#!lua flags=allow-key-locking\nreturn 1", b"#!lua\nreturn 1"),
        (b"#!lua flags=allow-key-locking", b"#!lua"),
        (b"#!lua flags=no-writes\nreturn 1", b"#!lua flags=no-writes\nreturn 1"),
        (b"#!lua flags=no-writes,allow-key-locking,allow-oom\nx", b"#!lua flags=no-writes,allow-oom\nx"),
        (b"#!lua name=a flags=allow-key-locking\r\nx", b"#!lua name=a\nx"),
        (b"\n#!lua flags=allow-key-locking\nx", b"\n#!lua flags=allow-key-locking\nx"),  # not the first line: a comment
        (b"-- flags=allow-key-locking\nx", b"-- flags=allow-key-locking\nx"),
    ],
)
def test_only_the_flag_is_taken_out(script: bytes, sent: bytes) -> None:
    assert strip_flags(script) == sent


def test_the_memory_of_digests_is_bounded() -> None:
    scripts = Scripts()
    for number in range(10_050):
        scripts.body(b"#!lua flags=allow-key-locking\nreturn %d" % number)
    assert len(scripts._known) == 10_000
