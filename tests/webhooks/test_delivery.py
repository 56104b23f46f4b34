"""Attempts of deliveries: what goes over the wire, to whom, and what becomes of each answer."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from datetime import datetime
from typing import Any

import openai
import pytest
import trustme
from tests.webhooks.conftest import SECRET, Deliverer
from tests.webhooks.receiver import Receiver, receiver

from outlast import ConfigurationError, RetryJobError, TerminalJobError
from outlast_worker import Worker
from outlast_worker.webhooks import Delivery, Webhooks, new_secret
from outlast_worker.webhooks.delivery import SCHEDULE

webhooks = Webhooks([SECRET], allow=["127.0.0.0/8"])


# -- the message -----------------------------------------------------------------------------------------------------


async def test_the_message_is_thin_signed_and_verifiable(hooked: Receiver, deliver: Deliverer) -> None:
    at = 1_764_460_800_123
    assert await deliver(webhooks, hooked.url + "?tenant=7", at=at, status="failed") == {"status": 204}
    [message] = hooked.got
    assert message.path == "/hook?tenant=7"
    assert message.verified(SECRET) == {
        "type": "job.failed",
        "timestamp": "2025-11-30T00:00:00.123Z",
        "data": {"id": "job-1", "queue": deliver.queue.name, "status": "failed"},
    }
    openai.OpenAI(api_key="x", webhook_secret=SECRET).webhooks.verify_signature(message.body, message.headers)
    assert message.headers["host"] == f"127.0.0.1:{hooked.port}"
    assert message.headers["content-type"] == "application/json"
    assert message.headers["user-agent"].startswith("outlast-webhooks/")
    assert abs(int(message.headers["webhook-timestamp"]) - time.time()) < 60
    assert len(message.body) < 20_000


async def test_the_id_is_the_same_over_attempts_and_no_others(hooked: Receiver, deliver: Deliverer) -> None:
    hooked.script = [500]
    with pytest.raises(RetryJobError):
        await deliver(webhooks, hooked.url)
    await deliver(webhooks, hooked.url, attempt=2)
    await deliver(webhooks, hooked.url, delivery="1-2")
    await deliver(webhooks, hooked.url, id="job-2")
    await deliver(webhooks, hooked.url, queue="another")
    first, second, *others = [message.headers["webhook-id"] for message in hooked.got]
    assert first == second
    assert len({first, *others}) == 4
    assert all("." not in id and id.isascii() for id in (first, *others))


async def test_each_receiver_may_have_secrets_of_its_own(hooked: Receiver, deliver: Deliverer) -> None:
    theirs = {"alice": new_secret(), "bob": new_secret()}

    def secrets(delivery: Delivery) -> list[str]:
        assert delivery.owner is not None
        return [theirs[delivery.owner], SECRET]

    await deliver(Webhooks(secrets, allow=["127.0.0.0/8"]), hooked.url, owner="bob")
    hooked.got[0].verified(theirs["bob"])
    hooked.got[0].verified(SECRET)
    with pytest.raises(Exception, match="No matching signature"):
        hooked.got[0].verified(theirs["alice"])


@pytest.mark.parametrize("found", [[], None, SECRET], ids=["none", "nothing", "a text"])
async def test_nothing_is_sent_unsigned(hooked: Receiver, deliver: Deliverer, found: Any) -> None:
    with pytest.raises(TerminalJobError, match="gave no list with a secret") as refused:
        await deliver(Webhooks(lambda _: found, allow=["127.0.0.0/8"]), hooked.url)
    assert SECRET not in str(refused.value)
    assert hooked.got == []


# -- what becomes of an answer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
async def test_2xx_is_delivered(hooked: Receiver, deliver: Deliverer, status: int) -> None:
    hooked.script = [status]
    assert await deliver(webhooks, hooked.url) == {"status": status}


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 406, 413, 422, 451, 499])
async def test_4xx_is_final(hooked: Receiver, deliver: Deliverer, status: int) -> None:
    hooked.script = [status]
    with pytest.raises(TerminalJobError, match=f"127.0.0.1 answered {status}"):
        await deliver(webhooks, hooked.url)


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504, 301, 302, 307, 308])
async def test_what_may_pass_is_tried_again_and_redirects_are_not_followed(
    hooked: Receiver, deliver: Deliverer, status: int
) -> None:
    async with receiver() as elsewhere:
        hooked.script = [(status, {"location": elsewhere.url})]
        with pytest.raises(RetryJobError, match=f"answered {status}"):
            await deliver(webhooks, hooked.url)
        assert elsewhere.connections == 0
    assert len(hooked.got) == 1


async def test_pauses_grow_as_the_specification_has_them_and_end(hooked: Receiver, deliver: Deliverer) -> None:
    hooked.script = [500] * 99
    for attempt, pause in enumerate(SCHEDULE, 1):
        with pytest.raises(RetryJobError) as again:
            await deliver(webhooks, hooked.url, attempt=attempt)
        assert again.value.retry_after is not None
        assert pause <= again.value.retry_after <= pause * 1.1
    with pytest.raises(TerminalJobError, match="given up after 10 attempts"):
        await deliver(webhooks, hooked.url, attempt=len(SCHEDULE) + 1)
    assert sum(SCHEDULE) > 3 * 86_400 - 3600


@pytest.mark.parametrize(
    ("told", "least", "most"), [("120", 120, 133), ("1", 5, 6), ("9999999", 86_400, 95_100), ("x", 5, 6)]
)
async def test_retry_after_makes_a_pause_longer_never_shorter(
    hooked: Receiver, deliver: Deliverer, told: str, least: float, most: float
) -> None:
    hooked.script = [(429, {"retry-after": told})]
    with pytest.raises(RetryJobError) as again:
        await deliver(webhooks, hooked.url)
    assert again.value.retry_after is not None
    assert least <= again.value.retry_after <= most


async def test_410_disables_the_url_and_only_it(hooked: Receiver, deliver: Deliverer) -> None:
    hooked.script = [410]
    with pytest.raises(TerminalJobError, match="disables"):
        await deliver(webhooks, hooked.url)
    with pytest.raises(TerminalJobError, match="answered 410"):
        await deliver(webhooks, hooked.url, delivery="1-2")
    assert len(hooked.got) == 1
    await deliver(webhooks, hooked.url + "/other", delivery="1-3")
    # An operator puts a delivery back: it is sent, and once it is accepted the URL is in use again.
    hooked.script = [503]
    with pytest.raises(RetryJobError):
        await deliver(webhooks, hooked.url, delivery="1-2", attempt=1, starts=2)
    with pytest.raises(TerminalJobError):
        await deliver(webhooks, hooked.url, delivery="1-4")
    await deliver(webhooks, hooked.url, delivery="1-2", attempt=2, starts=3)
    await deliver(webhooks, hooked.url, delivery="1-4")


async def test_neither_slow_headers_nor_an_endless_body_hold_a_delivery_up(
    hooked: Receiver, deliver: Deliverer
) -> None:
    quick = Webhooks([SECRET], allow=["127.0.0.0/8"], timeout=0.3)
    hooked.script = ["slow headers", "endless body"]
    began = time.monotonic()
    with pytest.raises(RetryJobError, match=r"within 0\.3 s"):
        await deliver(quick, hooked.url)
    assert await deliver(quick, hooked.url) == {"status": 200}
    assert time.monotonic() - began < 5


async def test_nobody_there(deliver: Deliverer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(RetryJobError, match=r"connection to 127\.0\.0\.1 failed"):
        await deliver(webhooks, f"http://127.0.0.1:{port}/")


async def test_errors_name_the_host_and_no_more_of_the_url(hooked: Receiver, deliver: Deliverer) -> None:
    hooked.script = [404, 500]
    for _ in range(2):
        with pytest.raises((TerminalJobError, RetryJobError)) as refused:
            await deliver(webhooks, hooked.url + "/s3cret?token=s3cret")
        assert "s3cret" not in str(refused.value)
        assert "job 'job-1'" in str(refused.value)


# -- where it goes -----------------------------------------------------------------------------------------------------


async def test_this_machine_is_refused_by_default_without_a_connection(hooked: Receiver, deliver: Deliverer) -> None:
    with pytest.raises(TerminalJobError, match="not public"):
        await deliver(Webhooks([SECRET]), hooked.url)
    assert hooked.connections == 0


async def test_a_list_of_hosts_is_the_only_one_served(hooked: Receiver, deliver: Deliverer) -> None:
    only = Webhooks([SECRET], hosts=["hooks.example.com"], allow=["127.0.0.0/8"])
    with pytest.raises(TerminalJobError, match="none of the hosts"):
        await deliver(only, hooked.url)
    assert hooked.connections == 0


class Dns:
    """Answers for every name, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        real = asyncio.base_events.BaseEventLoop.getaddrinfo

        async def getaddrinfo(loop: Any, host: Any, port: Any, **options: Any) -> Any:
            if host in ("127.0.0.1", b"127.0.0.1"):  # the connection itself
                return await real(loop, host, port, **options)
            self.asked.append(host)
            answer = self.answers.pop(0)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answer]

        monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", getaddrinfo)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def server_side(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names).configure_cert(context)
    return context


def client_side(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def test_tls_goes_to_the_checked_address_under_the_name_of_the_url(
    monkeypatch: pytest.MonkeyPatch, authority: trustme.CA, deliver: Deliverer
) -> None:
    """Resolved once, connected to that address; SNI, certificate and Host are the name's."""
    dns = Dns(monkeypatch, ["127.0.0.1"])
    async with receiver(server_side(authority, "hooks.example.com")) as hooked:
        served = Webhooks([SECRET], allow=["127.0.0.0/8"], tls=client_side(authority))
        await deliver(served, f"https://hooks.example.com:{hooked.port}/")
        assert dns.asked == ["hooks.example.com"]
        assert hooked.server_names == ["hooks.example.com"]
        assert hooked.got[0].headers["host"] == f"hooks.example.com:{hooked.port}"


async def test_a_certificate_of_another_name_or_authority_is_refused(
    monkeypatch: pytest.MonkeyPatch, authority: trustme.CA, deliver: Deliverer
) -> None:
    Dns(monkeypatch, ["127.0.0.1"], ["127.0.0.1"])
    async with receiver(server_side(authority, "other.example.com")) as hooked:
        for tls in (client_side(authority), None):
            served = Webhooks([SECRET], allow=["127.0.0.0/8"], tls=tls)
            with pytest.raises(RetryJobError, match="ConnectError"):
                await deliver(served, f"https://hooks.example.com:{hooked.port}/")
        assert hooked.got == []


async def test_a_name_that_moves_to_a_private_address_is_caught_at_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch, hooked: Receiver, deliver: Deliverer
) -> None:
    dns = Dns(monkeypatch, ["127.0.0.1"], ["127.0.0.1", "10.0.0.1"], ["169.254.169.254"])
    hooked.script = [500]
    url = f"http://localhost:{hooked.port}/"
    with pytest.raises(RetryJobError):
        await deliver(webhooks, url)
    for attempt in (2, 3):
        with pytest.raises(TerminalJobError, match="not public"):
            await deliver(webhooks, url, attempt=attempt)
    assert dns.asked == ["localhost"] * 3  # once for each attempt
    assert hooked.connections == 1


async def test_the_next_address_is_tried_when_the_first_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, hooked: Receiver, deliver: Deliverer
) -> None:
    Dns(monkeypatch, ["127.0.0.9", "127.0.0.1"])
    real = asyncio.base_events.BaseEventLoop.getaddrinfo

    async def getaddrinfo(loop: Any, host: Any, port: Any, **options: Any) -> Any:
        if host in ("127.0.0.9", b"127.0.0.9"):
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.9", port))]
        return await real(loop, host, port, **options)

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", getaddrinfo)
    assert await deliver(webhooks, f"http://localhost:{hooked.port}/") == {"status": 204}


async def test_proxies_of_the_environment_are_not_used(
    monkeypatch: pytest.MonkeyPatch, hooked: Receiver, deliver: Deliverer
) -> None:
    """They resolve names themselves, past every check."""
    async with receiver() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        await deliver(webhooks, hooked.url)
        assert (len(hooked.got), proxy.connections) == (1, 0)


async def test_no_connection_is_kept_for_the_next_message(hooked: Receiver, deliver: Deliverer) -> None:
    """It could carry it to an address that was checked for another host."""
    for number in range(3):
        await deliver(webhooks, hooked.url, delivery=f"1-{number}")
    assert hooked.connections == 3


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigurationError):
        Webhooks([SECRET], schedule=[1.0] * 99)
    for bad in (
        {"timeout": 0},
        {"schedule": [-1]},
        {"allow": ["nowhere"]},
        {"allow": "10.0.0.0/8"},
        {"hosts": "a.example"},
    ):
        with pytest.raises(ValueError, match=r"timeout|schedule|allow|hosts is str; give a list"):
            Webhooks([SECRET], **bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="queue is str; give a Queue"):
        Webhooks([SECRET]).serve(Worker(), "q")  # type: ignore[arg-type]


def test_the_time_in_a_message_is_utc() -> None:
    from outlast_worker.webhooks.delivery import message

    sent = json.loads(message(Delivery(id="a", queue="q", status="completed", at=0, url=""), None))
    assert datetime.fromisoformat(sent["timestamp"]).timestamp() == 0
