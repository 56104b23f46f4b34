"""Who gets in, to what, and from where (H-73)."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import pytest
import redis

from outlast import ConfigurationError, InvalidArgumentError
from outlast_worker.gateway import Database, Faults, Gateway, GatewayConfig, GatewayServer, serve
from outlast_worker.gateway.upstream import Address

if TYPE_CHECKING:
    from tests.gateway.conftest import Wire

WRONGPASS = (
    b'{"error":"WRONGPASS invalid or missing auth token.'
    b' See https://docs.upstash.com/redis/troubleshooting/http_unauthorized for details."}'
)
NOPERM = "NOPERM this user has no permissions to run the '{}' command or its subcommand"


def local(**settings: Any) -> GatewayConfig:
    return GatewayConfig(databases=[Database(redis_url="redis://127.0.0.1:1", token="s3cret")], **settings)


# --- tokens ----------------------------------------------------------------------------------------------------


def test_without_the_right_token_nothing_is_parsed_and_the_answer_is_401(wire: Wire) -> None:
    for token in (None, "wrong", wire.token + "x", "AUxxxx", "AU" + "A" * 60):
        for path, body in (("/", b"not even json"), ("/pipeline", b""), ("/get/k", None), ("/subscribe/c", None)):
            answer = wire("POST", path, body, token=token)
            assert (answer.status, answer.body) == (401, WRONGPASS)
            assert "upstash-sync-token" not in answer.headers


def test_the_token_may_come_bare_or_as_a_query_parameter_which_wins(wire: Wire) -> None:
    assert wire("GET", "/ping", token=None, authorization=wire.token).status == 200
    assert wire("GET", "/ping", token=None, authorization=f"bearer {wire.token}").status == 200
    assert wire("GET", f"/ping?_token={quote(wire.token)}", token=None).body == b'{"result":"PONG"}'
    assert wire("GET", f"/ping?_token={quote(wire.token)}", token="wrong").status == 200
    assert wire("GET", "/ping?_token=wrong").status == 401


def test_each_token_opens_its_own_database(wire: Wire, key: str) -> None:
    wire.command("SET", key, "in 0")
    other = wire.at(wire.url, "the token of database 3")
    assert other.command("GET", key) is None
    other.command("SET", key, "in 3")
    assert wire.command("GET", key) == "in 0"
    assert other.command("FLUSHALL") == "OK"  # everything of this token, which is its database
    assert wire.command("GET", key) == "in 0"


@pytest.mark.parametrize(
    "command", ["SET k v", "DEL k", "EXPIRE k 1", "XADD s * f v", "PUBLISH c m", "FLUSHDB", "GETEX k"]
)
def test_the_readonly_token_writes_nothing(wire: Wire, command: str) -> None:
    reader = wire.at(wire.url, wire.readonly)
    name = command.split()[0].lower()
    assert reader.error(*command.split()) == NOPERM.format(name)
    assert reader("POST", "/pipeline", [command.split()]).json == [{"error": NOPERM.format(name)}]
    assert reader("POST", "/multi-exec", [command.split()]).status == 400


@pytest.mark.parametrize("name", ["EVAL", "EVALSHA", "EVAL_RO", "EVALSHA_RO", "SCRIPT", "KEYS", "SCAN", "FCALL"])
def test_the_readonly_token_runs_no_scripts_and_lists_no_keys(wire: Wire, name: str) -> None:
    assert wire.at(wire.url, wire.readonly).error(name, "x", 0) == NOPERM.format(name.lower())


def test_the_readonly_token_reads(wire: Wire, key: str) -> None:
    wire.command("HSET", key, "f", "v")
    wire.command("XADD", key + "s", "1-1", "f", "v")
    reader = wire.at(wire.url, wire.readonly)
    assert reader.command("HMGET", key, "f", "g") == ["v", None]
    assert reader.command("XREAD", "COUNT", 10, "STREAMS", key + "s", "0") == [[key + "s", [["1-1", ["f", "v"]]]]]
    assert reader.command("PING") == "PONG"
    assert reader.command("ZCARD", key + "z") == 0


def test_acl_users_get_tokens_with_their_own_rights(wire: Wire, raw: redis.Redis, key: str) -> None:
    raw.execute_command("ACL", "SETUSER", "alice", "on", ">pässword", "~" + key + "*", "+get", "+set", "+eval")
    answer = wire("POST", "/", ["ACL", "RESTTOKEN", "alice", "nonsense"])
    assert (answer.status, answer.json) == (400, {"error": 'ERR Wrong password or user "alice" does not exist'})
    token = wire.command("ACL", "RESTTOKEN", "alice", "pässword")
    alice = wire.at(wire.url, token)
    assert alice.command("SET", key, "v") == "OK"
    assert alice.command("GET", key) == "v"
    assert alice.error("DEL", key) == NOPERM.format("del")
    # MULTI itself is refused: its commands must not run without it.
    assert alice("POST", "/multi-exec", [["SET", key, "w"], ["SET", key, "x"]]).json == {
        "error": NOPERM.format("multi")
    }
    assert alice.command("GET", key) == "v"
    raw.execute_command("ACL", "SETUSER", "alice", "resetpass", ">another")
    raw.execute_command("CLIENT", "KILL", "USER", "alice")
    assert wire("POST", "/", ["GET", key], token=token).status in (401, 502)  # 502 if the old connection was still open
    assert wire("POST", "/", ["GET", key], token=token).body == WRONGPASS
    assert wire.at(wire.url, wire.readonly).error("ACL", "RESTTOKEN", "alice", "another")


# --- what a token may not do -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "CONFIG GET *",
        "CONFIG SET dir /tmp",
        "CONFIG SET notify-keyspace-events KEA dir /tmp",
        "CONFIG GET notify-keyspace-events *",
        "REPLICAOF 127.0.0.1 1",
        "SLAVEOF NO ONE",
        "DEBUG SLEEP 1",
        "SHUTDOWN NOSAVE",
        "SAVE",
        "BGSAVE",
        "MODULE LIST",
        "ACL LIST",
        "ACL SETUSER default on",
        "CLUSTER INFO",
        "SWAPDB 0 1",
        "MOVE k 1",
        "MIGRATE 127.0.0.1 1 k 0 1",
        "SLOWLOG GET",
        "LATENCY RESET",
        "FAILOVER",
    ],
)
def test_commands_that_take_over_a_server_are_refused_by_default(wire: Wire, command: str) -> None:
    name = command.split()[0]
    text = f"ERR Command is not available: '{name}'."
    assert wire.error(*command.split()).startswith(text)
    assert wire.error(*command.lower().split()).startswith(text)
    assert wire("GET", f"/{command.replace(' ', '/')}").status == 400


def test_script_debug_would_turn_a_shared_connection_into_a_debugger(wire: Wire) -> None:
    for mode in ("YES", "sync", "NO"):
        assert wire.error("script", "debug", mode).startswith('ERR Command "SCRIPT" is not allowed in REST')


@pytest.mark.parametrize("name", ["PSYNC", "SYNC", "REPLCONF", "READONLY", "ASKING", "SSUBSCRIBE", "CLIENT", "MONITOR"])
def test_commands_that_would_ruin_a_shared_connection_are_refused_even_to_admins(
    start: Callable[..., GatewayServer], wire: Wire, name: str
) -> None:
    admin = wire.at(start(allow_admin=True).url)
    assert admin.error(name, "x").startswith(f'ERR Command "{name}" is not allowed in REST')


def test_allow_admin_permits_them(start: Callable[..., GatewayServer], wire: Wire) -> None:
    admin = wire.at(start(allow_admin=True).url)
    assert admin.command("CONFIG", "GET", "databases") == ["databases", "16"]
    assert admin.command("SLOWLOG", "LEN") >= 0


def test_keyspace_notifications_can_be_set_as_on_upstash(wire: Wire) -> None:
    assert wire.command("CONFIG", "SET", "notify-keyspace-events", "") == "OK"
    assert wire.command("CONFIG", "GET", "notify-keyspace-events") == ["notify-keyspace-events", ""]


# --- where it listens, and for which name ----------------------------------------------------------------------


def test_a_host_header_of_another_name_is_refused(wire: Wire) -> None:
    port = urlsplit(wire.url).port
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "",
        "[::2]:80",
        "localhost.",
        "[::1",
    ):
        answer = wire("GET", "/ping", host=host)
        assert answer.status == 403, host
        assert "allowed_hosts" in answer.json["error"]
    for host in ("localhost", f"LOCALHOST:{port}", f"127.0.0.1:{port}", "[::1]", f"[::1]:{port}"):
        assert wire("GET", "/ping", host=host).status == 200, host


def test_it_listens_on_loopback_only(gateway: GatewayServer) -> None:
    port = urlsplit(gateway.url).port
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: only asks which address would be used
        own = probe.getsockname()[0]
    assert own != "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((own, port), timeout=5).close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.com", ""])
def test_another_address_needs_the_option_that_allows_it(host: str) -> None:
    for start in (lambda: GatewayServer(local(), host), lambda: serve(local(), host, 0)):
        with pytest.raises(InvalidArgumentError, match=r"allow_remote=True"):
            start()


def test_the_option_warns_and_answers_to_the_address_that_was_given(
    caplog: pytest.LogCaptureFixture, valkey_url: str, wire: Wire
) -> None:
    config = GatewayConfig(databases=[Database(redis_url=valkey_url, token=wire.token)], allow_remote=True)
    with caplog.at_level(logging.WARNING), GatewayServer(config, host="0.0.0.0") as server:
        assert "listens on 0.0.0.0" in caplog.text
        assert "token" in caplog.text
        assert wire.token not in caplog.text
        port = urlsplit(server.url).port
        assert wire.at(f"http://127.0.0.1:{port}").command("PING") == "PONG"
        assert wire.at(f"http://127.0.0.1:{port}")("GET", "/ping", host="evil.example").status == 403


def test_a_port_that_is_taken_is_named_with_a_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"port={port}.*choose another port"):
            serve(local(), "127.0.0.1", port)


# --- secrets ---------------------------------------------------------------------------------------------------


def test_tokens_and_passwords_are_in_no_repr_and_no_message() -> None:
    database = Database(redis_url="rediss://user:pa55@db.example:6380/2", token="t0k3n", readonly_token="r0")
    config = GatewayConfig(databases=[database], faults=Faults())
    gateway = Gateway(config)
    shown = repr([database, config, vars(gateway), *[backend.address for backend in gateway._backends]])
    assert not any(secret in shown for secret in ("pa55", "t0k3n", "r0'"))
    for url in (
        "redis://user:pa55@host:nonsense",
        "http://user:pa55@host",
        "redis://user:pa55@h/x",
        "redis://:pa55@h?a=b",
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            Gateway(GatewayConfig(databases=[Database(redis_url=url, token="t")]))
        assert "pa55" not in str(caught.value)


def test_the_access_log_has_names_and_numbers_but_no_values(
    start: Callable[..., GatewayServer], wire: Wire, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    server = start(access_log=True)
    logged = wire.at(server.url)
    with caplog.at_level(logging.DEBUG):
        logged("POST", f"/set/{key}?EX=100&_token={quote(wire.token)}", b"hunter2")
        logged("POST", "/pipeline", [["GET", key], ["HSET", key, "hunter2", "hunter2"]])
        logged("GET", "/hunter2/in/the/wrong/place")
        logged("GET", "/get/k", token="hunter2")
        server.__exit__()  # a line is written once its answer has left
    lines = [record.getMessage() for record in caplog.records if record.name == "outlast.gateway"]
    assert [line.rsplit(" ", 2)[0] for line in lines] == ["POST SET 200", "POST GET HSET 200", "GET ? 400", "GET - 401"]
    assert not any(secret in caplog.text for secret in ("hunter2", key, wire.token))


# --- configuration ---------------------------------------------------------------------------------------------


CUT = (
    "redis://:/hunter77@host:6379/0",
    "redis://:1/hunter77@host/0",
    "redis://:#hunter77@host/0",
    "redis://h/hunter77",
)
"""Passwords whose / or # ends the host: what comes behind must be in no message, and no database 0 of another host."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Database(redis_url="redis://h", token=""), "token is empty"),
        (lambda: Database(redis_url="redis://h", token="a", readonly_token="a"), "readonly_token equals token"),
        (lambda: GatewayConfig(databases=[]), "databases is empty"),
        (lambda: GatewayConfig(databases=[Database(redis_url="redis://h", token="a")] * 2), "share a token"),
        (lambda: local(timeout=0), "timeout=0 must be more than 0"),
        *((lambda url=url: Address.parse(url), r"^redis_url does not end in the number [^7]*$") for url in CUT),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_with_the_fix(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_a_file_names_the_databases_and_the_environment_keeps_the_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, valkey_url: str, wire: Wire
) -> None:
    monkeypatch.setenv("MY_REDIS", valkey_url)
    monkeypatch.setenv("MY_TOKEN", "from the environment")
    path = tmp_path / "gateway.toml"
    path.write_text(
        'access_log = true\n[[databases]]\nredis_url = "env:MY_REDIS"\ntoken = "env:MY_TOKEN"\n'
        f'[[databases]]\nredis_url = "{valkey_url}/3"\ntoken = "in the file"\nreadonly_token = "reads"\n'
    )
    config = GatewayConfig.load(path, timeout=5)
    assert (config.access_log, config.timeout, len(config.databases)) == (True, 5, 2)
    with GatewayServer(config) as server:
        for token in ("from the environment", "in the file", "reads"):
            assert wire.at(server.url, token).command("PING") == "PONG"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alow_admin = true", "unknown setting 'alow_admin'"),
        ('[[databases]]\nredis_url = "redis://h"', "token"),
        (
            '[[databases]]\nredis_url = "redis://h"\ntoken = "env:NOT_SET_ANYWHERE"',
            "NOT_SET_ANYWHERE, which is not set",
        ),
        ("", "databases is empty"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=message):
        GatewayConfig.load(path)


# --- the process -----------------------------------------------------------------------------------------------

SERVE = """
import logging, sys
from outlast_worker.gateway import Database, GatewayConfig, serve
logging.basicConfig(level="INFO", stream=sys.stdout)
serve(GatewayConfig(databases=[Database(redis_url=sys.argv[1], token="t")]), port=0)
print("ended", flush=True)
"""


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_serve_ends_cleanly_on_a_signal_with_a_subscriber_on_the_line(
    valkey_url: str, wire: Wire, sig: signal.Signals
) -> None:
    command = [sys.executable, "-W", "error", "-c", SERVE, valkey_url]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "listens on" in line)
        url = urlsplit(line.split()[-1])
        with socket.create_connection((url.hostname, url.port), timeout=10) as connection:
            head = b"GET /subscribe/c?_token=t HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n"
            connection.sendall(head)
            received = b""
            while b"data: subscribe,c,1" not in received:
                received += connection.recv(65536)
            process.send_signal(sig)
            while more := connection.recv(65536):
                received += more
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, err) == (0, "")
    assert out.rstrip().endswith("ended")
    assert received.endswith(b"0\r\n\r\n")


def test_a_missing_uvicorn_is_told_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'outlast-worker\[dev\]'"):
        serve(local(), port=0)


def test_importing_the_gateway_imports_no_web_server() -> None:
    code = "import sys, outlast_worker.gateway; print({'uvicorn', 'starlette', 'redis', 'httpx'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
