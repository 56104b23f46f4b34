"""Where a webhook may go."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from typing import Any

import pytest

from outlast import InvalidArgumentError, RetryJobError, TerminalJobError
from outlast._checks import check_webhook
from outlast_worker.webhooks.addresses import networks, public, resolve, target_of

PUBLIC = ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "2a00:1450:4001:830::200e"]
NOT_PUBLIC = [
    "0.0.0.0",
    "10.0.0.1",
    "100.64.0.1",  # carrier-grade NAT
    "127.0.0.1",
    "127.255.255.254",
    "169.254.169.254",  # the metadata of clouds
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.8",  # is_global says yes in Python 3.11
    "192.0.0.170",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "203.0.113.5",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::ffff:127.0.0.1",
    "::ffff:8.8.8.8",  # mapped: no address that a name should have
    "::7f00:1",
    "64:ff9b::7f00:1",  # NAT64
    "64:ff9b:1::a00:1",
    "100::1",
    "2001::1",  # Teredo
    "2001:10::1",
    "2001:db8::1",
    "2002:7f00:1::",  # 6to4 of 127.0.0.1
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fec0::1",
    "ff02::1",
]


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address: str) -> None:
    assert public(ip_address(address))


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not public(ip_address(address))


GOOD = [
    "https://example.com",
    "https://example.com/hook?key=1",
    "https://EXAMPLE.com:8443/",
    "https://xn--bcher-kva.example/h%C3%B6k",
    "https://[2606:4700:4700::1111]/",
    "https://1.1.1.1/",
    "http://localhost:8000/hook",
    "http://127.0.0.1:1/",
    "http://[::1]:9/",
]
BAD = [
    5,
    "",
    "example.com/hook",
    "ftp://example.com/",
    "http://example.com/",
    "http://10.0.0.1/",
    "http://localhost.example.com/",
    "http://127.0.0.1.example.com/",
    "https:///hook",
    "https://user:secret@example.com/",
    "https://user@example.com/",
    "https://example.com/#part",
    "https://example.com:0/",
    "https://example.com:99999/",
    "https://exa mple.com/",
    "https://example.com/a b",
    "https://example.com/\r\nhost: evil",
    "https://example.com\\@evil.example/",
    "https://%65vil.example/",
    "https://bücher.example/",
    "https://[::1/",
    "https://[fe80::1%25eth0]/",
    "https://example.com/" + "x" * 2048,
    "javascript:alert(1)",
    "file:///etc/passwd",
]


@pytest.mark.parametrize("url", GOOD)
def test_urls_that_are_taken(url: str) -> None:
    assert check_webhook(url) == url
    target_of(url)


@pytest.mark.parametrize("url", BAD)
def test_urls_that_are_refused_before_anything_is_sent(url: Any) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        check_webhook(url)
    assert "secret" not in str(refused.value)
    if isinstance(url, str):  # another producer wrote it onto the record
        with pytest.raises(TerminalJobError):
            target_of(url)


def test_what_goes_into_the_host_header() -> None:
    assert target_of("https://EXAMPLE.com:443").authority == "example.com"
    assert target_of("https://example.com:8443/a?b=c")[1:] == ("example.com", 8443, "/a?b=c")
    assert target_of("https://[2606:4700:4700::1111]:8443/").authority == "[2606:4700:4700::1111]:8443"


@pytest.mark.parametrize(
    "url",
    [
        "https://localhost/",
        "https://127.0.0.1/",
        "https://127.1/",
        "https://2130706433/",
        "https://0x7f.1/",
        "https://[::1]/",
        "https://0/",
    ],
)
async def test_every_spelling_of_this_machine_is_refused(url: str) -> None:
    with pytest.raises((TerminalJobError, RetryJobError)) as refused:  # a resolver may not know some of them
        await resolve(target_of(url), [])
    assert "not public" in str(refused.value) or "no address" in str(refused.value)


def named(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    async def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 443)) for address in addresses]

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", lambda self, *a, **k: getaddrinfo())


async def test_one_address_that_is_not_public_refuses_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "1.1.1.1", "10.0.0.1")
    with pytest.raises(TerminalJobError, match="not public"):
        await resolve(target_of("https://example.com/"), [])


async def test_networks_can_be_allowed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "10.1.2.3", "1.1.1.1")
    target = target_of("https://hooks.example.com/")
    assert [str(address) for address in await resolve(target, networks(["10.1.0.0/16"]))] == ["10.1.2.3", "1.1.1.1"]
    with pytest.raises(TerminalJobError):
        await resolve(target, networks(["10.2.0.0/16"]))
    with pytest.raises(InvalidArgumentError):
        networks(["10.1.0.0/33"])


async def test_plain_http_never_leaves_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """localhost is only a name: what counts is where it leads."""
    named(monkeypatch, "1.1.1.1")
    with pytest.raises(TerminalJobError, match="https"):
        await resolve(target_of("http://localhost/"), networks(["0.0.0.0/0"]))


async def test_a_name_without_an_address_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", fails)
    with pytest.raises(RetryJobError, match=r"example\.com has no address"):
        await resolve(target_of("https://example.com/secret"), [])
