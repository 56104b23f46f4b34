"""Where a client finds its database, and that it looks no earlier than at its first call."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from typing import Any

import pytest
import upstash_redis
import upstash_redis.asyncio

import outlast
from outlast.errors import ConfigurationError
from outlast.rest import RestTransport
from outlast_worker.tcp import TcpTransport

NAMES = [
    "OUTLAST_REST_URL", "OUTLAST_REST_TOKEN", "UPSTASH_REDIS_REST_URL", "UPSTASH_REDIS_REST_TOKEN",
    "KV_REST_API_URL", "KV_REST_API_TOKEN", "OUTLAST_REDIS_URL", "REDIS_URL", "OUTLAST_NAMESPACE",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def where(client: outlast.Client | outlast.AsyncClient) -> str:
    """Which address a client would use."""
    transport: Any = client._transport
    return transport.url if hasattr(transport, "url") else type(transport).__name__


def test_the_order_of_the_environment() -> None:
    env: dict[str, str] = {"REDIS_URL": "redis://redis.example"}
    assert where(outlast.Client.from_env(env)) == "TcpTransport"
    env["OUTLAST_REDIS_URL"] = "rediss://outlast.example"
    assert where(outlast.Client.from_env(env)) == "TcpTransport"
    env |= {"KV_REST_API_URL": "https://kv.example", "KV_REST_API_TOKEN": "t"}
    assert where(outlast.Client.from_env(env)) == "https://kv.example"
    env |= {"UPSTASH_REDIS_REST_URL": "https://upstash.example", "UPSTASH_REDIS_REST_TOKEN": "t"}
    assert where(outlast.Client.from_env(env)) == "https://upstash.example"
    env |= {"OUTLAST_REST_URL": "https://outlast.example/", "OUTLAST_REST_TOKEN": " t\n"}
    assert where(outlast.Client.from_env(env)) == "https://outlast.example"
    assert where(outlast.AsyncClient.from_env(env)) == "https://outlast.example"
    assert where(outlast.Client("https://argument.example", "t", env=env)) == "https://argument.example"
    assert where(outlast.Client(redis_url="redis://argument.example", env=env)) == "TcpTransport"


def test_an_environment_with_attributes_will_do() -> None:
    """Cloudflare's env is an object; what it lacks may be missing or None."""
    env = types.SimpleNamespace(
        OUTLAST_REST_URL=None, UPSTASH_REDIS_REST_URL="https://cf.example", UPSTASH_REDIS_REST_TOKEN="t"
    )
    assert where(outlast.AsyncClient.from_env(env)) == "https://cf.example"
    assert where(outlast.Client.from_env(env)) == "https://cf.example"


def test_making_a_client_reads_nothing_and_the_first_call_does(monkeypatch: pytest.MonkeyPatch) -> None:
    client = outlast.Client()
    jobs = client.queue(outlast.Queue("q"))
    with pytest.raises(ConfigurationError, match="OUTLAST_REST_URL"):
        jobs.get("x")
    monkeypatch.setenv("OUTLAST_REST_URL", "https://late.example")
    monkeypatch.setenv("OUTLAST_REST_TOKEN", "t")
    monkeypatch.setenv("OUTLAST_NAMESPACE", "preview-7")
    assert where(client) == "https://late.example"
    assert jobs._keys.ready == "{preview-7.q}:ready"
    client.close()
    outlast.Client().close()


@pytest.mark.parametrize(
    ("env", "missing"),
    [
        ({}, "OUTLAST_REST_TOKEN"),
        ({"OUTLAST_REST_URL": "https://x.example"}, "OUTLAST_REST_TOKEN is not"),
        ({"OUTLAST_REST_TOKEN": "sEcReT"}, "OUTLAST_REST_URL is not"),
        ({"UPSTASH_REDIS_REST_URL": "https://x", "UPSTASH_REDIS_REST_TOKEN": ""}, "UPSTASH_REDIS_REST_TOKEN is not"),
        ({"KV_REST_API_TOKEN": "sEcReT", "REDIS_URL": "redis://x"}, "KV_REST_API_URL is not"),
        ({"REDIS_URL": "http://:sEcReT@x"}, "REDIS_URL starts with none"),
        ({"OUTLAST_REST_URL": "http://x.example", "OUTLAST_REST_TOKEN": "sEcReT"}, "allow_http"),
    ],
)  # fmt: skip
def test_what_is_missing_or_wrong_is_named_and_no_secret_shown(env: dict[str, str], missing: str) -> None:
    for class_ in (outlast.Client, outlast.AsyncClient):
        with pytest.raises(ConfigurationError, match=missing) as caught:
            _ = class_.from_env(env)._transport
        assert "sEcReT" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"url": "https://x.example", "redis_url": "redis://x"},
        {"url": "https://x.example", "token": "t", "transport": object()},
        {"redis_url": "redis://x", "upstash": object()},
    ],
)
def test_two_databases_are_refused_when_the_client_is_made(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="one of them"):
        outlast.Client(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"url": "https://x.example"}, "url was given without token"),
        ({"token": "t"}, "token was given without url"),
        ({"redis_url": "https://x.example", "token": "t"}, "redis_url starts with none"),
        ({"redis_url": "redis://x.example", "token": "t"}, "leave token out"),
    ],
)
def test_half_an_address_is_not_completed_from_the_environment(options: dict[str, Any], text: str) -> None:
    env = {"OUTLAST_REST_URL": "https://env.example", "OUTLAST_REST_TOKEN": "of another database"}
    with pytest.raises(ConfigurationError, match=text):
        _ = outlast.Client(**options, env=env)._transport


@pytest.mark.parametrize("url", ["redis://h", "rediss://h", "unix:///s", "redis+sentinel://h/s", "rediss+cluster://h"])
def test_a_redis_url_given_as_url_goes_over_tcp(url: str) -> None:
    for client in (outlast.Client(url), outlast.Client(redis_url=url)):
        assert isinstance(client._transport, TcpTransport)
        client.close()


@pytest.mark.parametrize(
    "rest", ["/hunter77@h:6379/0", "1/hunter77@h/0", "#hunter77@h/0", "@h/hunter77", "@h/0#hunter77"]
)
def test_a_redis_url_of_which_a_part_would_be_left_out_is_refused_without_quoting_it(rest: str) -> None:
    """redis-py would connect to database 0, of localhost where a / or # in the password ends the host."""
    with pytest.raises(ConfigurationError, match="must be percent-encoded") as caught:
        _ = outlast.Client(redis_url=f"redis://:{rest}")._transport
    assert "hunter77" not in str(caught.value)


def test_a_name_is_no_queue() -> None:
    for client in (outlast.Client(env={}), outlast.AsyncClient(env={})):
        with pytest.raises(outlast.InvalidArgumentError, match=r"queue is str; give a Queue, as in Queue\('name'\)"):
            client.queue("q")  # type: ignore[arg-type]


def test_a_transport_is_used_as_it_is_and_not_closed() -> None:
    transport = RestTransport("https://x.example", "t")
    with outlast.Client(transport=transport, namespace="n") as client:
        assert client._transport is transport
        assert client.queue(outlast.Queue("q"))._keys.name == "n.q"


def test_the_upstash_client_of_the_other_kind_is_refused() -> None:
    plain, other = upstash_redis.Redis("https://x", "t"), upstash_redis.asyncio.Redis("https://x", "t")
    with pytest.raises(ConfigurationError, match="async"):
        _ = outlast.Client(upstash=other)._transport  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="plain"):
        _ = outlast.AsyncClient(upstash=plain)._transport  # type: ignore[arg-type]
    plain.close()


def test_namespaces() -> None:
    def name(client: outlast.Client) -> str:
        return client.queue(outlast.Queue("q"))._keys.name

    assert name(outlast.Client(env={})) == "q"
    assert name(outlast.Client(env={"OUTLAST_NAMESPACE": "e"})) == "e.q"
    assert name(outlast.Client(namespace="a", env={"OUTLAST_NAMESPACE": "e"})) == "a.q"
    assert name(outlast.Client(namespace="", env={"OUTLAST_NAMESPACE": "e"})) == "q"
    with pytest.raises(outlast.InvalidArgumentError, match="namespace"):
        name(outlast.Client(namespace="a{b}", env={}))


def test_without_outlast_worker_a_redis_url_says_what_to_install() -> None:
    code = """
import sys
sys.modules["outlast_worker.tcp"] = None
import outlast
try:
    outlast.Client(env={"REDIS_URL": "redis://:sEcReT@x"}).queue(outlast.Queue("q")).get("x")
except outlast.ConfigurationError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert "pip install outlast-worker" in done.stdout
    assert "sEcReT" not in done.stdout
