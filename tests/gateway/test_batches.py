"""Pipelines keep their order, transactions their atomicity, and each slot its own answer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from outlast_worker.gateway import GatewayServer

if TYPE_CHECKING:
    from tests.gateway.conftest import Wire

UNKNOWN = (
    "ERR Command is not available: 'NOPE'. See https://upstash.com/docs/redis/overall/rediscompatibility for details"
)


@pytest.mark.parametrize("path", ["/pipeline", "/multi-exec", "//pipeline", "/multi-exec/", "/PIPELINE"])
def test_each_slot_has_its_own_result_or_error(wire: Wire, key: str, path: str) -> None:
    answer = wire("POST", path, [["SET", key, "v"], ["SETEX", key, 13, "w"], ["INCR", key], ["GET", key]])
    assert answer.status == 200
    assert answer.body == (
        b'[{"result":"OK"},{"result":"OK"},{"error":"ERR value is not an int or out of range"},{"result":"w"}]'
    )


def test_a_refused_command_of_a_pipeline_fails_only_its_slot(wire: Wire, key: str) -> None:
    commands = [["SET", key, "v"], ["NOPE"], ["BLPOP", key, 0], ["SELECT", 0], ["GET"], ["GET", key]]
    answer = wire("POST", "/pipeline", commands)
    assert answer.status == 200
    slots = [slot.get("result", slot.get("error", "")) for slot in answer.json]
    assert slots[0] == "OK"
    assert slots[1] == UNKNOWN
    assert slots[2].startswith('ERR Command "BLPOP" is not allowed in REST')
    assert slots[3:] == ["OK", "ERR wrong number of arguments for 'get' command", "v"]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (["NOPE", "x"], UNKNOWN),
        (["GET"], "ERR wrong number of arguments for 'get' command"),
        (["CONFIG", "GET", "*"], UNKNOWN.replace("NOPE", "CONFIG")),
        (["MULTI"], 'ERR Command "MULTI" is not allowed in REST or it has a special context path'),
        (["EXEC"], 'ERR Command "EXEC" is not allowed in REST or it has a special context path'),
    ],
)
def test_a_transaction_that_cannot_be_queued_is_discarded_with_the_first_reason(
    wire: Wire, key: str, bad: list[str], text: str
) -> None:
    answer = wire("POST", "/multi-exec", [["SET", key, "v"], bad, ["HGET"]])
    assert (answer.status, answer.json) == (400, {"error": text})
    assert wire.command("GET", key) is None
    assert wire("POST", "/multi-exec", [["SET", key, "v"]]).body == b'[{"result":"OK"}]'


@pytest.mark.parametrize("path", ["/pipeline", "/multi-exec"])
@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "EOF"),
        (b"{}", "expected JSON array"),
        (b"[]", "ERR empty command"),
        (b"[[]]", "ERR empty command"),
        (b'["PING"]', "expected JSON array"),
        (b'[["SET","never","set"],["GET",null]]', "ERR null args are not supported"),
        (b'[["PING"]', "ERR failed to parse command: the body is not valid JSON"),
    ],
)
def test_a_body_that_is_no_batch_is_refused_before_anything_runs(wire: Wire, path: str, body: bytes, text: str) -> None:
    answer = wire("POST", path, body)
    assert (answer.status, answer.json) == (400, {"error": text})
    assert wire.command("GET", "never") is None


def test_statuses_in_a_transaction_are_top_level_for_base64(wire: Wire, key: str) -> None:
    commands = [["SET", key, "OK"], ["GET", key], ["TYPE", key], ["MGET", key, "none"]]
    answer = wire("POST", "/multi-exec", commands, Upstash_Encoding="base64")
    assert answer.body == b'[{"result":"OK"},{"result":"T0s="},{"result":"c3RyaW5n"},{"result":["T0s=",null]}]'


def test_answers_of_the_gateway_itself_keep_their_place_in_a_transaction(wire: Wire, key: str) -> None:
    answer = wire("POST", "/multi-exec", [["SELECT", 0], ["INCR", key], ["COMMAND"], ["INCR", key]])
    assert answer.body == b'[{"result":"OK"},{"result":1},{"result":[]},{"result":2}]'
    assert wire("POST", "/multi-exec", [["SELECT", 0]]).body == b'[{"result":"OK"}]'


def test_concurrent_transactions_never_nest_and_are_never_interleaved(wire: Wire, key: str) -> None:
    def transfer(number: int) -> list[int]:
        answer = wire("POST", "/multi-exec", [["INCR", key], ["INCR", key], ["INCR", key]])
        assert answer.status == 200, answer
        return [slot["result"] for slot in answer.json]

    def disturb(number: int) -> None:
        wire("POST", "/pipeline", [["INCR", key + "x"], ["NOPE"], ["EXEC"], ["MULTI"], ["INCR", key + "x"]])

    with ThreadPoolExecutor(12) as pool:
        disturbers = [pool.submit(disturb, n) for n in range(40)]
        triples = list(pool.map(transfer, range(60)))
        for disturber in disturbers:
            disturber.result()
    assert all(b == a + 1 and c == b + 1 for a, b, c in triples)
    assert wire.command("GET", key) == "180"
    assert wire.command("GET", key + "x") == "80"


def test_concurrent_pipelines_each_get_their_own_answers(wire: Wire, key: str) -> None:
    def ask(number: int) -> bool:
        answer = wire("POST", "/pipeline", [["ECHO", f"{number}:{i}"] for i in range(50)])
        return [slot["result"] for slot in answer.json] == [f"{number}:{i}" for i in range(50)]

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(ask, range(100)))


def test_a_large_pipeline_is_one_batch(wire: Wire, key: str) -> None:
    answer = wire("POST", "/pipeline", [["INCRBY", key, n] for n in range(20_000)])
    assert len(answer.json) == 20_000
    assert answer.json[-1] == {"result": sum(range(20_000))}


# --- limits ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small(start: Callable[..., GatewayServer], wire: Wire) -> Wire:
    """A gateway whose commands and results may have 1000 bytes."""
    return wire.at(start(max_request_bytes=1000).url)


def test_a_command_over_the_limit_is_413_and_does_not_run(small: Wire, key: str) -> None:
    size = 1001 + len("SET") + len(key)
    text = f"ERR max request size exceeded. Limit: 1000, Actual: {size}"
    for answer in (small("POST", "/", ["SET", key, "x" * 1001]), small("POST", f"/set/{key}", b"x" * 1001)):
        assert (answer.status, answer.json) == (413, {"error": text})
    assert small("POST", "/multi-exec", [["SET", key, "v"], ["SET", key, "x" * 1001]]).json == {"error": text}
    assert small.command("GET", key) is None


def test_the_limit_is_of_each_command_not_of_the_pipeline(small: Wire, key: str) -> None:
    answer = small("POST", "/pipeline", [["APPEND", key, "x" * 900]] * 12 + [["SET", key, "x" * 1001], ["STRLEN", key]])
    assert answer.status == 200
    assert [slot.get("result") for slot in answer.json] == [*range(900, 12 * 900 + 1, 900), None, 12 * 900]
    assert answer.json[12]["error"].startswith("ERR max request size exceeded. Limit: 1000, Actual: ")


@pytest.mark.parametrize("path", ["/", "/pipeline", "/multi-exec"])
def test_a_result_over_the_limit_is_an_error_with_status_200(small: Wire, key: str, path: str) -> None:
    for _ in range(3):
        small.command("RPUSH", key, *["x" * 100] * 5)
    commands = [["LRANGE", key, 0, -1], ["LRANGE", key, 0, 5], ["LLEN", key]]
    answer = small("POST", path, commands[0] if path == "/" else commands)
    assert answer.status == 200
    first = answer.json if path == "/" else answer.json[0]
    assert first["error"].startswith("ERR max request size exceeded. Limit: 1000, Actual: 1")
    if path != "/":
        assert answer.json[1:] == [{"result": ["x" * 100] * 6}, {"result": 15}]


def test_a_write_whose_result_is_too_large_has_happened_and_moves_the_sync_token(small: Wire, key: str) -> None:
    small.command("RPUSH", key, *["x" * 100] * 9)
    small.command("RPUSH", key, *["x" * 100] * 9)
    before = int(small("POST", "/", ["LLEN", key]).headers["upstash-sync-token"])
    answer = small("POST", "/", ["LPOP", key, 15])
    assert answer.json["error"].startswith("ERR max request size exceeded")
    assert int(answer.headers["upstash-sync-token"]) == before + 1
    assert small.command("LLEN", key) == 3


def test_a_whole_body_that_could_not_fit_is_counted_and_dropped(small: Wire) -> None:
    answer = small("POST", "/pipeline", b" " * 20_000)
    assert (answer.status, answer.json) == (
        413,
        {"error": "ERR max request size exceeded. Limit: 16000, Actual: 20000"},
    )
