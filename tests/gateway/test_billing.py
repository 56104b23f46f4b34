"""The bill is exact: one for a command, one for each call inside a script, nothing for what is free."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import httpx
import pytest
import redis

from outlast_worker.gateway import GatewayServer

if TYPE_CHECKING:
    from tests.gateway.conftest import Wire

THREE = "for i = 1, 3 do redis.call('INCR', KEYS[1]) end"


@pytest.fixture
def counted(start: Callable[..., GatewayServer], wire: Wire) -> Wire:
    return wire.at(start(count_billed=True).url)


@pytest.mark.parametrize(
    ("path", "body", "billed"),
    [
        ("/", ["SET", "b", "1"], 1),
        ("/", ["GET", "b"], 1),
        ("/", ["PING"], 0),
        ("/", ["INFO"], 0),
        ("/", ["CONFIG", "GET", "notify-keyspace-events"], 0),
        ("/", ["SELECT", 0], 0),
        ("/", ["TIME"], 1),
        ("/", ["LPUSH", "b", 1], 1),  # a command that fails has run
        ("/", ["GET"], 1),
        ("/", ["BLPOP", "b", 0], 0),  # what the gateway refuses itself has not
        ("/", ["EVAL", THREE, 1, "b:n"], 4),
        ("/", ["EVAL", "return 1", 0], 1),
        ("/", ["EVALSHA", "0" * 40, 0], 1),
        ("/", ["EVAL", "redis.pcall('LPUSH', KEYS[1], 1) redis.call('PING')", 1, "b"], 2),
        ("/", ["EVAL", "#!lua flags=allow-key-locking\nreturn redis.call('GET', KEYS[1])", 1, "b"], 2),
        ("/", ["SCRIPT", "LOAD", "return 1"], 1),
        ("/pipeline", [["SET", "b", "1"], ["PING"], ["EVAL", THREE, 1, "b:n"], ["GET", "b"]], 6),
        ("/multi-exec", [["SET", "b", "1"], ["GET", "b"]], 2),
        ("/multi-exec", [["EVAL", THREE, 1, "b:n"], ["GET", "b"], ["EVAL", THREE, 1, "b:n"]], 9),
    ],
)
def test_each_request_says_what_it_cost(counted: Wire, path: str, body: list[object], billed: int) -> None:
    before = counted("GET", "/-/billed").json["total"]
    assert counted("POST", path, body).headers["outlast-billed"] == str(billed)
    assert counted("GET", "/-/billed").json["total"] == before + billed


def test_a_counting_block_sums_up_by_name(gateway: GatewayServer, wire: Wire, key: str) -> None:
    with gateway.gateway.counting() as bill:
        wire.command("SET", key, "1")
        wire.command("EVAL", THREE, 1, key)
    wire.command("GET", key)
    assert (bill.total, dict(bill.commands)) == (5, {"INCR": 3, "SET": 1, "EVAL": 1})
    assert "outlast-billed" not in wire("POST", "/", ["GET", key]).headers


async def test_concurrent_requests_and_tcp_clients_of_the_same_server_do_not_blur_the_bill(
    counted: Wire, valkey_url: str, key: str
) -> None:
    done = threading.Event()

    def disturb() -> None:
        with redis.Redis.from_url(valkey_url) as other:
            while not done.is_set():
                other.eval(THREE, 1, key + ":other")
                other.execute_command("ECHO", "noise")
                other.transaction(lambda pipe: pipe.eval(THREE, 1, key + ":other"))

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        async with httpx.AsyncClient(headers={"authorization": counted.token}, timeout=30) as client:

            async def ask(number: int) -> tuple[int, int]:
                script = f"for i = 1, {number} do redis.call('INCR', KEYS[1]) end"
                path = "/multi-exec" if number % 3 == 0 else "/pipeline"
                body = [["EVAL", script, 1, key], ["GET", key]]
                response = await client.post(counted.url + path, json=body)
                return int(response.headers["outlast-billed"]), number + 2

            answers = await asyncio.gather(*[ask(number) for number in range(60)])
    finally:
        done.set()
        thread.join()
    assert [billed for billed, _ in answers] == [expected for _, expected in answers]
    assert counted("GET", "/-/billed").json["total"] == sum(expected for _, expected in answers)


def test_counting_goes_on_after_its_monitor_was_cut(counted: Wire, raw: redis.Redis, key: str) -> None:
    assert counted("POST", "/", ["EVAL", THREE, 1, key]).headers["outlast-billed"] == "4"
    for client in raw.client_list():
        if client["cmd"] == "monitor":
            raw.client_kill_filter(_id=client["id"])
    while True:  # until the gateway has noticed
        answer = counted("POST", "/", ["EVAL", THREE, 1, key])
        if answer.status == 200:
            break
        assert answer.status == 502
    assert answer.headers["outlast-billed"] == "4"


def test_only_the_standard_token_reads_the_total(counted: Wire) -> None:
    assert counted("GET", "/-/billed", token=None).status == 401
    assert counted("GET", "/-/billed", token=counted.readonly).status == 400
