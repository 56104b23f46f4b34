"""Whatever is sent, the answer is well-formed, in time, never a 500, and the gateway is as before."""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from outlast_worker.gateway import GatewayServer

if TYPE_CHECKING:
    from tests.gateway.conftest import Wire

fuzzing = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20))
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner), max_leaves=20
)
# Names that do something, so that it is not all "not available"; none that empties the server the other tests use.
NAMES = """GET SET MGET HSET XADD XREAD XREADGROUP EVAL EVALSHA SCRIPT ZADD LPUSH SORT SCAN OBJECT SELECT MULTI EXEC
    BLPOP PING ACL CONFIG CLIENT COMMAND WAIT SUBSCRIBE MONITOR FUNCTION GETEX BITFIELD GEOADD PFADD RESTORE DUMP get"""
names = st.sampled_from(NAMES.split())
commands = st.builds(lambda name, rest: [name, *rest], names, st.lists(scalars, max_size=6))


def check(wire: Wire, method: str, path: str, body: bytes | None, **headers: str) -> None:
    answer = wire(method, path, body, timeout=20, **headers)
    assert answer.status in (200, 400, 401, 403, 404, 405, 413, 502), answer
    assert answer.status != 502 or b"within" in answer.body  # a WAIT that was asked for
    kind = answer.headers.get("content-type", "")
    if kind.startswith("application/json") and method != "HEAD" and answer.body:
        parsed = json.loads(answer.body)
        slots = parsed if isinstance(parsed, list) else [parsed]
        assert all(set(slot) in ({"result"}, {"error"}, {"faults"}) for slot in slots), parsed


@fuzzing
@given(path=st.sampled_from(["/", "/pipeline", "/multi-exec", "/set/fuzz"]), body=st.binary(max_size=200))
@example(path="/", body=b'\xef\xbb\xbf["PING"]')
@example(path="/", body=b'["\x00PING"]')
@example(path="/", body=b'["PING"]trailing')
@example(path="/", body=b'["PING",]')
@example(path="/pipeline", body=b"[[" * 50_000)
@example(path="/pipeline", body=b'[["PING",' + b'{"a":' * 50_000)
def test_any_bytes_as_a_body(wire: Wire, path: str, body: bytes) -> None:
    check(wire, "POST", path, body)


@fuzzing
@given(value=json_values)
@example(value=["EVAL", "return {1,2,{3,{4}}}", 0])
@example(value=["EVAL", "local t = {} for i = 1, 500 do t = {t} end return t", 0])
def test_any_json_as_a_command(wire: Wire, value: object) -> None:
    check(wire, "POST", "/", json.dumps(value).encode())


@fuzzing
@given(batch=st.lists(commands, max_size=8), path=st.sampled_from(["/pipeline", "/multi-exec"]), base64=st.booleans())
def test_any_arguments_to_real_commands(wire: Wire, batch: list[list[object]], path: str, base64: bool) -> None:
    headers = {"Upstash_Encoding": "base64"} if base64 else {}
    batch = [command for command in batch if command[0] != "WAIT" or path == "/multi-exec"]
    check(wire, "POST", path, json.dumps(batch).encode(), **headers)


@fuzzing
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "PATCH"]),
    path=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=60),
)
@example(method="GET", path="%")
@example(method="GET", path="%zz/%0/%2")
@example(method="GET", path="?")
@example(method="GET", path="get?&&=&a&=b&_token")
@example(method="GET", path="x" * 30_000)
@example(method="POST", path="/".join("abcdefghij" * 500))
def test_any_path(wire: Wire, method: str, path: str) -> None:
    check(wire, method, "/" + path, None)


@fuzzing
@given(
    name=st.sampled_from(
        [
            "upstash-encoding",
            "upstash-response-format",
            "upstash-sync-token",
            "authorization",
            "host",
            "accept",
            "origin",
        ]
    ),
    value=st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=40),
)
@example(name="upstash-sync-token", value="9" * 5000)
@example(name="authorization", value="Bearer AU" + "=" * 50)
@example(name="authorization", value="Bearer AUé")
@example(name="host", value="[[]]:[::")
@example(name="origin", value="é")
def test_any_header(wire: Wire, name: str, value: str) -> None:
    check(wire, "POST", "/", b'["PING"]', **{name: value.strip()})


@fuzzing
@given(
    data=st.binary(max_size=300),
    prefix=st.sampled_from([b"", b"GET / HTTP/1.1\r\n", b"POST /pipeline HTTP/1.1\r\nHost: "]),
)
def test_any_bytes_on_the_socket(wire: Wire, data: bytes, prefix: bytes) -> None:
    url = urlsplit(wire.url)
    with socket.create_connection((url.hostname, url.port), timeout=10) as connection:
        connection.sendall(prefix + data)
        connection.shutdown(socket.SHUT_WR)
        reply = b""
        try:
            while more := connection.recv(65536):
                reply += more
        except ConnectionResetError:
            pass
    assert b" 500 " not in reply.split(b"\r\n")[0]


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 1_000_000, 10_000_000])
def test_values_of_any_size_come_back(wire: Wire, key: str, size: int) -> None:
    value = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    assert wire("POST", f"/set/{key}?EX=60", value).status == (200 if size else 400)
    if size:
        answer = wire("POST", "/", ["GET", key], Upstash_Response_Format="resp2")
        assert answer.body == b"$%d\r\n%b\r\n" % (size, value)


def test_many_arguments_at_once(wire: Wire, key: str) -> None:
    assert wire.command("RPUSH", key, *range(100_000)) == 100_000
    assert wire.command("LRANGE", key, 0, -1) == [str(n) for n in range(100_000)]


def test_half_a_request_holds_nothing_up(wire: Wire) -> None:
    url = urlsplit(wire.url)
    held = []
    for _ in range(30):
        connection = socket.create_connection((url.hostname, url.port))
        connection.sendall(f"POST / HTTP/1.1\r\nHost: localhost\r\nAuthorization: {wire.token}\r\n".encode())
        connection.sendall(b'Content-Length: 100\r\n\r\n["SET","k"')
        held.append(connection)
    assert wire.command("PING") == "PONG"
    for connection in held:
        connection.close()


def test_after_bad_requests_everything_is_as_before(start: Callable[..., GatewayServer], wire: Wire, key: str) -> None:
    """No connection, task or object is left behind, however a request went wrong."""
    server = start(timeout=5)
    local = wire.at(server.url)
    assert server._server is not None
    state = server._server.server_state
    address = (urlsplit(local.url).hostname, urlsplit(local.url).port)
    head = f"POST / HTTP/1.1\r\nHost: localhost\r\nAuthorization: {local.token}\r\n"

    def misbehave() -> None:
        for path in ("/", "/pipeline", "/multi-exec", "/get/k", "/subscribe/c", "/%zz", "/-/faults"):
            for body in (
                b"",
                b"[",
                b"[[[",
                b"[null]",
                b'["GET"]',
                b'[["GET"],["NOPE"],["BLPOP","k",0]]',
                b"x" * 70_000,
            ):
                local("POST", path, body)
                local("POST", path, body, token="wrong")
        for half in (head, head + "Content-Length: 9\r\n\r\n[", head + "Transfer-Encoding: chunked\r\n\r\nzz\r\n"):
            with socket.create_connection(address) as connection:
                connection.sendall(half.encode())
        with socket.create_connection(address) as connection:
            line = f"GET /subscribe/{key}?_token={quote(local.token)} HTTP/1.1\r\nHost: localhost\r\n"
            connection.sendall(f"{line}Accept: text/event-stream\r\n\r\n".encode())
            assert connection.recv(100)
        while state.connections or state.tasks:  # the suite's time-out is the limit
            pass

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    misbehave()
    before = objects()
    for _ in range(3):
        misbehave()
    assert objects() < before + 500
    assert len(server.gateway._backends[0].upstream._all) <= 5
    assert local("POST", "/multi-exec", [["SET", key, "still here"], ["GET", key]]).status == 200
