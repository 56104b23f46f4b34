"""A database that is further away: ``python -m benchmarks.growth.link PORT SECONDS`` prints the port to use instead.

Half of the round trip passes before what a client wrote goes on, and half before the reply does; meanwhile more may
follow, as on a real line. `tests.faults.links.Proxy` holds one reply up until the one before has gone. A process of its
own, on a loop that waits with select: asyncio's usual one rounds each wait up to a whole millisecond.
"""

from __future__ import annotations

import asyncio
import selectors
import sys
from collections import deque
from typing import cast


class End(asyncio.Protocol):
    """One end of a connection. What it receives leaves at the other end, later."""

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._loop = asyncio.get_running_loop()
        self._due: deque[tuple[float, bytes]] = deque()
        self.other: End | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if not self._due:
            self._loop.call_later(self._delay, self._pass_on)
        self._due.append((self._loop.time() + self._delay, data))

    def _pass_on(self) -> None:
        if self.other is None or self.other.transport is None:
            return  # what the client says before its way is open leaves when it is
        now = self._loop.time()
        while self._due and self._due[0][0] <= now:
            self.other.transport.write(self._due.popleft()[1])
        if self._due:
            self._loop.call_at(self._due[0][0], self._pass_on)

    def opened(self) -> None:
        if self._due:
            self._pass_on()

    def connection_lost(self, _: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


async def serve(port: int, delay: float) -> None:
    loop = asyncio.get_running_loop()
    opening: set[asyncio.Task[None]] = set()

    def client() -> End:
        near = End(delay / 2)

        async def connect() -> None:
            _, far = await loop.create_connection(lambda: End(delay / 2), "127.0.0.1", port)
            near.other, far.other = far, near
            near.opened()

        task = loop.create_task(connect())
        opening.add(task)
        task.add_done_callback(opening.discard)
        return near

    server = await loop.create_server(client, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(serve(int(sys.argv[1]), float(sys.argv[2])))
