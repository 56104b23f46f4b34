"""`_reads` for coroutines: a task reads for all while somebody waits."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import TYPE_CHECKING, Any

from ._reads import BLOCK, LINGER, SLACK, Board, ReadsBase, Waiter
from .errors import OutlastError, TransportError
from .protocol.tail import Entry, Tail, read, streams

if TYPE_CHECKING:
    from .transport import AsyncTransport

__all__ = ["AsyncReads"]

JOIN = 0.003
"""Seconds that a new stream waits for others before the read under way is broken off for its sake."""
GRID = 0.25
"""Seconds to which waits of a second and more are rounded up, so that readers of one job look at its record at once."""


class _AsyncWaiter(Waiter):
    __slots__ = ("future",)

    def __init__(self, tail: Tail[Any], future: asyncio.Future[list[Entry] | None], *when: float) -> None:
        super().__init__(tail, *when)
        self.future = future

    def give(self, answer: list[Entry] | OutlastError) -> None:
        if self.future.done():
            return
        if isinstance(answer, OutlastError):
            self.future.set_exception(answer)
        else:
            self.future.set_result(answer)


class _AsyncBoard(Board):
    """Of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.loop = loop
        self.wake: asyncio.Future[None] = loop.create_future()
        self.reading = False
        self.due: dict[float, set[Waiter]] = {}
        self.linger: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None

    def poke(self) -> None:
        if not self.wake.done():
            self.wake.set_result(None)

    def expire(self, when: float) -> None:
        for waiter in self.due.pop(when):
            waiter.give([])
            self.leave(waiter, when)

    def idle(self) -> None:
        """End the read if nobody has come back."""
        self.linger = None
        if not self.waited_for:
            self.poke()


class AsyncReads(ReadsBase):
    """The reads of a client's coroutines. Each event loop has its own, and a task for it while somebody watches."""

    _transport: AsyncTransport

    def __init__(self, transport: AsyncTransport) -> None:
        super().__init__(transport)
        self._loops: dict[asyncio.AbstractEventLoop, dict[str, _AsyncBoard]] = {}
        self._lock = threading.Lock()

    async def ask(self, tail: Tail[Any], *, pause: float = 0.0, block: float | None = None) -> Any:
        """The answer to the tail's next poll, after `pause` seconds or sooner. `block`: seconds to wait for one."""
        # Where requests are islands (Cloudflare), none can wait for what another one has begun.
        shares = self._shares(tail, block) and sys.platform != "emscripten"
        if pause > 0 and not (shares and block is None):
            await asyncio.sleep(pause)
            pause = 0.0
        if not shares:
            return await self._transport.send(tail.poll())
        looked = False
        while True:
            board = self._board(tail.key)
            if found := board.kept(tail):
                return found
            if found is None and not looked and board.alone(tail):
                looked = True
                if pause > 0 and tail.far:
                    await asyncio.sleep(pause)
                if found := await self._transport.send(tail.poll()):
                    return found
                continue
            tail.ride(block)
            got = await self._wait(board, tail, pause, block)
            if got is not None:
                return got

    async def _wait(self, board: _AsyncBoard, tail: Tail[Any], pause: float, block: float | None) -> list[Entry] | None:
        now = board.loop.time()
        future: asyncio.Future[list[Entry] | None] = board.loop.create_future()
        waiter = _AsyncWaiter(tail, future, now + (pause if block is None else block), pause * SLACK)
        new = board.join(tail, waiter)
        if board.task is None:
            board.task = board.loop.create_task(self._serve(board), name="outlast-reads")
        if not board.reading or block is None:
            board.poke()
        elif new:
            board.loop.call_later(JOIN, board.poke)
        slot: set[Waiter] | None = None
        if block is not None:
            when = waiter.due if block < 1 else -(-waiter.due // GRID) * GRID
            slot = board.due.get(when)
            if slot is None:
                slot = board.due[when] = set()
                board.loop.call_at(when, board.expire, when)
            slot.add(waiter)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                future.exception()  # it came too late to be raised
            raise
        finally:
            if slot is not None:
                slot.discard(waiter)
            board.leave(waiter, board.loop.time())
            if block is None and not board.waited_for:
                board.poke()
            elif board.linger is None:
                board.linger = board.loop.call_later(LINGER * 1.1, board.idle)

    def _board(self, key: str) -> _AsyncBoard:
        loop = asyncio.get_running_loop()
        boards = self._loops.get(loop)
        if boards is None:
            with self._lock:
                for old in [old for old in self._loops if old.is_closed()]:
                    del self._loops[old]
                boards = self._loops[loop] = {}
        name = self._name(key)
        board = boards.get(name)
        if board is None:
            board = boards[name] = _AsyncBoard(loop)
        return board

    async def _serve(self, board: _AsyncBoard) -> None:
        failure: BaseException | None = None
        try:
            while board.prune(board.loop.time()):
                pause = self._pause(board)
                if pause == 0:
                    await self._turn(board)
                else:
                    await asyncio.wait((self._wake(board),), timeout=LINGER if pause is None else pause)
        except BaseException as error:
            failure = error
            raise
        finally:
            board.task = None
            for waiter in list(board.waiters):
                why = TransportError("the client was closed meanwhile", maybe_applied=False)
                why.__cause__ = failure
                waiter.give(why)

    def _wake(self, board: _AsyncBoard) -> asyncio.Future[None]:
        board.wake = board.loop.create_future()
        return board.wake

    def _pause(self, board: _AsyncBoard) -> float | None:
        """Seconds until the next read is due. None: nobody waits for one."""
        if self._transport.blocking:
            return 0 if board.waited_for else None
        due = min((waiter.due for waiter in board.waiters), default=None)
        return None if due is None else max(0, due - board.loop.time())

    async def _turn(self, board: _AsyncBoard) -> None:
        block = BLOCK if self._transport.blocking else None
        call, asked = board.question(block, board.streams)
        wake = self._wake(board)
        reading = board.loop.create_task(self._transport.send(call, block=block))
        board.reading = True
        try:
            while not reading.done():
                await asyncio.wait((reading, wake), return_when=asyncio.FIRST_COMPLETED)
                if wake.done():
                    if block is not None or not board.waited_for:
                        break
                    wake = self._wake(board)
        finally:
            board.reading = False
            if not reading.done():
                reading.cancel()
                await asyncio.wait((reading,))
        if reading.cancelled():
            return
        error = reading.exception()
        if error is None:
            found, now = reading.result(), board.loop.time()
            board.heard(asked, found, now)
            if block is None or not found:
                board.empty(asked, now)
        elif not isinstance(error, OutlastError):
            raise error
        elif self._tell_apart(error):
            for waiter in list(board.waiters):
                if isinstance(waiter, _AsyncWaiter) and not waiter.future.done():
                    waiter.future.set_result(None)
            board.streams.clear()
        elif board.refused(asked, error):
            for key, cursor in asked.items():
                await self._one(board, key, cursor)

    async def _one(self, board: _AsyncBoard, key: str, cursor: str) -> None:
        one = {key: cursor}
        try:
            found = await self._transport.send(read(one, board.most, None, streams))
        except OutlastError as error:
            board.refused(one, error)
        else:
            board.heard(one, found, board.loop.time())

    async def aclose(self) -> None:
        """End the reads of this event loop."""
        boards = self._loops.pop(asyncio.get_running_loop(), {})
        tasks = [board.task for board in boards.values() if board.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
