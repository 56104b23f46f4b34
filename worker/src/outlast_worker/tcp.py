"""Calls over TCP: `TcpTransport` for threads, `AsyncTcpTransport` for coroutines; single servers, clusters, sentinels.

redis-py opens the connections (addresses, TLS, login, database); what travels on them is ours. Its own command path
hides what a queue must know: it sends a script again on its own after a time-out, turns a refusal in mid-pipeline
into a lost connection, and awaits every line of a reply (36 a reserved job).
"""

from __future__ import annotations

import asyncio
import os
import random
import ssl
import threading
import time
from asyncio import AbstractEventLoop, Future, Task
from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

from redis.crc import key_slot
from redis.exceptions import RedisError

from outlast.errors import OutlastError, ServerError, TransportError
from outlast.protocol.calls import Call
from outlast.protocol.wire import items, text
from outlast.transport import TRANSIENT, server_error

from .lane import ASKING, AsyncLink, Lane, unknown_script
from .place import (
    CONNECT_TIMEOUT,
    Address,
    Place,
    SilentError,
    TlsError,
    closed,
    connection,
    is_metered,
    late,
    not_connected,
    read_url,
    strange,
)
from .resp import Refusal, pack, replies

__all__ = ["AsyncTcpTransport", "SilentError", "TcpTransport", "TlsError", "is_metered"]

T = TypeVar("T")

TIMEOUT = 10.0
"""Seconds for one call with all its repeats. A repeat gets a fresh connection, so a single try gets half of it."""
IDLE = 30.0
"""Seconds after which a connection for blocking reads that nobody uses is closed."""


# -- what to do with an answer: one conversation, two drivers -------------------------------------------------------


class _Ask(NamedTuple):
    """Send `call` to the node, and bring back its raw reply or raise TransportError."""

    call: Call[Any]
    address: Address
    asking: bool
    limit: float
    block: bool


def _key_of(call: Call[Any]) -> str | None:
    """The first key. Every key starts with its hash tag, and comes before any value."""
    if call.script is not None:
        return call.args[1]
    return next((argument for argument in call.args[1:] if argument.startswith("{")), None)


class _Base:
    """Everything that does no I/O."""

    blocking = True
    sync_token: str | None = None

    def __init__(self, url: str, *, timeout: float = TIMEOUT) -> None:
        self._place, limit = read_url(url)
        self._timeout = timeout
        self._limit = min(timeout / 2, limit or timeout)
        self._place.patience = min(CONNECT_TIMEOUT, self._limit)
        self._locking = self._place.metered
        """Whether scripts say that they touch no key but their own, until the server refuses it."""
        self._slots: dict[int, Address] = {}
        self._seeds = list(self._place.nodes)

    @property
    def cluster(self) -> bool:
        """Whether keys of several queues may live on several nodes: one command may then name one queue only."""
        return self._place.cluster or bool(self._slots)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._place.label})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} holds a password and connections; make one where it is used")

    def _home(self, key: str | None) -> Address:
        if key is not None and self._slots:
            known = self._slots.get(key_slot(key.encode()))
            if known is not None:
                return known
        return self._seeds[0]

    def _moved(self, refusal: Refusal, asked: Address) -> Address:
        """MOVED 3999 127.0.0.1:6381, with an empty host for the node that said it."""
        _, slot, where = refusal.text.split(" ")[:3]
        host, _, port = where.rpartition(":")
        address = (host or asked[0], int(port))
        if refusal.code == "MOVED":
            self._slots[int(slot)] = address
            if address not in self._seeds:
                self._seeds.append(address)
        return address

    def _unreachable(self, address: Address) -> None:
        """Ask another node where the slots of this one went."""
        if len(self._seeds) > 1 and self._place.service is None:
            self._slots = {slot: node for slot, node in self._slots.items() if node != address}
            if self._seeds[0] == address:
                self._seeds = [*self._seeds[1:], address]

    def _talk(
        self,
        call: Call[T],
        block: float | None,
        key: str | None = None,
        *,
        first: Refusal | TransportError | None = None,
    ) -> Generator[_Ask | float, Any, T]:
        """Send, follow, repeat. Yields what to ask, or seconds to sleep. `first`: what the first try came to."""
        end = time.monotonic() + self._timeout + (block or 0)
        key = _key_of(call) or key
        address: Address | None = None
        asking = sent = False
        hops, pause = 0, 0.025
        while True:
            node = address or self._home(key)
            ask = _Ask(call, node, asking, self._limit + (block or 0), block is not None)
            address, asking = None, False
            failure: TransportError | ServerError
            try:
                if first is None:
                    reply = yield ask
                else:
                    reply, first = first, None
                    if isinstance(reply, TransportError):
                        raise reply
            except TransportError as error:
                sent = error.maybe_applied = error.maybe_applied or sent
                if isinstance(error, TlsError) or ((error.maybe_applied or ask.block) and not call.replayable):
                    raise
                self._unreachable(node)
                failure = error
            else:
                if not isinstance(reply, Refusal):
                    return call.decode(reply)
                moved = reply.code in ("MOVED", "ASK")
                if moved:
                    address, asking = self._moved(reply, node), reply.code == "ASK"
                    hops += 1
                    if hops <= 5:  # nodes that send each other's callers in circles settle within seconds
                        continue
                if "allow-key-locking" in reply.text:
                    self._locking = False  # it knows no such flag, or found a key not named: nothing was written
                    continue
                failure = server_error(reply.text)
                if reply.code not in TRANSIENT and not moved:
                    raise failure
            if time.monotonic() + pause > end:
                raise failure
            yield pause * random.uniform(0.5, 1.5)
            pause = min(pause * 2, 1.0)


_PING = Call(("PING",), bytes)
_MASTER = "GET-MASTER-ADDR-BY-NAME"


def _no_master(place: Place, last: Exception | None) -> TransportError:
    error = TransportError(f"no sentinel of {place.label} knows the master of {place.service!r}", maybe_applied=False)
    error.__cause__ = last
    return error


def _master(reply: Any) -> Address | None:
    if reply is None or isinstance(reply, Refusal):
        return None
    host, port = items(reply)
    return text(host), int(text(port))


# -- threads ---------------------------------------------------------------------------------------------------------


class _Link:
    """One open connection of a thread."""

    def __init__(self, place: Place, address: Address, *, sentinel: bool = False) -> None:
        self.label = place.at(address)
        self._connection = connection(place, address, aio=False, sentinel=sentinel)
        try:
            self._connection.connect()
        except (RedisError, OSError) as error:
            raise not_connected(error, place, address) from error
        self._socket = self._connection._sock
        self._replies = replies()

    def alive(self) -> bool:
        """Whether the server has kept the connection while it was idle."""
        try:
            self._socket.settimeout(0)
            self._socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            pass
        return False

    def exchange(self, data: bytes, count: int, limit: float) -> list[Any]:
        end = time.monotonic() + limit
        out: list[Any] = []
        try:
            self._socket.settimeout(limit)
            self._socket.sendall(data)
            while len(out) < count:
                self._socket.settimeout(max(0.001, end - time.monotonic()))
                received = self._socket.recv(65536)
                if not received:
                    raise closed(self.label, sent=True)
                self._replies.feed(received, out)
        except TimeoutError as error:
            raise late(self.label, limit) from error
        except OSError as error:
            raise closed(self.label, sent=True) from error
        except ValueError as error:
            raise strange(self.label) from error
        return out

    def close(self) -> None:
        with suppress(RedisError, OSError):
            self._connection.disconnect()


class TcpTransport(_Base):
    """Calls over TCP, for any number of threads; each call in flight has a connection of its own.

    `url` is one of redis://, rediss:// (TLS), unix://, redis+cluster://host:port,host:port and
    redis+sentinel://host:port,host:port/service; the last two also as rediss+…. A redis:// address of a cluster's node
    works, too. `timeout` (10 s) bounds a call with its repeats; a try gets half of it, or the URL's socket_timeout.
    Safe to use after a fork.
    """

    def __init__(self, url: str, *, timeout: float = TIMEOUT) -> None:
        super().__init__(url, timeout=timeout)
        self._idle: defaultdict[Address, deque[_Link]] = defaultdict(deque)
        self._pid = os.getpid()

    def send(self, call: Call[T], *, block: float | None = None) -> T:
        """See `outlast.transport.Transport.send`."""
        return self._drive(self._talk(call, block))

    def _drive(self, talk: Generator[_Ask | float, Any, T]) -> T:
        try:
            step = next(talk)
            while True:
                if not isinstance(step, _Ask):
                    time.sleep(step)
                    step = next(talk)
                    continue
                try:
                    reply = self._exchange(step.address, [step.call], step.limit, asking=step.asking)[0]
                except TransportError as error:
                    step = talk.throw(error)
                else:
                    step = talk.send(reply)
        except StopIteration as stop:
            return cast("T", stop.value)

    def send_many(self, calls: Sequence[Call[Any]], *, outcomes: bool = False) -> list[Any]:
        """See `outlast.transport.Transport.send_many`."""
        key = next((key for call in calls if (key := _key_of(call)) is not None), None)
        replies: list[Any]
        try:
            replies = self._exchange(self._home(key), calls, self._limit) if calls else []
        except TransportError as error:
            if error.maybe_applied and not all(call.replayable for call in calls):
                raise
            replies = [None] * len(calls)
            again = [True] * len(calls)
        else:
            again = [isinstance(reply, Refusal) for reply in replies]
        answers: list[Any] = []
        failure: Exception | None = None
        for call, reply, repeat in zip(calls, replies, again, strict=True):
            try:
                # A refused call did not run; the conversation of a single call knows what that asks for.
                answers.append(self._drive(self._talk(call, None, key)) if repeat else call.decode(reply))
            except TransportError:
                raise  # the server does not answer: it will not answer the others either
            except Exception as error:
                if outcomes and isinstance(error, OutlastError):
                    answers.append(error)
                else:
                    failure = failure or error
        if failure is not None:
            raise failure
        return answers

    def _exchange(
        self, address: Address, calls: Sequence[Call[Any]], limit: float, *, asking: bool = False
    ) -> list[Any]:
        link = self._take(address)
        try:
            packed = [pack(call.command(locking=self._locking)) for call in calls]
            if asking:
                packed.insert(0, ASKING)
            replies = link.exchange(b"".join(packed), len(packed), limit)[-len(calls) :]
            again = [at for at, call in enumerate(calls) if unknown_script(call, replies[at])]
            if again:
                # The first call of a script brings its text for all.
                first = {calls[at].script: at for at in reversed(again)}
                packed = [
                    pack(calls[at].command(source=first[calls[at].script] == at, locking=self._locking)) for at in again
                ]
                for at, reply in zip(again, link.exchange(b"".join(packed), len(packed), limit), strict=True):
                    replies[at] = reply
            if any(isinstance(reply, Refusal) and reply.code == "READONLY" for reply in replies):
                link.close()  # no longer the master: the address may point to another server by now
                return replies
        except BaseException:
            link.close()
            raise
        self._idle[address].append(link)
        return replies

    def _take(self, address: Address) -> _Link:
        if self._pid != os.getpid():
            self._pid, self._idle = os.getpid(), defaultdict(deque)
        idle = self._idle[address]
        while True:
            try:
                link = idle.pop()
            except IndexError:
                break
            if link.alive():
                return link
            link.close()
        if self._place.service is None:
            return _Link(self._place, address)
        return _Link(self._place, self._find_master())

    def _find_master(self) -> Address:
        last: Exception | None = None
        for at, address in enumerate(self._place.nodes):
            try:
                link = _Link(self._place, address, sentinel=True)
                try:
                    command = pack(["SENTINEL", _MASTER, cast("str", self._place.service)])
                    found = _master(link.exchange(command, 1, self._limit)[0])
                finally:
                    link.close()
            except TransportError as error:
                last = error
                continue
            if found is not None:
                self._place.nodes.insert(0, self._place.nodes.pop(at))
                return found
        raise _no_master(self._place, last)

    def close(self) -> None:
        """Close the idle connections. The transport may be used again."""
        for idle in list(self._idle.values()):
            while idle:
                idle.pop().close()


# -- coroutines ------------------------------------------------------------------------------------------------------


class _Loop:
    """What the transport has open on one event loop."""

    def __init__(self) -> None:
        self.lanes: dict[Address, Lane] = {}
        self.blocking: defaultdict[Address, list[Lane]] = defaultdict(list)
        self.freeing: set[Task[None]] = set()


class AsyncTcpTransport(_Base):
    """Calls over TCP, for coroutines: one connection for all of them, and one more for each blocking read in flight.

    URLs and `timeout` as for `TcpTransport`. Each event loop has connections of its own, which close when the loop
    ends its tasks (asyncio.run does): one transport serves a program that calls asyncio.run again and again.
    """

    def __init__(self, url: str, *, timeout: float = TIMEOUT) -> None:
        super().__init__(url, timeout=timeout)
        self._loops: dict[AbstractEventLoop, _Loop] = {}
        self._lock = threading.Lock()

    def _here(self) -> _Loop:
        loop = asyncio.get_running_loop()
        here = self._loops.get(loop)
        if here is None:
            with self._lock:
                for old in [old for old in self._loops if old.is_closed()]:
                    del self._loops[old]
                here = self._loops[loop] = _Loop()
        return here

    async def send(self, call: Call[T], *, block: float | None = None) -> T:
        """See `outlast.transport.Transport.send`. Cancelling it is safe at any time; the call may still take effect."""
        if block is not None:
            return await self._drive(self._talk(call, block))
        return await self._answer(call, self._lane(self._home(_key_of(call))).submit(call, self._limit))

    async def _answer(self, call: Call[T], reply: Future[Any], key: str | None = None) -> T:
        first: Refusal | TransportError
        try:
            # Nearly every call is answered at once; what else can happen is the longer way's.
            found = await reply
            if type(found) is not Refusal:
                return call.decode(found)
            first = found
        except TransportError as error:
            first = error
        return await self._drive(self._talk(call, None, key, first=first))

    async def _drive(self, talk: Generator[_Ask | float, Any, T]) -> T:
        try:
            step = next(talk)
            while True:
                if not isinstance(step, _Ask):
                    await asyncio.sleep(step)
                    step = next(talk)
                    continue
                try:
                    reply = await (self._alone(step) if step.block else self._shared(step))
                except TransportError as error:
                    step = talk.throw(error)
                else:
                    step = talk.send(reply)
        except StopIteration as stop:
            return cast("T", stop.value)

    def _new_lane(self, address: Address, *, idle: float | None = None) -> Lane:
        return Lane(self._open, self._place, address, limit=self._limit, locking=lambda: self._locking, idle=idle)

    def _lane(self, address: Address) -> Lane:
        """The connection for all calls that do not block."""
        lanes = self._here().lanes
        lane = lanes.get(address)
        if lane is None or not lane.open:
            lane = lanes[address] = self._new_lane(address)
        return lane

    def _shared(self, ask: _Ask) -> Future[Any]:
        return self._lane(ask.address).submit(ask.call, ask.limit, asking=ask.asking)

    async def _alone(self, ask: _Ask) -> Any:
        """A read that may take long, on a connection that nobody else uses meanwhile."""
        idle = self._here().blocking[ask.address]
        lane: Lane | None = None
        while idle and lane is None:
            lane = idle.pop()
            lane = lane if lane.open else None
        lane = lane or self._new_lane(ask.address, idle=IDLE)
        try:
            reply = await lane.submit(ask.call, ask.limit, asking=ask.asking)
        except asyncio.CancelledError:
            # Its reply is still to come. Only of a read it does not matter whether it brings something.
            freeing = self._here().freeing
            if ask.call.args[0] != "XREAD" or lane.client_id is None or len(freeing) > 1 or lane.task.cancelling():
                lane.task.cancel()
            else:
                task = asyncio.get_running_loop().create_task(self._free(lane, ask.address), name="outlast-tcp")
                freeing.add(task)
                task.add_done_callback(freeing.discard)
            raise
        except BaseException:
            idle.append(lane)
            raise
        idle.append(lane)
        return reply

    async def _free(self, lane: Lane, address: Address) -> None:
        """Have the server answer a read that nobody waits for any more. Where it will not, the connection is cut."""
        unblock = Call(("CLIENT", "UNBLOCK", str(lane.client_id)), int)
        clear = lane.submit(_PING, self._limit)
        try:
            for pause in (0.01, 0.05, 0.25):  # the first may overtake the read
                if isinstance(await self._shared(_Ask(unblock, address, False, self._limit, False)), Refusal):
                    break
                await asyncio.wait((clear,), timeout=pause)
                if clear.done() and clear.exception() is None:
                    self._here().blocking[address].append(lane)
                    return
        except TransportError:
            pass
        finally:
            if not clear.done() or clear.exception() is not None:
                clear.cancel()
                lane.task.cancel()

    async def send_many(self, calls: Sequence[Call[Any]], *, outcomes: bool = False) -> list[Any]:
        """See `outlast.transport.AsyncTransport.send_many`."""
        key = next((key for call in calls if (key := _key_of(call)) is not None), None)
        lane = self._lane(self._home(key))
        lane.collect()
        replies = [lane.submit(call, self._limit) for call in calls]
        talks = [self._answer(call, reply, key) for call, reply in zip(calls, replies, strict=True)]
        answers = await asyncio.gather(*talks, return_exceptions=True)
        for answer in answers:
            refused = isinstance(answer, OutlastError) and not isinstance(answer, TransportError)
            if isinstance(answer, BaseException) and not (outcomes and refused):
                raise answer
        return answers

    async def _open(self, address: Address) -> AsyncLink:
        place = self._place
        if place.service is None:
            return await AsyncLink.open(place, address)
        last: Exception | None = None
        for at, sentinel in enumerate(place.nodes):
            try:
                link = await AsyncLink.open(place, sentinel, sentinel=True)
                try:
                    found = _master(
                        (await link.exchange(pack(["SENTINEL", _MASTER, place.service]), 1, self._limit))[0]
                    )
                finally:
                    await link.close()
            except TransportError as error:
                last = error
                continue
            if found is not None:
                place.nodes.insert(0, place.nodes.pop(at))
                return await AsyncLink.open(place, found)
        raise _no_master(place, last)

    async def aclose(self) -> None:
        """Close what is open on this event loop; calls in flight fail. The transport may be used again."""
        here = self._loops.pop(asyncio.get_running_loop(), None)
        if here is not None:
            for task in here.freeing:
                task.cancel()
            if here.freeing:
                await asyncio.wait(here.freeing)
            lanes = [*here.lanes.values(), *(lane for lanes in here.blocking.values() for lane in lanes)]
            await asyncio.gather(*(lane.close() for lane in lanes))
