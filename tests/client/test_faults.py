"""H-45, H-46, H-47, H-53: the four calls of a client, sync and async, against servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

import outlast
from outlast.protocol import Keys, calls
from outlast.rest import AsyncRestTransport, RestTransport
from outlast_worker.gateway import Database, Faults, GatewayConfig, GatewayServer

TOKEN = "the-token-of-the-faulty-server"


@pytest.fixture(scope="module")
def gateway(valkey_url: str) -> Iterator[GatewayServer]:
    database = Database(redis_url=valkey_url, token=TOKEN)
    with GatewayServer(GatewayConfig(databases=[database], faults=Faults())) as server:
        yield server


@pytest.fixture
def faults(gateway: GatewayServer) -> Iterator[Faults]:
    switches = gateway.gateway.config.faults
    assert switches is not None
    yield switches
    switches.clear()


class Caller:
    """enqueue, get, cancel and watch of a plain or an async client."""

    def __init__(
        self, kind: str, url: str, queue: outlast.Queue[Any, Any], runner: asyncio.Runner, **options: Any
    ) -> None:
        self._runner = runner
        if kind == "sync":
            self.client: Any = outlast.Client(url, TOKEN, **options)
        else:
            self.client = outlast.AsyncClient(url, TOKEN, **options)
        self.jobs = self.client.queue(queue)
        self.calls: dict[str, Callable[[], Any]] = {
            "enqueue": lambda: self.do(self.jobs.enqueue, "x"),
            "get": lambda: self.do(self.jobs.get, "nobody"),
            "cancel": lambda: self.do(self.jobs.cancel, "nobody"),
            "watch": lambda: self.watch("nobody"),
            "stats": lambda: self.do(self.jobs.stats),
        }

    def do(self, method: Any, *args: Any, **options: Any) -> Any:
        answer = method(*args, **options)
        return self._runner.run(answer) if asyncio.iscoroutine(answer) else answer

    def watch(self, id: str, **options: Any) -> list[Any]:
        async def collect() -> list[Any]:
            return [event async for event in self.jobs.watch(id, **options)]

        if isinstance(self.client, outlast.Client):
            return list(self.jobs.watch(id, **options))
        return self._runner.run(collect())

    def close(self) -> None:
        self.do(self.client.close if isinstance(self.client, outlast.Client) else self.client.aclose)


@pytest.fixture
def call(kind: str, gateway: GatewayServer, queue_name: str) -> Iterator[Callable[..., Caller]]:
    made: list[Caller] = []
    with asyncio.Runner() as runner:

        def make(url: str | None = None, **options: Any) -> Caller:
            made.append(Caller(kind, url or gateway.url, outlast.Queue(queue_name), runner, **options))
            return made[-1]

        yield make
        for caller in made:
            caller.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outlast.rest.backoff", lambda repeat: 0.001)


# -- H-45 -------------------------------------------------------------------------------------------------------------

CANNED = ["html_502", "cut_json", "cut_connection", "redirect", "wrong_charset", "huge", "empty", "unavailable"]


@pytest.mark.parametrize("name", [*CANNED, "html_200", "list", "dict", "error_500"])
def test_h45_every_call_raises_one_kind_of_error_under_every_kind_of_answer(
    call: Any, faults: Faults, quick: None, name: str
) -> None:
    own = {
        "html_200": (200, b"<html><h1>Hello</h1></html>"),
        "list": (200, b"[]"),
        "dict": (200, b"{}"),
        "error_500": (500, b'{"error":"ERR internal"}'),
    }
    if name in own:
        faults.reply(own[name][0], {}, own[name][1], times=None)
    else:
        faults.canned(name, times=None, headers={}) if name == "unavailable" else faults.canned(name, times=None)
    caller = call(timeout=5)
    for what, run in caller.calls.items():
        with pytest.raises(outlast.TransportError) as caught:
            run()
        assert len(str(caught.value)) < 250
        assert TOKEN not in str(caught.value)
        if what == "enqueue":
            assert caught.value.job_id
        if name != "cut_connection":
            assert caught.value.status is not None or name == "huge"


@pytest.mark.parametrize("name", ["html_502", "cut_json", "cut_connection", "wrong_charset", "empty"])
def test_h45_short_faults_are_survived_and_nothing_is_done_twice(
    call: Any, faults: Faults, quick: None, name: str
) -> None:
    caller = call()
    faults.canned(name, times=3)
    id = caller.do(caller.jobs.enqueue, "x").id
    faults.canned(name, times=3)
    assert caller.do(caller.jobs.get, id).status == "waiting"
    faults.canned(name, times=3)
    assert caller.do(caller.jobs.stats).waiting == 1
    faults.canned(name, times=3)
    assert caller.do(caller.jobs.cancel, id) is True
    faults.canned(name, times=3)
    assert [event.type for event in caller.watch(id)] == ["cancelled"]


# -- H-46 -------------------------------------------------------------------------------------------------------------


class Loopback:
    """A server that does one thing to each connection, in threads."""

    def __init__(self, behave: Callable[[socket.socket], None]) -> None:
        self.behave = behave
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._threads.append(threading.Thread(target=self._accept))
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while not self._over.is_set():
                request = b""
                while b"\r\n\r\n" not in request:
                    piece = connection.recv(65536)
                    if not piece:
                        return
                    request += piece
                head, _, body = request.partition(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                while len(body) < length:
                    body += connection.recv(65536)
                self.behave(connection)

    def trickle(self, connection: socket.socket, first: bytes) -> None:
        connection.sendall(first)
        while not self._over.wait(0.02):
            connection.sendall(b" ")

    def close(self) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    server = Loopback(lambda connection: None)
    yield server
    server.close()


def test_h46_the_limits_are_finite_by_default() -> None:
    for class_ in (RestTransport, AsyncRestTransport):
        transport = class_("https://db.example.com", TOKEN)
        assert (transport.timeout, transport.read_timeout) == (20.0, 10.0)


@pytest.mark.parametrize("how", ["silent", "trickles-the-body", "never-accepts"])
def test_h46_every_call_ends_in_time_with_the_outcome_unknown(call: Any, loopback: Loopback, how: str) -> None:
    url = loopback.url
    if how == "silent":
        loopback.behave = lambda connection: None
    elif how == "trickles-the-body":
        loopback.behave = lambda c: loopback.trickle(c, b"HTTP/1.1 200 OK\r\ncontent-length: 99999\r\n\r\n")
    with contextlib.ExitStack() as stack:
        if how == "never-accepts":
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        caller = call(url, timeout=0.5)
        for what, run in caller.calls.items():
            begin = time.monotonic()
            with pytest.raises(outlast.TransportError, match="unknown") as caught:
                run()
            assert 0.3 < time.monotonic() - begin < 3, what
            assert caught.value.maybe_applied


def test_h46_nobody_listens(call: Any, quick: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    caller = call(url)
    for run in caller.calls.values():
        with pytest.raises(outlast.TransportError, match="cannot be reached") as caught:
            run()
        assert not caught.value.maybe_applied


async def test_h46_even_trickled_headers_end_an_async_call_in_time(loopback: Loopback) -> None:
    loopback.behave = lambda connection: loopback.trickle(connection, b"HTTP/1.1 200 OK\r\nx-long: ")
    async with outlast.AsyncClient(loopback.url, TOKEN, timeout=0.5) as client:
        begin = time.monotonic()
        with pytest.raises(outlast.TransportError, match=r"timeout=0\.5"):
            await client.queue(outlast.Queue("q")).get("x")
        assert time.monotonic() - begin < 3


async def test_h46_a_cancelled_caller_is_free_at_once_and_the_client_stays_usable(loopback: Loopback) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    loopback.behave = lambda connection: loop.call_soon_threadsafe(asked.set)  # type: ignore[assignment,return-value]
    async with outlast.AsyncClient(loopback.url, TOKEN) as client:
        jobs = client.queue(outlast.Queue("q"))

        async def watch() -> None:
            async for _ in jobs.watch("x"):
                pass

        for start in (lambda: jobs.enqueue("x"), lambda: jobs.get("x"), lambda: jobs.cancel("x"), watch):
            asked.clear()
            task = asyncio.ensure_future(start())
            await asyncio.wait_for(asked.wait(), 10)
            begin = time.monotonic()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert time.monotonic() - begin < 1
        row = b'{"result":[%s]}' % b",".join([b"null"] * len(calls._RECORD))
        loopback.behave = lambda c: c.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(row), row))
        assert await jobs.get("x") is None


# -- H-47 -------------------------------------------------------------------------------------------------------------

PASSING = ["LOADING Redis is loading", "BUSY a script runs", "READONLY You can't write", "MASTERDOWN Link is down"]


@pytest.mark.parametrize("text", [*PASSING, "NOSCRIPT No matching script. Please use EVAL."])
def test_h47_three_refusals_that_pass_are_not_seen_by_callers(
    call: Any, faults: Faults, quick: None, text: str
) -> None:
    caller = call()
    times = 1 if text.startswith("NOSCRIPT") else 3
    command = "EVALSHA" if times == 1 else None
    faults.error(text, times=times, command=command)
    id = caller.do(caller.jobs.enqueue, "x").id
    if times == 3:
        faults.error(text, times=times)
        assert caller.do(caller.jobs.get, id).status == "waiting"
        faults.error(text, times=times)
        assert caller.do(caller.jobs.stats).waiting == 1
    faults.error(text, times=times, command=command)
    assert caller.do(caller.jobs.cancel, id) is True
    if times == 3:
        faults.error(text, times=times)
    assert [event.type for event in caller.watch(id)] == ["cancelled"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", outlast.StoreFullError),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", outlast.ServerError),
        ("NOAUTH Authentication required.", outlast.AuthError),
        ("NOPERM this user has no permissions to run the 'evalsha' command", outlast.AuthError),
    ],
)
def test_h47_the_others_are_raised_under_their_name_and_not_repeated(
    call: Any, faults: Faults, text: str, error: type[outlast.ServerError]
) -> None:
    caller = call()
    for what, run in caller.calls.items():
        rule = faults.error(text, times=None)
        with pytest.raises(error) as caught:
            run()
        assert caught.value.code == text.split()[0]
        expected = {"cancel": 2 if error is outlast.StoreFullError else 1, "stats": 15}
        assert rule.fired == expected.get(what, 1)
        faults.clear()


def test_h47_a_wrong_token_is_an_auth_error_that_does_not_show_it(kind: str, gateway: GatewayServer) -> None:
    with asyncio.Runner() as runner:
        client: Any = (outlast.Client if kind == "sync" else outlast.AsyncClient)(gateway.url, "wr0ng-t0ken")
        jobs = client.queue(outlast.Queue("q"))
        with pytest.raises(outlast.AuthError) as caught:
            runner.run(jobs.get("x")) if kind == "async" else jobs.get("x")
        assert "wr0ng" not in str(caught.value)
        runner.run(client.aclose()) if kind == "async" else client.close()


# -- H-53 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [0.1, 0.4])
def test_h53_an_idle_watcher_over_tcp_keeps_one_connection_and_asks_rarely(
    valkey_url: str, queue_name: str, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch, block: float
) -> None:
    monkeypatch.setattr("outlast._base.BLOCK", block)

    def counts() -> tuple[int, int]:
        stats: Any = raw.info("commandstats")
        server: Any = raw.info("stats")
        return sum(stats.get(name, {"calls": 0})["calls"] for name in ("cmdstat_xread", "cmdstat_hmget")), server[
            "total_connections_received"
        ]

    with outlast.Client(valkey_url) as client:
        jobs = client.queue(outlast.Queue(queue_name))
        id = jobs.enqueue("x").id
        before = counts()
        assert list(jobs.watch(id, timeout=1.2)) == []
        after = counts()
        # For each block one read and one look at the record.
        assert after[0] - before[0] <= 2 * 1.2 / block + 6
        assert after[1] - before[1] <= 1


def test_h69_wait_over_http_sends_one_command_a_poll_however_fast_chunks_flow(
    gateway: GatewayServer, queue_name: str, raw: redis.Redis
) -> None:
    sent: list[str] = []

    class Counting(RestTransport):
        def send(self, call: Any, *, block: float | None = None) -> Any:
            sent.append(call.args[0])
            return super().send(call, block=block)

    transport = Counting(gateway.url, TOKEN)
    jobs = outlast.Client(transport=transport).queue(outlast.Queue(queue_name))
    id = jobs.enqueue("x").id
    sent.clear()
    over = threading.Event()

    def chunks() -> None:
        while not over.wait(0.005):
            raw.xadd(Keys(queue_name).events(id), {"t": "chunk", "d": "x"})

    thread = threading.Thread(target=chunks)
    thread.start()
    with pytest.raises(TimeoutError):
        jobs.wait(id, timeout=1.5)
    over.set()
    thread.join()
    transport.close()
    assert set(sent) == {"HMGET"}
    assert 3 <= len(sent) <= 8  # after 0.15, 0.4, 0.7, 1.2 s and at the end
