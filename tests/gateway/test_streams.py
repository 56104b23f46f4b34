"""SUBSCRIBE, PSUBSCRIBE and MONITOR as server-sent events."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import pytest
import redis

from outlast_worker.gateway import GatewayServer

if TYPE_CHECKING:
    from tests.gateway.conftest import Wire


class Listener:
    """The frames of one stream, keep-alive comments left out."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.raw = response.iter_bytes()
        self._buffer = b""

    def next(self) -> str:
        while True:
            while b"\n\n" not in self._buffer:
                self._buffer += next(self.raw)
            frame, _, self._buffer = self._buffer.partition(b"\n\n")
            if not frame.startswith(b":"):
                return frame.decode()


@contextmanager
def listen(wire: Wire, path: str, method: str = "POST", token: str = "") -> Iterator[Listener]:
    headers = {"Accept": "text/event-stream", "Authorization": f"Bearer {token or wire.token}"}
    with (
        httpx.Client(timeout=10) as client,
        client.stream(method, wire.url + path, headers=headers, content=b"[]") as r,
    ):
        yield Listener(r)


def subscribers(raw: redis.Redis, channel: str) -> int:
    return int(raw.pubsub_numsub(channel)[0][1])


def test_a_subscriber_gets_each_message_as_a_frame(wire: Wire, key: str) -> None:
    with listen(wire, f"/subscribe/{key}") as stream:
        assert stream.response.status_code == 200
        assert stream.response.headers["content-type"] == "text/event-stream"
        assert stream.response.headers["upstash-sync-token"]
        assert stream.next() == f"data: subscribe,{key},1"
        assert wire.command("PUBLISH", key, "hello, world") == 1
        assert wire("POST", f"/publish/{key}/how%20are%20you%3F").json == {"result": 1}
        wire.command("PUBLISH", key, '{"json":["é","OK"]}')
        assert stream.next() == f"data: message,{key},hello, world"
        assert stream.next() == f"data: message,{key},how are you?"
        assert stream.next() == f'data: message,{key},{{"json":["é","OK"]}}'


def test_several_channels_and_get_as_a_browser_would(wire: Wire, key: str) -> None:
    with listen(wire, f"/subscribe/{key}a/{key}b", "GET", wire.readonly) as stream:
        assert [stream.next(), stream.next()] == [f"data: subscribe,{key}a,1", f"data: subscribe,{key}b,2"]
        wire.command("PUBLISH", key + "b", "x")
        assert stream.next() == f"data: message,{key}b,x"


def test_patterns_name_the_pattern_and_the_channel(wire: Wire, key: str) -> None:
    with listen(wire, f"/psubscribe/{key}:*") as stream:
        assert stream.next() == f"data: psubscribe,{key}:*,1"
        wire.command("PUBLISH", f"{key}:1", '{"n":1}')
        assert stream.next() == f'data: pmessage,{key}:*,{key}:1,{{"n":1}}'


def test_a_line_break_in_a_message_does_not_break_the_framing(wire: Wire, key: str) -> None:
    with listen(wire, f"/subscribe/{key}") as stream:
        stream.next()
        wire.command("PUBLISH", key, "one\n\ndata: forged\r\nthree")
        wire.command("PUBLISH", key, "next")
        assert stream.next() == f"data: message,{key},one\ndata: \ndata: data: forged\ndata: three"
        assert stream.next() == f"data: message,{key},next"


def test_monitor_shows_commands_of_its_own_database_only(wire: Wire, raw: redis.Redis, key: str) -> None:
    with listen(wire, "/monitor") as stream:
        assert stream.next() == 'data: "OK"'
        wire.at(wire.url, "the token of database 3").command("SET", "elsewhere", "secret")
        wire.command("SET", key, "a b")
        seen = []
        while not seen or key not in seen[-1]:  # the gateway's own PING may come first
            seen.append(stream.next())
        assert seen[-1].startswith("data: ")
        assert seen[-1].endswith(f'] "SET" "{key}" "a b"')
        assert not any("elsewhere" in line for line in seen)


def test_a_quiet_stream_is_kept_alive_by_comments(wire: Wire, key: str) -> None:
    with listen(wire, f"/subscribe/{key}") as stream:
        assert stream.next() == f"data: subscribe,{key},1"
        received = b""
        while received.count(b": keepalive\n\n") < 2:  # this gateway sends one after 0.2 s
            received += next(stream.raw)


def test_without_the_accept_header_they_are_commands_without_a_place(wire: Wire) -> None:
    for path, name in (("/subscribe/c", "SUBSCRIBE"), ("/psubscribe/c", "PSUBSCRIBE"), ("/monitor", "MONITOR")):
        answer = wire("POST", path, b"[]")
        text = f'ERR Command "{name}" is not allowed in REST or it has a special context path'
        assert (answer.status, answer.json) == (400, {"error": text})


def test_refusals_come_as_json_and_not_as_a_stream(wire: Wire) -> None:
    accept = {"Accept": "text/event-stream"}
    assert wire("POST", "/subscribe", **accept).json["error"].startswith("ERR wrong number of arguments")
    assert wire("POST", "/subscribe/c", token="wrong", **accept).status == 401
    answer = wire("POST", "/monitor", token=wire.readonly, **accept)
    assert answer.json["error"].startswith("NOPERM")
    assert wire("HEAD", "/subscribe/c", **accept).status == 200


def test_hanging_up_ends_the_subscription(wire: Wire, raw: redis.Redis, key: str) -> None:
    with listen(wire, f"/subscribe/{key}") as stream:
        stream.next()
        assert subscribers(raw, key) == 1
    while subscribers(raw, key):  # the suite's time-out is the limit
        pass


def test_a_lost_database_ends_the_stream(wire: Wire, raw: redis.Redis, key: str) -> None:
    with listen(wire, f"/subscribe/{key}") as stream:
        stream.next()
        raw.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        with pytest.raises(StopIteration):
            stream.next()


def test_a_subscriber_that_does_not_read_makes_the_database_wait_and_not_the_gateways_memory(
    gateway: GatewayServer, wire: Wire, raw: redis.Redis, key: str
) -> None:
    url = urlsplit(wire.url)
    raw.config_set("client-output-buffer-limit", "pubsub 4mb 4mb 60")
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect((url.hostname, url.port))
        head = f"GET /subscribe/{key}?_token={wire.token.replace(' ', '%20')} HTTP/1.1\r\nHost: localhost\r\n"
        lazy.sendall(head.encode() + b"Accept: text/event-stream\r\n\r\n")
        while subscribers(raw, key) == 0:
            pass
        sent = 0
        while raw.publish(key, "x" * 10_000):  # until the database gives the subscriber up
            sent += 1
            assert sent < 20_000, "200 MB went somewhere"
    raw.config_set("client-output-buffer-limit", "pubsub 33554432 8388608 60")
    assert sent * 10_000 < 100_000_000


def test_a_stream_is_counted_as_one_command(start: Callable[..., GatewayServer], wire: Wire, key: str) -> None:
    server = start()
    with server.gateway.counting() as bill, listen(wire.at(server.url), f"/subscribe/{key}") as stream:
        stream.next()
    assert dict(bill.commands) == {"SUBSCRIBE": 1}
