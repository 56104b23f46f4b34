"""The test switches do what they say, only when asked, and only to what they were asked for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import redis

from outlast import InvalidArgumentError
from outlast_worker.gateway import Database, Faults, Gateway, GatewayConfig, GatewayServer
from outlast_worker.gateway.faults import CANNED

if TYPE_CHECKING:
    from tests.gateway.conftest import Wire


def post(wire: Wire, *command: object, timeout: float = 10, **headers: str) -> httpx.Response:
    fields = {"authorization": f"Bearer {wire.token}", **headers}
    return httpx.post(wire.url, json=list(command), headers=fields, timeout=timeout)


# --- the reply is lost -----------------------------------------------------------------------------------------


def test_drop_reply_runs_the_command_and_cuts_the_connection(wire: Wire, faults: Faults, key: str) -> None:
    rule = faults.drop_reply()
    with pytest.raises(httpx.RemoteProtocolError, match="without sending a response"):
        post(wire, "INCR", key)
    assert wire.command("GET", key) == "1"
    assert rule.fired == 1


def test_drop_reply_can_also_lose_the_request(wire: Wire, faults: Faults, key: str) -> None:
    faults.drop_reply(executed=False)
    with pytest.raises(httpx.RemoteProtocolError):
        post(wire, "INCR", key)
    assert wire.command("GET", key) is None


def test_a_switch_hits_only_its_command_and_only_each_kth_time(wire: Wire, faults: Faults, key: str) -> None:
    rule = faults.drop_reply(command="incr", every=3, times=2)
    lost = []
    for number in range(1, 10):
        wire.command("GET", key)
        try:
            post(wire, "INCR", key)
        except httpx.RemoteProtocolError:
            lost.append(number)
    assert lost == [3, 6]
    assert rule.spent
    assert wire.command("GET", key) == "9"


def test_a_pipeline_counts_once_for_a_switch(wire: Wire, faults: Faults, key: str) -> None:
    rule = faults.drop_reply(command="INCR", times=None)
    with pytest.raises(ConnectionError):
        wire("POST", "/pipeline", [["GET", key], ["INCR", key], ["INCR", key]])
    assert rule.fired == 1
    faults.clear()
    assert wire.command("GET", key) == "2"


async def test_under_another_server_a_cut_is_a_failure_of_the_application(valkey_url: str) -> None:
    faults = Faults()
    config = GatewayConfig(databases=[Database(redis_url=valkey_url, token="t")], faults=faults)
    gateway = Gateway(config)
    faults.drop_reply()
    transport = httpx.ASGITransport(gateway)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        with pytest.raises(ConnectionResetError):
            await client.post("/", json=["PING"], headers={"authorization": "t"})
        assert (await client.post("/", json=["PING"], headers={"authorization": "t"})).json() == {"result": "PONG"}
    await gateway.aclose()


# --- the reply is late -----------------------------------------------------------------------------------------


def test_silence_never_answers(wire: Wire, faults: Faults, raw: redis.Redis, key: str) -> None:
    faults.silence()
    with pytest.raises(httpx.ReadTimeout):
        post(wire, "INCR", key, timeout=0.2)
    assert raw.get(key) is None
    rule = faults.silence(executed=True)
    with pytest.raises(httpx.ReadTimeout):
        post(wire, "INCR", key, timeout=0.2)
    rule.wait()
    assert raw.get(key) == b"1"


def test_delay_holds_a_command_back_and_others_pass(wire: Wire, faults: Faults, raw: redis.Redis, key: str) -> None:
    rule = faults.delay(0.3, command="INCR")
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(post(wire, "INCR", key)))
    started = time.monotonic()
    thread.start()
    rule.wait()
    assert raw.get(key) is None
    assert wire.command("PING") == "PONG"
    thread.join()
    assert time.monotonic() - started >= 0.3
    assert answers[0].json() == {"result": 1}


def test_delay_after_execution_holds_only_the_answer_back(
    wire: Wire, faults: Faults, raw: redis.Redis, key: str
) -> None:
    rule = faults.delay(30, command="INCR", executed=True)
    with pytest.raises(httpx.ReadTimeout):
        post(wire, "INCR", key, timeout=0.2)
    rule.wait()
    assert raw.get(key) == b"1"


def test_trickle_sends_the_whole_answer_in_single_bytes(wire: Wire, faults: Faults) -> None:
    faults.trickle(0.001)
    with httpx.stream("POST", wire.url, json=["ECHO", "hello"], headers={"authorization": wire.token}) as response:
        parts = list(response.iter_raw())
    assert b"".join(parts) == b'{"result":"hello"}'
    assert len(parts) > 3


def test_a_waiting_rule_can_be_awaited(faults: Faults) -> None:
    rule = faults.drop_reply()
    with pytest.raises(TimeoutError, match=r"drop_reply fired 0 times in 0\.01 s, not 1"):
        rule.wait(timeout=0.01)


def test_closing_the_gateway_ends_silences_and_delays(start: Callable[..., GatewayServer], wire: Wire) -> None:
    faults = Faults()
    server = start(faults=faults)
    held = [faults.silence(), faults.delay(60)]
    errors: list[Exception] = []

    def ask() -> None:
        try:
            post(wire.at(server.url), "PING", timeout=30)
        except httpx.TransportError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in held]
    for thread, rule in zip(threads, held, strict=True):
        thread.start()
        rule.wait()
        assert rule.fired == 1
    started = time.monotonic()
    server.__exit__()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started < 5
    assert len(errors) >= 1


# --- the reply is another one ----------------------------------------------------------------------------------


def test_a_canned_reply_is_sent_to_the_byte_and_nothing_runs(wire: Wire, faults: Faults, key: str) -> None:
    faults.reply(418, {"X-Kind": "tea pot", "retry-after": "7"}, b"\x00\xffshort")
    response = post(wire, "INCR", key)
    assert (response.status_code, response.content) == (418, b"\x00\xffshort")
    assert (response.headers["x-kind"], response.headers["retry-after"]) == ("tea pot", "7")
    assert "upstash-sync-token" not in response.headers
    assert wire.command("GET", key) is None


@pytest.mark.parametrize("name", [name for name, reply in CANNED.items() if not reply.get("cut")])
def test_every_ready_made_reply_can_be_had(wire: Wire, faults: Faults, name: str) -> None:
    faults.canned(name)
    response = httpx.post(wire.url, json=["PING"], headers={"authorization": wire.token}, timeout=20)
    assert response.status_code == CANNED[name]["status"]
    assert len(response.content) == max(len(CANNED[name]["body"]), CANNED[name].get("size", 0))
    assert post(wire, "PING").json() == {"result": "PONG"}


def test_the_ready_made_replies_are_what_their_names_say(wire: Wire, faults: Faults) -> None:
    def canned(name: str) -> httpx.Response:
        faults.canned(name)
        return post(wire, "PING", timeout=20)

    assert canned("html_502").text.startswith("<html>")
    assert canned("quota").json()["error"].startswith("ERR max requests limit exceeded. Limit: 500000, Usage: 500000.")
    assert (canned("rate_limited").status_code, canned("rate_limited").headers["retry-after"]) == (429, "1")
    assert (canned("unavailable").status_code, canned("unavailable").headers["retry-after"]) == (503, "1")
    assert canned("redirect").headers["location"] == "https://elsewhere.invalid/"
    assert len(canned("huge").json()["result"]) > 49_000_000
    with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
        canned("cut_json").json()
    with pytest.raises(httpx.RemoteProtocolError, match="peer closed connection"):
        canned("cut_connection")


@pytest.mark.parametrize("text", ["LOADING Valkey is loading", "BUSY script", "READONLY You can't", "OOM command", "x"])
def test_an_error_takes_the_place_of_commands_not_of_the_request(
    wire: Wire, faults: Faults, key: str, text: str
) -> None:
    faults.error(text, times=2, command="INCR")
    answer = wire("POST", "/pipeline", [["INCR", key], ["GET", key], ["INCR", key], ["INCR", key]])
    assert answer.json == [{"error": text}, {"result": None}, {"error": text}, {"result": 1}]
    faults.error(text)
    answer = wire("POST", "/", ["GET", key])
    assert (answer.status, answer.json) == (400, {"error": text})
    faults.error(text)
    assert wire("POST", "/multi-exec", [["INCR", key], ["INCR", key]]).json == {"error": text}
    assert wire.command("GET", key) == "1"


def test_a_noscript_burst_hits_evalsha_and_not_eval(wire: Wire, faults: Faults) -> None:
    sha = wire.command("SCRIPT", "LOAD", "return 'ran'")
    faults.noscript(times=2)
    assert [wire.error("EVALSHA", sha, 0) for _ in range(2)] == ["NOSCRIPT No matching script. Please use EVAL."] * 2
    assert wire.command("EVAL", "return 'ran'", 0) == "ran"
    assert wire.command("EVALSHA", sha, 0) == "ran"


# --- a replica that lags ---------------------------------------------------------------------------------------


def test_reads_are_stale_unless_the_sync_token_of_the_write_is_shown(wire: Wire, faults: Faults, key: str) -> None:
    wire.command("SET", key, "old")
    wire.command("XADD", key + "s", "1-1", "f", "v")
    rule = faults.replica_lag()
    assert wire.command("GET", key) == "old"
    written = wire("POST", "/", ["SET", key, "new"]).headers["upstash-sync-token"]
    wire.command("XADD", key + "s", "2-1", "f", "v")
    stale = wire("POST", "/", ["GET", key])
    assert stale.json == {"result": "old"}
    assert int(stale.headers["upstash-sync-token"]) < int(written)
    assert wire.command("GET", key, Upstash_Sync_Token=stale.headers["upstash-sync-token"]) == "old"
    assert wire.command("GET", key, Upstash_Sync_Token=written) == "new"
    assert wire.command("XLEN", key + "s") == 1
    assert wire("POST", "/pipeline", [["GET", key], ["XLEN", key + "s"]]).json == [{"result": "old"}, {"result": 1}]
    assert wire("POST", "/multi-exec", [["GET", key]]).json == [
        {"result": "new"}
    ]  # the primary's, as is all that writes
    assert wire.command("EVAL", "return redis.call('GET', KEYS[1])", 1, key) == "new"
    assert wire.command("EVAL_RO", "return redis.call('GET', KEYS[1])", 1, key) == "old"
    assert rule.fired >= 5
    faults.clear()
    assert wire.command("GET", key) == "new"


def test_keys_can_lag_each_on_its_own(wire: Wire, faults: Faults, key: str) -> None:
    faults.replica_lag(f"{key}:events*")
    wire("POST", "/pipeline", [["GET", key]])
    wire("POST", "/pipeline", [["SET", f"{key}:job", "done"], ["SET", f"{key}:events", "done"]])
    assert wire.command("GET", f"{key}:job") == "done"
    assert wire.command("GET", f"{key}:events") is None


def test_the_copy_keeps_times_to_live_and_is_gone_afterwards(
    wire: Wire, faults: Faults, raw: redis.Redis, key: str
) -> None:
    raw.set(key, "v", ex=100)
    faults.replica_lag()
    assert 0 < wire.command("TTL", key) <= 100
    faults.clear()
    wire.command("GET", key)
    assert raw.info("keyspace").get("db15") is None


def test_somebody_elses_data_is_not_overwritten_by_the_copy(
    wire: Wire, faults: Faults, valkey_url: str, key: str
) -> None:
    with redis.Redis.from_url(f"{valkey_url}/15") as last:
        last.set("precious", "data")
        faults.replica_lag()
        answer = wire("POST", "/", ["GET", key])
        assert (answer.status, "database 15 of the server, which is not empty" in answer.json["error"]) == (503, True)
        assert last.get("precious") == b"data"
        last.flushdb()
    faults.clear()


# --- arming ----------------------------------------------------------------------------------------------------


def test_switches_can_be_armed_listed_and_cleared_over_http(wire: Wire, key: str) -> None:
    wishes: list[dict[str, Any]] = [
        {"action": "error", "text": "LOADING soon", "command": "GET", "times": 2},
        {"action": "canned", "name": "quota", "command": "SET"},
        {"action": "reply", "status": 503, "headers": {"retry-after": "2"}, "body": "later", "command": "DEL"},
    ]
    for wish in wishes:
        assert wire("POST", "/-/faults", wish).status == 200
    assert wire.error("GET", key) == "LOADING soon"
    assert "max requests limit exceeded" in wire.error("SET", key, "v")
    assert wire("POST", "/", ["DEL", key]).body == b"later"
    listed = wire("GET", "/-/faults").json["faults"]
    assert listed[0] == {"action": "error", "command": "GET", "times": 2, "every": 1, "fired": 1}
    assert wire("DELETE", "/-/faults").json == {"faults": []}
    assert wire.command("GET", key) is None


@pytest.mark.parametrize(
    "wish",
    [
        b"",
        b"[]",
        b"not json",
        b"[" * 100_000,
        {},
        {"action": "arm"},
        {"action": "_arm"},
        {"action": "clear"},
        {"action": "delay"},
        {"action": "delay", "seconds": "long"},
        {"action": "delay", "seconds": 1, "times": 0},
        {"action": "drop_reply", "every": "k"},
        {"action": "drop_reply", "bogus": 1},
        {"action": "canned", "name": "nothing"},
        {"action": "reply", "headers": ["a"]},
        {"action": "reply", "headers": {"a": 1}},
        {"action": "reply", "headers": {"a\r\nb": "c"}},
        {"action": "reply", "status": 99},
        {"action": "reply", "body": 5},
        {"action": "error", "text": None},
    ],
)
def test_a_wish_that_makes_no_sense_is_refused_and_arms_nothing(wire: Wire, wish: object) -> None:
    answer = wire("POST", "/-/faults", wish)
    assert answer.status == 400
    assert answer.json["error"]
    assert wire("GET", "/-/faults").json == {"faults": []}


def test_only_the_standard_token_reaches_the_switches(wire: Wire) -> None:
    for token, status in ((None, 401), ("wrong", 401), (wire.readonly, 400)):
        answer = wire("POST", "/-/faults", {"action": "silence"}, token=token)
        assert answer.status == status
    assert wire("GET", "/-/faults").json == {"faults": []}


def test_a_gateway_without_faults_has_no_such_path(start: Callable[..., GatewayServer], wire: Wire) -> None:
    plain = wire.at(start().url)
    for path in ("/-/faults", "/-/billed"):
        assert plain("GET", path).json["error"].startswith("ERR Command is not available: '-'")
        assert plain("DELETE", path).status == 405


def test_switches_of_the_wrong_kind_are_refused_in_process_too() -> None:
    for arm in (
        lambda: Faults().canned("nothing"),
        lambda: Faults().delay("long"),  # type: ignore[arg-type]
        lambda: Faults().drop_reply(every=0),
        lambda: Faults().drop_reply(times=0),
    ):
        with pytest.raises(InvalidArgumentError):
            arm()


async def test_many_requests_at_once_are_hit_exactly_as_often_as_armed(wire: Wire, faults: Faults, key: str) -> None:
    rule = faults.drop_reply(times=7, command="INCR")
    async with httpx.AsyncClient(headers={"authorization": wire.token}) as client:

        async def ask() -> bool:
            try:
                await client.post(wire.url, json=["INCR", key])
            except httpx.RemoteProtocolError:
                return False
            return True

        answered = await asyncio.gather(*[ask() for _ in range(30)])
    assert answered.count(False) == rule.fired == 7
    assert wire.command("GET", key) == "30"
