"""The async connections: calls go out as they come, and replies are read in the order of the calls."""

from __future__ import annotations

import asyncio
from asyncio import Future, Task
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, cast

from redis.exceptions import RedisError

from outlast.errors import ConfigurationError, ServerError, TransportError
from outlast.protocol.calls import Call

from .place import Address, Place, closed, connection, late, not_connected, strange
from .resp import Refusal, pack, replies

__all__ = ["AsyncLink", "Lane", "Slot", "unknown_script"]

GOODBYE = 0.5
"""Seconds that closing a connection may take before it is cut."""
UNDER_WAY_CALLS, UNDER_WAY_BYTES = 1024, 4 * 1024 * 1024
"""What may be on its way at most: what comes after that waits for replies."""

ASKING = pack(["ASKING"])
CLIENT_ID = pack(["CLIENT", "ID"])


def unknown_script(call: Call[Any], reply: Any) -> bool:
    return isinstance(reply, Refusal) and reply.code == "NOSCRIPT" and call.script is not None


class AsyncLink:
    """One open connection, until a lane takes it over."""

    def __init__(self, label: str, connection: Any) -> None:
        self.label = label
        self._connection = connection
        self._reader = cast("asyncio.StreamReader", connection._reader)
        self._writer = cast("asyncio.StreamWriter", connection._writer)
        self._replies = replies()

    @classmethod
    async def open(cls, place: Place, address: Address, *, sentinel: bool = False) -> AsyncLink:
        made = connection(place, address, aio=True, sentinel=sentinel)
        try:
            await made.connect()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # redis-py connects with asyncio.wait_for, which before Python 3.12 can swallow a cancel.
                raise asyncio.CancelledError
        except (RedisError, OSError) as error:
            raise not_connected(error, place, address) from error
        except RuntimeError as error:  # of uvloop: it was closed again while the login was on its way
            raise closed(place.at(address), sent=False) from error
        except BaseException:
            await made.disconnect(nowait=True)
            raise
        return cls(place.at(address), made)

    async def exchange(self, data: bytes, count: int, limit: float) -> list[Any]:
        out: list[Any] = []
        try:
            async with asyncio.timeout(limit):
                self._writer.write(data)
                await self._writer.drain()
                while len(out) < count:
                    received = await self._reader.read(262144)
                    if not received:
                        raise closed(self.label, sent=True)
                    self._replies.feed(received, out)
        except TimeoutError as error:
            raise late(self.label, limit) from error
        except (OSError, RuntimeError) as error:
            raise closed(self.label, sent=True) from error
        except ValueError as error:
            raise strange(self.label) from error
        return out

    def hand_over(self, protocol: asyncio.Protocol) -> asyncio.Transport:
        """Have `protocol` get what comes from now on. Nothing is under way then."""
        transport = cast("asyncio.Transport", self._writer.transport)
        if transport.is_closing() or self._reader.at_eof():
            # Closed right behind the login's last reply: this end knows already, and nobody would tell `protocol`.
            raise closed(self.label, sent=False)
        transport.set_protocol(protocol)
        return transport

    async def close(self, gone: Future[None] | None = None) -> None:
        """`gone`: tells whoever took the connection over that it is closed."""
        writer = self._writer
        with suppress(RedisError, OSError, RuntimeError):
            await self._connection.disconnect(nowait=True)
        try:
            async with asyncio.timeout(GOODBYE):
                await (writer.wait_closed() if gone is None else asyncio.wait((gone,)))
        except OSError:  # TimeoutError too: with TLS the other end has to say goodbye as well
            writer.transport.abort()


class Slot:
    """A call on its way."""

    __slots__ = ("asking", "call", "data", "deadline", "future", "limit", "source")

    def __init__(self, call: Call[Any], data: bytes, future: Future[Any], limit: float, asking: bool) -> None:
        self.call = call
        self.data = data
        self.future = future
        self.limit = limit
        self.asking = asking
        """A call that goes through an ASK has two replies; the first says only that it may."""
        self.source = False
        self.deadline = 0.0


class Lane(asyncio.Protocol):
    """One connection of an event loop. Calls that are handed over in one loop turn leave in one write, or two.

    A caller that is cancelled takes nothing with it: its reply is read and dropped, and the next one goes to whom it
    belongs. The task opens the connection, and closes it when the loop ends its tasks; all else happens in callbacks.
    """

    def __init__(
        self,
        open_link: Callable[[Address], Awaitable[AsyncLink]],
        place: Place,
        address: Address,
        *,
        limit: float,
        locking: Callable[[], bool],
        idle: float | None = None,
    ) -> None:
        self._open_link = open_link
        self._place = place
        self._address = address
        self._limit = limit
        self._locking = locking
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Slot] = deque()
        self._sent: deque[Slot] = deque()
        self._sent_bytes = 0
        self._link: AsyncLink | None = None
        self._transport: asyncio.Transport | None = None
        self._gone: Future[None] = self._loop.create_future()
        self._replies = replies()
        self._scheduled = self._full = self._leaving = False
        self._failure: TransportError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self.open = True
        self.client_id: int | None = None
        """The server's name for this connection, where reads may wait on it."""
        self.task: Task[None] = self._loop.create_task(self._run(), name="outlast-tcp")

    # -- what callers use --------------------------------------------------------------------------------------------

    def submit(self, call: Call[Any], limit: float, *, asking: bool = False) -> Future[Any]:
        data = pack(call.command(locking=self._locking()))
        if asking:
            data = ASKING + data
        slot = Slot(call, data, self._loop.create_future(), limit, asking)
        self._waiting.append(slot)
        if self._transport is None:
            self._wake.set()
        elif not self._scheduled:
            # Nothing is under way: whoever asks first need not wait for others of this turn. That a connection was
            # closed while the loop stood still shows at its next turn, so this is for calls that bear a repeat.
            if not self._sent and (call.replayable or call.prompt):
                self._write()
            self.collect()
        return slot.future

    def collect(self) -> None:
        """Let what is submitted in this loop turn leave together."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._write)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    # -- out ---------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        self._scheduled = False
        transport = self._transport
        if transport is None or transport.is_closing() or self._full or self._leaving:
            return
        waiting, sent = self._waiting, self._sent
        now = self._loop.time()
        out: list[bytes] = []
        while waiting and len(sent) < UNDER_WAY_CALLS and self._sent_bytes < UNDER_WAY_BYTES:
            slot = waiting.popleft()
            if slot.future.done():  # cancelled before it left
                continue
            slot.deadline = now + slot.limit
            self._sent_bytes += len(slot.data)
            sent.append(slot)
            out.append(slot.data)
        if not out:
            return
        transport.write(out[0] if len(out) == 1 else b"".join(out))
        if self._timer is None or sent[0].deadline < self._timer.when():
            self._watch()
        if self._idle is not None:
            self._wake.set()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self.collect()

    # -- in ----------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        found: list[Any] = []
        again: list[Slot] = []
        try:
            self._replies.feed(data, found)
            for reply in found:
                self._answer(reply, again)
        except (ValueError, IndexError):  # not RESP, or a reply that nobody asked for
            self._break(strange(self._address_label))
            return
        finally:
            self._waiting.extendleft(reversed(again))  # in their order
        if self._leaving and not self._sent:
            self._break(closed(self._address_label, sent=False))
        elif self._waiting:
            self.collect()
        if self._idle is not None and not self._sent:
            self._wake.set()

    def _answer(self, reply: Any, again: list[Slot]) -> None:
        slot = self._sent[0]
        if slot.asking:
            slot.asking = False
            return
        self._sent.popleft()
        self._sent_bytes -= len(slot.data)
        if type(reply) is Refusal:
            if not slot.source and unknown_script(slot.call, reply):
                slot.source = True
                slot.data = pack(slot.call.command(source=True, locking=self._locking()))
                again.append(slot)
                return
            if reply.code == "READONLY":
                # No longer the master: the address may point to another server by now.
                self._leaving = True
        if not slot.future.done():  # the caller was cancelled; its reply had to be read all the same
            slot.future.set_result(reply)

    def _watch(self) -> None:
        """Replies come in order, so the one that is due next says how long to wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._sent:
            return
        head = self._sent[0]
        if head.deadline <= self._loop.time():
            self._break(late(self._address_label, head.limit))
        else:
            self._timer = self._loop.call_at(head.deadline, self._watch)

    @property
    def _address_label(self) -> str:
        return self._place.label if self._link is None else self._link.label

    def _break(self, failure: TransportError) -> None:
        """Give the connection up; its calls fail."""
        self._failure = failure
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        failure, self._failure = self._failure, None
        if failure is None:
            failure = closed(self._address_label, sent=True)
            failure.__cause__ = exc
        sent, self._sent, self._sent_bytes = self._sent, deque(), 0
        self._transport = None
        if not self._gone.done():
            self._gone.set_result(None)
        _fail(sent, failure)
        self._wake.set()

    # -- the task ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await asyncio.sleep(0)  # where tasks start eagerly, the first call is not there yet
            while True:
                if self._transport is None:
                    await self._drop()
                    if not self._waiting:
                        return  # the next caller gets a lane of its own; a task without a connection has no owner
                    await self._connect()
                    continue
                self._wake.clear()
                quiet = self._idle is not None and not self._sent and not self._waiting
                try:
                    async with asyncio.timeout(self._idle if quiet else None):
                        await self._wake.wait()
                except TimeoutError:
                    return
        finally:
            self.open = False
            if self._timer is not None:
                self._timer.cancel()
            await self._drop()
            _fail(self._sent, closed(self._place.label, sent=True))
            _fail(self._waiting, closed(self._place.label, sent=False))

    async def _connect(self) -> None:
        """Open the connection and let go what waits. A failure is that of all who wait now."""
        link: AsyncLink | None = None
        try:
            link = await self._open_link(self._address)
            if self._idle is not None:
                [id] = await link.exchange(CLIENT_ID, 1, self._limit)
                self.client_id = id if isinstance(id, int) else None
            transport = link.hand_over(self)
        except (TransportError, ServerError, ConfigurationError) as error:
            if link is not None:
                await link.close()
            waiting, self._waiting = self._waiting, deque()
            _fail(waiting, error)
            return
        except BaseException:
            if link is not None:
                await link.close()
            raise
        self._link = link
        self._replies = replies()
        self._full = self._leaving = False
        self._gone = self._loop.create_future()
        self._transport = transport
        self._write()

    async def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close(self._gone)


def _fail(slots: Iterable[Slot], error: Exception) -> None:
    for slot in slots:
        if slot.future.done():
            continue
        # An error of its own for each caller: they run on with different tracebacks.
        if isinstance(error, TransportError):
            own: Exception = type(error)(str(error), maybe_applied=error.maybe_applied)
            own.__cause__ = error.__cause__
        elif isinstance(error, ServerError):
            own = type(error)(str(error), code=error.code)
        else:
            own = ConfigurationError(str(error))
        slot.future.set_exception(own)
        slot.future.exception()  # whoever was cancelled before it came to wait has nothing to be told of in the log
