"""Readers of event streams: httpx-sse, one over raw bytes, one that is naive, and a browser's reconnecting one."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
from httpx_sse import connect_sse

from .conftest import Web

ENDS = ("completed", "failed", "cancelled")


class Got(NamedTuple):
    type: str
    data: Any
    id: str
    retry: int | None = None


def sse(http: httpx.Client, url: str, cursor: str | None = None, **params: str) -> Iterator[Got]:
    """Through httpx-sse."""
    headers = {"last-event-id": cursor} if cursor else {}
    with connect_sse(http, "GET", url, headers=headers, params=params or None) as source:
        if source.response.status_code == 204:
            return
        assert source.response.status_code == 200, source.response.read()
        for event in source.iter_sse():
            assert event.data, "an event without data: a parser was misled"
            yield Got(event.event, json.loads(event.data), event.id, event.retry)


def parse(text: str) -> Iterator[Got]:
    """By the book: blocks end at blank lines, comments start with a colon."""
    for block in text.split("\n\n"):
        fields = [line.partition(": ")[::2] for line in block.split("\n") if line and not line.startswith(":")]
        values = dict(fields)
        assert len(fields) == len(values), f"a field appears twice: {block!r}"
        if "data" in values:
            retry = int(values["retry"]) if "retry" in values else None
            yield Got(values["event"], json.loads(values["data"]), values.get("id", ""), retry)


def naive(text: str) -> Iterator[Got]:
    """As a careless parser does it: at any line end that Unicode knows."""
    kind = id = ""
    for line in text.splitlines():
        if line.startswith("event: "):
            kind = line[7:]
        elif line.startswith("id: "):
            id = line[4:]
        elif line.startswith("data: "):
            yield Got(kind, json.loads(line[6:]), id)
            id = ""
        else:
            assert line == "" or line.startswith((":", "retry: ")), line


def raw(web: Web, url: str, *, idle: float = 20.0) -> str:
    """The body over a bare socket, which gives up after `idle` seconds without a byte."""
    head = f"GET {url} HTTP/1.1\r\nHost: {web.host}\r\nAccept: text/event-stream\r\nConnection: close\r\n\r\n"
    with closing(socket.create_connection(("127.0.0.1", urlsplit(web.url).port))) as connection:
        connection.settimeout(idle)
        connection.sendall(head.encode())
        data = b""
        while part := connection.recv(65536):
            data += part
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    out = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        out, body = out + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return out.decode()


class EventSource:
    """What a browser does by itself: come back after every end, with the last id, until told 204 or refused."""

    def __init__(self, http: httpx.Client, url: str, retry: float = 3.0) -> None:
        self.http = http
        self.url = url
        self.retry = retry
        self.last_id: str | None = None
        self.requests = 0
        self.closed = False
        self.got: list[Got] = []

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.closed:
            self.requests += 1
            headers = {"last-event-id": self.last_id} if self.last_id else {}
            try:
                with connect_sse(self.http, "GET", self.url, headers=headers) as source:
                    if source.response.status_code != 200:
                        self.closed = True
                        return
                    for event in source.iter_sse():
                        self.last_id = event.id or self.last_id
                        self.retry = event.retry / 1000 if event.retry is not None else self.retry
                        self.got.append(Got(event.event, json.loads(event.data), event.id))
            except httpx.TransportError:
                pass
            time.sleep(self.retry)


class Text:
    """What a page would show."""

    def __init__(self) -> None:
        self.text = ""
        self.cursor: str | None = None
        self.end: Got | None = None
        self.count = 0

    def take(self, event: Got) -> None:
        if event.id:
            self.cursor = event.id
        if event.type in ("restarted", "gap"):
            self.text = ""
        elif event.type == "chunk":
            self.text += event.data["text"]
        elif event.type == "snapshot":
            self.text = event.data["text"]
        elif event.type in ENDS:
            assert self.end is None, "two ends"
            self.end = event
        self.count += event.type not in ("state", "reconnect")
