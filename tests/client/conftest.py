"""Both HTTP transports behind one face: the async one runs a loop until its answer is there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from outlast.protocol import Call
from outlast.rest import AsyncRestTransport, RestTransport

URL = "https://db.example.com"
TOKEN = "t0p-secret-T0KEN"


class Rest:
    """`send` and `send_many` of either transport."""

    def __init__(self, kind: str, runner: asyncio.Runner, url: str = URL, token: str = TOKEN, **options: Any) -> None:
        self.kind = kind
        self._runner = runner
        self.transport = (RestTransport if kind == "sync" else AsyncRestTransport)(url, token, **options)

    def send(self, call: Call[Any]) -> Any:
        answer = self.transport.send(call)
        return answer if isinstance(self.transport, RestTransport) else self._runner.run(answer)

    def send_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        answer = self.transport.send_many(calls)
        return answer if isinstance(answer, list) else self._runner.run(answer)

    def close(self) -> None:
        if isinstance(self.transport, RestTransport):
            self.transport.close()
        else:
            self._runner.run(self.transport.aclose())


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_rest(kind: str) -> Iterator[Any]:
    """Makes transports of the kind under test and closes them."""
    made: list[Rest] = []
    with asyncio.Runner() as runner:

        def make(url: str = URL, token: str = TOKEN, **options: Any) -> Rest:
            made.append(Rest(kind, runner, url, token, **options))
            return made[-1]

        yield make
        for rest in made:
            rest.close()


@pytest.fixture
def rest(make_rest: Any) -> Rest:
    transport: Rest = make_rest()
    return transport
