"""The raw protocol, to the byte: requests in every form, and the exact answers."""

from __future__ import annotations

import base64
import json
import socket
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import pytest

if TYPE_CHECKING:
    from tests.gateway.conftest import Wire

NOT_AVAILABLE = (
    "ERR Command is not available: '{}'. See https://upstash.com/docs/redis/overall/rediscompatibility for details"
)
SPECIAL = 'ERR Command "{}" is not allowed in REST or it has a special context path'


def result(body: bytes) -> object:
    return json.loads(body)["result"]


# --- one command, every way to send it -------------------------------------------------------------------------


def test_a_command_in_the_body_is_answered_as_one_json_object_without_spaces(wire: Wire, key: str) -> None:
    answer = wire("POST", "/", ["SET", key, "v", "EX", 100])
    assert (answer.status, answer.body) == (200, b'{"result":"OK"}')
    assert answer.headers["content-type"] == "application/json; charset=utf-8"
    assert answer.headers["access-control-allow-credentials"] == "true"
    assert wire("POST", "/", ["GET", key]).body == b'{"result":"v"}'
    assert 0 < wire.command("TTL", key) <= 100


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
def test_a_command_in_the_path_works_with_every_method(wire: Wire, key: str, method: str) -> None:
    assert wire(method, f"/set/{key}/v/EX/100").body == b'{"result":"OK"}'
    assert wire(method, f"/get/{key}").body == b'{"result":"v"}'


def test_head_sends_the_headers_of_get_and_no_body(wire: Wire, key: str) -> None:
    wire.command("SET", key, "four")
    answer = wire("HEAD", f"/get/{key}")
    assert (answer.status, answer.body, answer.headers["content-length"]) == (200, b"", "17")


def test_segments_are_decoded_one_by_one_and_slashes_collapse(wire: Wire, key: str) -> None:
    assert wire("GET", f"//set///{key}/a%2Fb%20c+d%25%00%FF/").body == b'{"result":"OK"}'
    encoded = wire.command("GET", key, Upstash_Encoding="base64")
    assert base64.b64decode(encoded) == b"a/b c+d%\x00\xff"


def test_the_body_is_the_last_argument_and_query_options_follow_it(wire: Wire, key: str) -> None:
    assert wire("POST", f"/set/{key}?EX=100&_token={quote(wire.token)}&GET", b"\x00\xffvalue", token=None).status == 200
    assert base64.b64decode(wire.command("GET", key, Upstash_Encoding="base64")) == b"\x00\xffvalue"
    assert 0 < wire.command("TTL", key) <= 100


def test_query_options_of_a_get_follow_the_path(wire: Wire, key: str) -> None:
    assert wire("GET", f"/set/{key}/one%20two?EX=100").body == b'{"result":"OK"}'
    assert 0 < wire.command("TTL", key) <= 100
    assert wire("GET", f"/set/{key}/three?NX").body == b'{"result":null}'


def test_an_empty_body_adds_no_argument(wire: Wire, key: str) -> None:
    assert wire("POST", f"/set/{key}/v", b"").body == b'{"result":"OK"}'


def test_publish_is_an_ordinary_path_command(wire: Wire, key: str) -> None:
    assert wire("POST", f"/publish/{key}/hello").body == b'{"result":0}'


def test_the_content_type_does_not_matter(wire: Wire, key: str) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1"):
        assert wire("POST", "/", ["ECHO", "é"], content_type=kind).body == '{"result":"é"}'.encode()


def test_the_absolute_form_of_a_proxy_request_is_understood(wire: Wire, key: str) -> None:
    assert wire("GET", f"{wire.url}/set/{key}/v").body == b'{"result":"OK"}'


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("1", "1"),
        ("-7", "-7"),
        ("1.0", "1"),
        ("1.50", "1.5"),
        ("1e3", "1000"),
        ("1E+21", "1000000000000000000000"),
        ("1e-7", "0.0000001"),
        ("-0.0", "0"),
        ("9007199254740993", "9007199254740993"),
        ("18446744073709551617", "18446744073709551617"),
        ("true", "true"),
        ("false", "false"),
        ('"\\ud83d\\ude00"', "😀"),
        ('"\\ud83d"', "\ufffd"),
        ('"\\u0000"', "\0"),
        ('""', ""),
    ],
)
def test_json_scalars_become_plain_text(wire: Wire, text: str, argument: str) -> None:
    answer = wire("POST", "/", f'["ECHO", {text}]'.encode())
    assert result(answer.body) == argument


def test_invalid_utf8_in_the_body_becomes_the_replacement_character(wire: Wire) -> None:
    assert result(wire("POST", "/", b'["ECHO","a\xffb"]').body) == "a\ufffdb"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "EOF"),
        (b"  \n", "EOF"),
        (b'{"a":1}', "expected JSON array"),
        (b'"GET"', "expected JSON array"),
        (b"GET key", "expected JSON array"),
        (b"[]", "ERR empty command"),
        (b'["GET",null]', "ERR null args are not supported"),
        (b"[null]", "ERR null args are not supported"),
        (b'["GET",["k"]]', 'ERR unsupported arg type: "[": json.Delim'),
        (b'["GET",{"k":1}]', 'ERR unsupported arg type: "{": json.Delim'),
        (b'["GET","k"', "ERR failed to parse command: the body is not valid JSON"),
        (b'["GET",NaN]', "ERR failed to parse command: invalid JSON value NaN"),
        (b'["GET",1e999]', "ERR failed to parse command: a number is out of range"),
        (b"[" * 100_000, 'ERR unsupported arg type: "[": json.Delim'),
    ],
)
def test_a_body_that_is_no_command_is_refused(wire: Wire, body: bytes, text: str) -> None:
    answer = wire("POST", "/", body)
    assert (answer.status, answer.json) == (400, {"error": text})


def test_other_methods_are_405_with_an_empty_body(wire: Wire) -> None:
    for method in ("DELETE", "PATCH", "TRACE", "FOO"):
        answer = wire(method, "/get/k")
        assert (answer.status, answer.body) == (405, b"")


def test_options_is_200_for_any_origin_and_needs_no_token(wire: Wire) -> None:
    headers = {"access_control_request_headers": "authorization, upstash-encoding"}
    answer = wire("OPTIONS", "/pipeline", token=None, origin="https://app.example", **headers)
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert answer.headers["access-control-allow-headers"] == "authorization, upstash-encoding"
    assert answer.headers["access-control-allow-credentials"] == "true"


# --- replies ---------------------------------------------------------------------------------------------------


def test_replies_keep_the_flat_shapes_of_resp2(wire: Wire, key: str) -> None:
    wire.command("HSET", key, "f", "1", "g", "2")
    assert wire.command("HGETALL", key) == ["f", "1", "g", "2"]
    assert wire.command("ZADD", key + "z", 1.5, "m") == 1
    assert wire.command("ZSCORE", key + "z", "m") == "1.5"
    assert wire.command("XADD", key + "x", "1-1", "f", "v") == "1-1"
    assert wire.command("XREAD", "STREAMS", key + "x", "0") == [[key + "x", [["1-1", ["f", "v"]]]]]
    assert wire.command("XREAD", "STREAMS", key + "x", "1-1") is None
    assert wire.command("XRANGE", key + "x", "2", "+") == []
    assert wire.command("GET", key + "none") is None
    assert wire.command("TYPE", key) == "hash"


def test_lua_replies_are_converted_as_redis_converts_them(wire: Wire) -> None:
    script = "return {3.9, false, true, redis.status_reply('OK'), 'x', {'nested', {1}}}"
    assert wire.command("EVAL", script, 0) == [3, None, 1, "OK", "x", ["nested", [1]]]


def test_integers_beyond_double_precision_are_plain_json_numbers(wire: Wire, key: str) -> None:
    wire.command("SET", key, "9007199254740992")
    assert wire("POST", "/", ["INCR", key]).body == b'{"result":9007199254740993}'


def test_invalid_utf8_in_a_value_becomes_the_replacement_character(wire: Wire, key: str) -> None:
    wire("POST", f"/set/{key}", b"a\xffb")
    assert wire.command("GET", key) == "a\ufffdb"


@pytest.mark.parametrize(
    ("command", "body"),
    [
        (["SET", "base64", "OK"], b'{"result":"OK"}'),  # the status OK is left alone
        (["GET", "base64"], b'{"result":"T0s="}'),  # the value "OK" is not the status
        (["PING"], b'{"result":"UE9ORw=="}'),
        (["TYPE", "base64"], b'{"result":"c3RyaW5n"}'),
        (["GET", "base64-none"], b'{"result":null}'),
        (["STRLEN", "base64"], b'{"result":2}'),
        (["MGET", "base64", "base64-none"], b'{"result":["T0s=",null]}'),
        (["EVAL", "return {redis.status_reply('OK'),{'a',1}}", 0], b'{"result":["T0s=",["YQ==",1]]}'),
        (["EVAL", "return redis.status_reply('OK')", 0], b'{"result":"OK"}'),
    ],
)
def test_base64_encodes_every_string_but_the_status_ok(wire: Wire, command: list[object], body: bytes) -> None:
    wire.command("SET", "base64", "OK")
    assert wire("POST", "/", command, Upstash_Encoding="base64").body == body


def test_base64_never_encodes_errors(wire: Wire) -> None:
    answer = wire("POST", "/pipeline", [["SET", "b64e", "v"], ["INCR", "b64e"]], Upstash_Encoding="base64")
    assert answer.body == b'[{"result":"OK"},{"error":"ERR value is not an int or out of range"}]'


@pytest.mark.parametrize(
    ("command", "body"),
    [
        (["SET", "resp2", "a\r\nb"], b"+OK\r\n"),
        (["GET", "resp2"], b"$4\r\na\r\nb\r\n"),
        (["GET", "resp2-none"], b"$-1\r\n"),
        (["STRLEN", "resp2"], b":4\r\n"),
        (["XREAD", "STREAMS", "resp2-none", "0"], b"*-1\r\n"),
        (["XRANGE", "resp2-none", "-", "+"], b"*0\r\n"),
        (["MGET", "resp2", "resp2-none"], b"*2\r\n$4\r\na\r\nb\r\n$-1\r\n"),
    ],
)
def test_the_resp2_format_is_what_the_server_sent(wire: Wire, command: list[object], body: bytes) -> None:
    wire.command("SET", "resp2", "a\r\nb")
    answer = wire("POST", "/", command, Upstash_Response_Format="resp2")
    assert (answer.status, answer.body) == (200, body)
    assert answer.headers["content-type"] == "application/octet-stream"


def test_the_resp2_format_of_errors_and_pipelines(wire: Wire, key: str) -> None:
    answer = wire("POST", "/", ["NOPE"], Upstash_Response_Format="resp2")
    assert (answer.status, answer.body) == (400, f"-{NOT_AVAILABLE.format('NOPE')}\r\n".encode())
    answer = wire("POST", "/pipeline", [["SET", key, "v"], ["INCR", key]], Upstash_Response_Format="resp2")
    assert (answer.status, answer.body) == (200, b"*2\r\n+OK\r\n-ERR value is not an int or out of range\r\n")


def test_transactions_answer_in_json_whatever_the_format(wire: Wire, key: str) -> None:
    answer = wire("POST", "/multi-exec", [["SET", key, "v"]], Upstash_Response_Format="resp2")
    assert answer.body == b'[{"result":"OK"}]'


def test_unknown_formats_and_resp2_with_base64_are_refused(wire: Wire) -> None:
    assert wire("POST", "/", ["PING"], Upstash_Response_Format="resp3").status == 400
    answer = wire("POST", "/", ["PING"], Upstash_Response_Format="resp2", Upstash_Encoding="base64")
    assert answer.status == 400
    assert "error" in answer.json


# --- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["AUTH", "MULTI", "EXEC", "DISCARD", "WATCH", "UNWATCH", "HELLO", "RESET", "SUBSCRIBE", "PSUBSCRIBE", "CLIENT"],
)
def test_commands_of_a_connection_have_no_place_in_rest(wire: Wire, name: str) -> None:
    assert wire.error(name, "x") == SPECIAL.format(name)
    answer = wire("GET", f"/{name.lower()}/x")
    assert (answer.status, answer.json["error"]) == (400, SPECIAL.format(name))


@pytest.mark.parametrize(
    "command",
    [
        ["BLPOP", "k", 0],
        ["brpop", "k", 0],
        ["BLMOVE", "a", "b", "LEFT", "LEFT", 0],
        ["BZPOPMIN", "k", 0],
        ["BLMPOP", 0, 1, "k", "LEFT"],
        ["XREAD", "BLOCK", 0, "STREAMS", "s", "$"],
        ["XREAD", "COUNT", 1, "block", 0, "STREAMS", "s", "$"],
        ["XREADGROUP", "GROUP", "g", "c", "BLOCK", 0, "STREAMS", "s", ">"],
    ],
)
def test_commands_that_would_wait_are_refused_and_not_held_open(wire: Wire, command: list[object]) -> None:
    assert wire.error(*command) == SPECIAL.format(str(command[0]).upper())
    assert wire("POST", "/multi-exec", [command]).status == 400


def test_a_stream_or_group_may_be_called_block(wire: Wire, key: str) -> None:
    wire.command("XADD", "BLOCK", "*", "f", "v")
    assert wire.command("XREAD", "STREAMS", "BLOCK", "$") is None
    wire.command("XGROUP", "CREATE", "BLOCK", "BLOCK", "$")
    assert wire.command("XREADGROUP", "GROUP", "BLOCK", "BLOCK", "STREAMS", "BLOCK", ">") is None
    wire.command("DEL", "BLOCK")


@pytest.mark.parametrize("command", [["FOO"], ["foo", "bar"], ["JSON.GET", "k"], ["x" * 500], ["GE T", "k"]])
def test_unknown_commands_are_not_available(wire: Wire, command: list[str]) -> None:
    assert wire.error(*command) == NOT_AVAILABLE.format(command[0].upper()[:128])


def test_errors_of_the_server_are_400_with_its_code_first(wire: Wire, key: str) -> None:
    wire.command("SET", key, "v")
    assert wire.error("LPUSH", key, 1) == "WRONGTYPE Operation against a key holding the wrong kind of value"
    assert wire.error("INCR", key) == "ERR value is not an int or out of range"
    assert wire.error("GET") == "ERR wrong number of arguments for 'get' command"
    assert wire.error("SET", key, "v", "BOGUS") == "ERR syntax error"


def test_a_missing_script_is_told_in_upstashs_words(wire: Wire) -> None:
    assert wire.error("EVALSHA", "0" * 40, 0) == "NOSCRIPT No matching script. Please use EVAL."
    answer = wire("POST", "/pipeline", [["EVALSHA", "0" * 40, 0], ["PING"]])
    assert answer.json == [{"error": "NOSCRIPT No matching script. Please use EVAL."}, {"result": "PONG"}]


def test_an_error_inside_a_script_loses_its_code_as_on_upstash(wire: Wire, key: str) -> None:
    wire.command("SET", key, "v")
    text = wire.error("EVAL", "\nreturn redis.call('LPUSH', KEYS[1], 1)", 1, key)
    inner = "WRONGTYPE Operation against a key holding the wrong kind of value"
    assert text == f"ERR Error running script: @user_script:2: {inner}\nstack traceback:\n\t[G]: in function 'call'"
    assert wire.error("EVAL", "return redis.error_reply('MINE not raised')", 0) == "MINE not raised"


def test_keys_over_32_kb_are_refused_and_values_are_not(wire: Wire, key: str) -> None:
    long = "k" * 32769
    assert wire.error("SET", long, "v") == "ERR max key size exceeded. Limit: 32768 bytes, Actual: 32769 bytes"
    assert wire.error("MSET", "a", long, long, "v").endswith("Actual: 32769 bytes")
    assert wire.command("SET", key, long) == "OK"


# --- small answers that the gateway gives itself ----------------------------------------------------------------


def test_select_takes_only_the_tokens_own_database_and_touches_nobody_elses_connection(wire: Wire, key: str) -> None:
    wire.command("SET", key, "here")
    assert wire.command("SELECT", 0) == "OK"
    assert wire.error("SELECT", 1) == "ERR DB index is out of range"
    assert [wire.command("GET", key) for _ in range(8)] == ["here"] * 8
    assert wire.command("COMMAND") == []


def test_quit_is_ok_and_closes_nothing(wire: Wire) -> None:
    answer = wire("POST", "/pipeline", [["QUIT"], ["PING"]])
    assert answer.body == b'[{"result":"OK"},{"result":"PONG"}]'


# --- the sync token --------------------------------------------------------------------------------------------


def test_every_answer_carries_a_sync_token_and_each_write_moves_it(wire: Wire, key: str) -> None:
    def token(path: str, body: object) -> int:
        return int(wire("POST", path, body, Upstash_Sync_Token="").headers["upstash-sync-token"])

    seen = [token("/", ["PING"])]
    for path, body, moves in [
        ("/", ["SET", key, "v"], True),
        ("/", ["GET", key], False),
        ("/pipeline", [["SET", key, "v"], ["SET", key, "w"]], True),
        ("/multi-exec", [["SET", key, "x"]], True),
        ("/", ["EVAL", "return 1", 0], True),
        ("/", ["EVAL_RO", "return 1", 0], False),
        ("/", ["SCRIPT", "LOAD", "return 1"], False),
        ("/", ["LPUSH", key, "fails"], False),
        ("/", ["XGROUP", "CREATE", key + "s", "g", "$", "MKSTREAM"], True),
    ]:
        seen.append(token(path, body))
        assert (seen[-1] > seen[-2]) is moves, body


def test_raw_bytes_that_are_no_http_get_no_500(wire: Wire) -> None:
    address = (urlsplit(wire.url).hostname, urlsplit(wire.url).port)
    for message in (
        b"\x16\x03\x01\x00\xa5nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    ):
        with socket.create_connection(address, timeout=5) as connection:
            connection.sendall(message)
            reply = connection.recv(65536)
        assert b" 500 " not in reply.split(b"\r\n")[0]
