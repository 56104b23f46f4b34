"""What a transport is: it sends Calls and knows nothing of jobs. And how a server's refusal becomes an error.

There are four: `rest.RestTransport` and `rest.AsyncRestTransport` (HTTP), `upstash.UpstashTransport` and its async twin
(through a caller's own client), and in outlast-worker `tcp.TcpTransport` and `tcp.AsyncTcpTransport`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from .errors import AuthError, OutlastError, QuotaExceededError, ServerError, StoreFullError, TransportError
from .protocol.calls import Call, Plan

__all__ = [
    "TRANSIENT",
    "AsyncTransport",
    "Transport",
    "adrive",
    "code_of",
    "drive",
    "is_transient",
    "outcome_of",
    "server_error",
]

T = TypeVar("T")


class Transport(Protocol):
    """Sends calls, one after another."""

    @property
    def blocking(self) -> bool:
        """Whether a read may wait on the server (TCP), so that watching needs no polling."""
        ...

    @property
    def sync_token(self) -> str | None:
        """Upstash's read-your-writes token after the latest write, where there is one."""
        ...

    def send(self, call: Call[T], *, block: float | None = None) -> T:
        """Send one call. `block`: seconds that the server may take to answer it, on a connection of its own."""
        ...

    def send_many(self, calls: Sequence[Call[Any]], *, outcomes: bool = False) -> list[Any]:
        """Send independent calls in one round trip. The first refusal is raised after all replies were read.

        With `outcomes` refusals stand among the answers instead; only a TransportError is raised.
        """
        ...

    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """The same for coroutines."""

    @property
    def blocking(self) -> bool: ...

    @property
    def sync_token(self) -> str | None: ...

    async def send(self, call: Call[T], *, block: float | None = None) -> T: ...

    async def send_many(self, calls: Sequence[Call[Any]], *, outcomes: bool = False) -> list[Any]: ...

    async def aclose(self) -> None: ...


TRANSIENT = frozenset({"LOADING", "BUSY", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN"})
"""First words of refusals that pass by themselves: the command did not run, and is sent again after a pause."""

_AUTH = frozenset({"WRONGPASS", "NOAUTH", "NOPERM"})


def is_transient(error: OutlastError) -> bool:
    """Whether asking again can help: nobody answered, or the server was not ready to."""
    return isinstance(error, TransportError) or (isinstance(error, ServerError) and error.code in TRANSIENT)


# Redis before 7 reports what a command inside a script was refused for behind words of its own.
_IN_SCRIPT = re.compile(r"(?:ERR )?Error running script \(call to \w+\): (?:@user_script: ?\d+: )+-([A-Z]+) ")


def code_of(message: str) -> str:
    """The word that says what a server's message is about."""
    if "running script" in message and (inside := _IN_SCRIPT.match(message)) is not None:
        return inside[1]
    if message.startswith("ERR ACL failure in script"):
        return "NOPERM"
    return message.partition(" ")[0].removesuffix(":")


def server_error(message: str) -> ServerError:
    """The error that a server's message stands for. Only one word decides: the rest differs between servers."""
    message = message.partition(", with args beginning")[0]  # ours: ids, keys, perhaps a payload
    code = code_of(message)
    if code in _AUTH:
        hint = " (is this Upstash's read-only token?)" if code == "NOPERM" else ""
        return AuthError(message + hint, code=code)
    if code == "OOM" or "capacity quota exceeded" in message:
        return StoreFullError(message, code=code)
    if "max requests limit exceeded" in message:
        return QuotaExceededError(message, code=code)
    return ServerError(message, code=code)


def outcome_of(call: Call[T], reply: Any) -> T | OutlastError:
    """The answer, or what the refusal stands for."""
    if isinstance(reply, OutlastError):
        return reply
    try:
        return call.decode(reply)
    except OutlastError as error:
        return error


def drive(transport: Transport, plan: Plan[T]) -> T:
    """Run a plan to its end."""
    answers: list[Any] | None = None
    while True:
        try:
            calls = plan.send(answers) if answers is not None else next(plan)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        answers = transport.send_many(calls)


async def adrive(transport: AsyncTransport, plan: Plan[T]) -> T:
    """Run a plan to its end."""
    answers: list[Any] | None = None
    while True:
        try:
            calls = plan.send(answers) if answers is not None else next(plan)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        answers = await transport.send_many(calls)
