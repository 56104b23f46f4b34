"""Where a webhook may go: a caller's URL must not make the worker talk to its own network.

The name is resolved once for each attempt, every address that comes out is looked at, and the connection is made to
one of exactly these: a name that answers differently the next time gains nothing.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple
from urllib.parse import urlsplit

from outlast._checks import check_webhook
from outlast.errors import InvalidArgumentError, RetryJobError, TerminalJobError

__all__ = ["Address", "Network", "Target", "resolve", "target_of"]

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_V4 = tuple(IPv4Network(net) for net in ("192.0.0.0/24", "192.88.99.0/24", "224.0.0.0/4"))
"""Not for the public to receive at, whatever this Python's is_global says: protocol assignments, relays, multicast."""
_UNICAST = IPv6Network("2000::/3")
_V6 = tuple(IPv6Network(net) for net in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"))
"""Tunnels and examples. NAT64, mapped, local and multicast addresses lie outside global unicast."""


class Target(NamedTuple):
    """A URL, taken apart. `host` is ASCII, as it goes into DNS, certificates and the Host header."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == {"http": 80, "https": 443}[self.scheme] else f"{host}:{self.port}"


def target_of(url: str) -> Target:
    """Raises TerminalJobError for what is no webhook's address; it names the host at most, for a path may be secret."""
    try:
        parts = urlsplit(check_webhook(url))
    except InvalidArgumentError as error:
        raise TerminalJobError(str(error)) from None
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    assert parts.hostname is not None
    return Target(parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80), path)


def public(address: Address) -> bool:
    """Whether the address is one of the public internet's."""
    if isinstance(address, IPv4Address):
        return address.is_global and not any(address in net for net in _V4)
    return address in _UNICAST and address.is_global and not any(address in net for net in _V6)


async def resolve(target: Target, allowed: Sequence[Network]) -> list[Address]:
    """The addresses of the target, each of them public or in `allowed`.

    Raises TerminalJobError if one is not, and RetryJobError if the name has none just now.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RetryJobError(f"{target.host} has no address ({error.strerror or type(error).__name__})") from None
    except UnicodeError:
        raise TerminalJobError("the webhook's host is no name that DNS can hold") from None
    addresses = list(dict.fromkeys(ip_address(str(entry[4][0])) for entry in found))
    for address in addresses:
        plain = address.ipv4_mapped if isinstance(address, IPv6Address) and address.ipv4_mapped else address
        if not public(address) and not any(plain in net for net in allowed):
            raise TerminalJobError(f"{target.host} is at an address that is not public; webhooks go to public ones")
        if target.scheme == "http" and not plain.is_loopback:
            raise TerminalJobError(f"{target.host} is not this machine, so its webhook must be https")
    return addresses


def networks(allow: Sequence[str]) -> list[Network]:
    try:
        return [ip_network(net) for net in allow]
    except ValueError as error:
        raise InvalidArgumentError(f"allow={list(allow)!r} is not a list of networks such as 10.1.0.0/16") from error
