"""H-71: the token and what jobs hold are in no message, repr, log or pickle."""

from __future__ import annotations

import asyncio
import logging
import pickle
import traceback
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import pytest
import upstash_redis
from pydantic import BaseModel

import outlast
from outlast.rest import AsyncRestTransport, RestTransport
from outlast.upstash import UpstashTransport
from outlast_worker.gateway import Database, Faults, GatewayConfig, GatewayServer
from outlast_worker.tcp import AsyncTcpTransport, TcpTransport

TOKEN = "AbCd-secret-token-1234567890"
PROMPT = "the-very-private-prompt"
SHAPES = [TOKEN, PROMPT, b64encode(TOKEN.encode()).decode(), b64encode(PROMPT.encode()).decode()[:-2]]


class Prompt(BaseModel):
    prompt: str
    n: int


@pytest.fixture
def gateway(valkey_url: str) -> Iterator[GatewayServer]:
    config = GatewayConfig(databases=[Database(redis_url=valkey_url, token=TOKEN)], faults=Faults())
    with GatewayServer(config) as server:
        yield server


def leaks(text: str) -> list[str]:
    return [shape for shape in SHAPES if shape in text]


def told(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error) + str(vars(error))


def test_h71_nothing_is_told_by_errors_reprs_or_the_logs_of_ours_and_of_the_http_library(
    gateway: GatewayServer,
    queue_name: str,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outlast.rest.backoff", lambda repeat: 0.001)
    caplog.set_level(logging.DEBUG)
    faults = gateway.gateway.config.faults
    assert faults is not None
    queue = outlast.Queue(queue_name, payload=Prompt, result=str, max_payload=1000)
    client: Any = (outlast.Client if kind == "sync" else outlast.AsyncClient)(gateway.url, TOKEN, timeout=2)
    jobs = client.queue(queue)
    said: list[str] = []

    with asyncio.Runner() as runner:

        def do(call: Any, *args: Any, **options: Any) -> Any:
            answer = call(*args, **options)
            return runner.run(answer) if asyncio.iscoroutine(answer) else answer

        def fails(call: Any, *args: Any, **options: Any) -> None:
            with pytest.raises(outlast.OutlastError) as caught:
                do(call, *args, **options)
            said.append(told(caught.value))

        good = Prompt(prompt=PROMPT, n=1)
        made = do(jobs.enqueue, good, id="x", idempotency_key="k")
        job = do(jobs.get, made.id)
        assert job.payload.prompt == PROMPT
        said += [repr(thing) for thing in (made, job, client, jobs, client._transport, queue, jobs._order(
            good, id=None, idempotency_key=None, idempotency_ttl=None, priority=0, delay=0, max_attempts=None,
            timeout=None, expires=None, deadline=None, result_ttl=None, owner=None,
        ))]  # fmt: skip
        fails(jobs.enqueue, good, id="x")
        fails(jobs.enqueue, Prompt(prompt=PROMPT, n=2), idempotency_key="k")
        fails(jobs.enqueue, {"prompt": PROMPT, "n": PROMPT})
        fails(jobs.enqueue, Prompt(prompt=PROMPT * 100, n=1))
        for name in ("html_502", "cut_json", "cut_connection", "redirect", "quota", "wrong_charset"):
            faults.canned(name, times=9)
            fails(jobs.enqueue, good)
            faults.clear()
        faults.reply(200, {}, b'{"result":"' + b64encode(PROMPT.encode())[:-2], times=9)
        fails(jobs.enqueue, good)
        faults.clear()
        faults.reply(401, {}, b'{"error":"WRONGPASS bad token %s"}' % TOKEN.encode())
        fails(jobs.enqueue, good)
        faults.error(f"ERR unknown command 'EVALSHA', with args beginning with: '{PROMPT}'", command="EVALSHA")
        fails(jobs.enqueue, good)
        do(client.close if kind == "sync" else client.aclose)
    said += [record.getMessage() + str(record.__dict__) for record in caplog.records]
    assert any("HTTP Request: POST" in line for line in said), "httpx's own log was looked at"
    assert [line for line in said if leaks(line)] == []


def test_h71_clients_and_transports_do_not_pickle() -> None:
    for thing in (
        outlast.Client("https://x.example", TOKEN),
        outlast.AsyncClient("https://x.example", TOKEN),
        RestTransport("https://x.example", TOKEN),
        AsyncRestTransport("https://x.example", TOKEN),
        outlast.Client("https://x.example", TOKEN).queue(outlast.Queue("q")),
        TcpTransport(f"redis://:{TOKEN}@x.example"),
        AsyncTcpTransport(f"redis://:{TOKEN}@x.example"),
    ):
        assert leaks(repr(thing)) == []
        with pytest.raises(TypeError) as caught:
            pickle.dumps(thing)
        assert leaks(told(caught.value)) == []


def test_h71_the_upstash_adapter_tells_nothing_either(gateway: GatewayServer, queue_name: str) -> None:
    redis = upstash_redis.Redis(gateway.url, TOKEN, rest_retries=0)
    transport = UpstashTransport(redis)
    jobs = outlast.Client(transport=transport).queue(outlast.Queue(queue_name))
    faults = gateway.gateway.config.faults
    assert faults is not None
    faults.error(f"ERR unknown command 'EVALSHA', with args beginning with: '{PROMPT}'", command="EVALSHA")
    with pytest.raises(outlast.ServerError) as refused:
        jobs.enqueue(PROMPT)
    assert str(refused.value) == "ERR unknown command 'EVALSHA'"
    faults.reply(200, {}, b'{"result":"' + b64encode(PROMPT.encode())[:-2])
    with pytest.raises(outlast.TransportError) as broken:
        jobs.enqueue(PROMPT)
    assert leaks(str(broken.value) + repr(broken.value) + repr(transport)) == []
    redis.close()
