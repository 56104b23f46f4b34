"""The gateway: a raw ASGI application that speaks Upstash's REST protocol to callers and RESP to a database.

    request → host, token → commands → rules (commands.py) → one batch upstream (upstream.py) → JSON

Nothing is ever repeated, and no value or token reaches a log or a message.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from outlast_worker.gateway.backend import Access, Backend
from outlast_worker.gateway.commands import WRONGPASS, Commands, Traits, no_permission, reword
from outlast_worker.gateway.config import GatewayConfig
from outlast_worker.gateway.faults import Faults, Rule
from outlast_worker.gateway.meter import Bill, billed
from outlast_worker.gateway.replica import Replica, concerns
from outlast_worker.gateway.request import Gone, Receive, Request, Scope, Send
from outlast_worker.gateway.resp import Error, Reply, ResultTooLarge, encode_command, encode_commands, encode_reply
from outlast_worker.gateway.scripts import digest
from outlast_worker.gateway.upstream import Outcome, Refused, Upstream, UpstreamError
from outlast_worker.gateway.wire import BadRequest, event, parse_command, parse_commands, slot, to_json

logger = logging.getLogger("outlast.gateway")

METHODS = ("GET", "HEAD", "POST", "PUT")
STREAMS = frozenset({b"subscribe", b"psubscribe", b"monitor"})
BODY_FACTOR = 16  # a whole HTTP body may have this many times the bytes of one command; escapes need up to 6


@dataclass(slots=True)
class Step:
    """One command of a request: what the caller wrote, what is sent for it, or what is answered without sending."""

    name: str
    args: Sequence[bytes]
    sent: Sequence[bytes]
    traits: Traits
    answer: Reply | None = None

    @property
    def wants_token(self) -> bool:
        return self.name == "ACL" and self.args[1:2] != [] and self.args[1].upper() == b"RESTTOKEN"

    def settle(self, reply: Reply) -> Reply:
        """The server's reply as the caller should see it."""
        if isinstance(reply, Error):
            return reword(reply, self.name)
        if self.name == "SCRIPT" and len(self.args) == 3 and self.args[1].upper() == b"LOAD":
            return digest(self.args[2])  # of the script as the caller knows it, with its flags
        return reply


class Counting:
    """A block whose requests are counted; see `Gateway.counting`."""

    def __init__(self, bills: list[Bill]) -> None:
        self._bills = bills
        self._bill = Bill()

    def __enter__(self) -> Bill:
        self._bills.append(self._bill)
        return self._bill

    def __exit__(self, *exc: object) -> None:
        self._bills.remove(self._bill)

    async def __aenter__(self) -> Bill:
        return self.__enter__()

    async def __aexit__(self, *exc: object) -> None:
        self.__exit__()


class Gateway:
    """An ASGI application. It connects when the first request comes; `aclose()`, or the lifespan's end, closes.

    `faults` are the configuration's test switches; `billed` is the total since the start, with `count_billed`.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.faults: Faults | None = config.faults
        self.billed = Bill()
        self._bills: list[Bill] = [self.billed] if config.count_billed else []
        self._hosts = frozenset(host.lower() for host in config.allowed_hosts)
        self._backends: list[Backend] = []
        self._access: dict[bytes, Access] = {}  # by the digest of the token: a lookup that takes no telling time
        self._closing = asyncio.Event()
        for database in config.databases:
            backend = Backend(database, config)
            self._backends.append(backend)
            self._access[_fingerprint(database.token.encode())] = Access(backend, backend.upstream)
            if database.readonly_token is not None:
                access = Access(backend, backend.upstream, readonly=True)
                self._access[_fingerprint(database.readonly_token.encode())] = access

    def counting(self) -> Counting:
        """Count what Upstash would bill for the requests of a block, to the command, calls in scripts included.

        `async with gateway.counting() as bill: …` or, from another thread, a plain `with`; then `bill.total`.
        """
        return Counting(self._bills)

    def begin_shutdown(self) -> None:
        """End what would keep a server waiting: subscriptions, delays, silences."""
        self._closing.set()
        for backend in self._backends:
            backend.begin_shutdown()

    async def aclose(self) -> None:
        """Close every connection to the databases."""
        self.begin_shutdown()
        for backend in self._backends:
            await backend.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(Request.read(scope, receive, send))
        elif scope["type"] == "lifespan":
            kind = ""
            while kind != "lifespan.shutdown":
                kind = (await receive())["type"]
                if kind == "lifespan.shutdown":
                    await self.aclose()
                await send({"type": f"{kind}.complete"})
        else:
            await send({"type": "websocket.close"})

    async def _http(self, request: Request) -> None:
        started = time.perf_counter()
        try:
            try:
                await self._serve(request)
            except BadRequest as bad:
                await request.answer(bad.status, to_json({"error": bad.text}))
            except UpstreamError as error:
                # 502: the commands may have been applied; 503: they have not.
                await request.answer(502 if error.sent else 503, to_json({"error": f"ERR {error}"}))
        except Gone:
            pass
        finally:
            if self.config.access_log:
                took = (time.perf_counter() - started) * 1000
                names = " ".join(request.names[:8]) + (" …" if len(request.names) > 8 else "")
                logger.info("%s %s %d %.1f ms", request.method, names or "-", request.status, took)

    async def _serve(self, request: Request) -> None:
        self._check_host(request)
        control = self._is_control(request)
        if request.method == "OPTIONS":
            asked = request.headers.get(b"access-control-request-headers", b"authorization, content-type")
            methods = (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, OPTIONS")
            return await request.answer(200, b"", headers=[methods, (b"access-control-allow-headers", asked)])
        if request.method not in METHODS and not (control and request.method == "DELETE"):
            return await request.answer(405, b"", headers=[(b"allow", b"GET, HEAD, POST, PUT, OPTIONS")])
        access = self._authenticate(request)
        backend = access.backend
        request.version = backend.version
        if control and not access.readonly:
            return await self._control(request)
        resp2, base64 = _formats(request)
        first = request.segments[0].lower() if request.segments else b""
        try:
            if first in STREAMS and b"text/event-stream" in request.headers.get(b"accept", b"").lower():
                return await self._stream(request, access, first.decode())
            whole = len(request.segments) == 1 and request.method in ("POST", "PUT")
            transaction = whole and first == b"multi-exec"
            many = transaction or (whole and first == b"pipeline")
            batch = await self._read_commands(request, many)
            rules = await backend.commands()
            steps = [self._plan(rules, access, args) for args in batch]
            request.names = [rules.public_name(step.name) for step in steps]
            faults = self.faults.for_request([step.name for step in steps]) if self.faults else []
            if await self._misbehave(request, faults, executed=False):
                return None
            replies = await self._run(request, access, rules, steps, transaction)
        except Refused as refused:
            if access.upstream is not backend.upstream:  # an ACL user whose password is no longer good
                raise BadRequest(WRONGPASS, 401) from refused
            raise
        await self._misbehave(request, faults, executed=True)
        if resp2 and not transaction:
            head = b"*%d\r\n" % len(replies) if many else b""
            body = head + b"".join([encode_reply(reply) for reply in replies])
            return await request.answer(_status(replies, many), body, b"application/octet-stream")
        slots = [slot(reply, base64=base64) for reply in replies]
        return await request.answer(_status(replies, many), to_json(slots if many else slots[0]))

    def _check_host(self, request: Request) -> None:
        if "*" in self._hosts:
            return
        host = request.headers.get(b"host", b"").decode("latin-1").lower()
        name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
        if name not in self._hosts:
            raise BadRequest(f"ERR the Host header {name!r} is not served here: add it to allowed_hosts", 403)

    def _authenticate(self, request: Request) -> Access:
        token = request.token
        if access := self._access.get(_fingerprint(token)):
            return access
        for backend in self._backends:
            if upstream := backend.open_token(token):
                return Access(backend, upstream)
        raise BadRequest(WRONGPASS, 401)

    async def _read_commands(self, request: Request, many: bool) -> list[list[bytes]]:
        try:
            async with asyncio.timeout(self.config.timeout):
                body = await request.body(self.config.max_request_bytes * BODY_FACTOR)
        except TimeoutError:
            raise BadRequest("ERR the request body did not arrive in time", 408) from None
        if many:
            return parse_commands(body)
        if not request.segments:
            return [parse_command(body)]
        args = list(request.segments)
        if body and request.method in ("POST", "PUT"):
            args.append(body)
        for name, value in request.query:
            if name != b"_token":
                args += [name] if value is None else [name, value]
        return [args]

    def _plan(self, rules: Commands, access: Access, args: list[bytes]) -> Step:
        name = args[0][:128].decode("utf-8", "replace").upper()
        step = Step(name, args, access.backend.scripts.translate(name, args), rules.traits(name, args))
        if step.wants_token and not access.readonly:
            return step
        step.answer = rules.answer(name, args, step.traits, readonly=access.readonly)
        if step.answer is None and self.faults and (text := self.faults.for_command(name)):
            step.answer = Error(text.encode())
        if name == "FLUSHALL" and not self.config.allow_admin:
            step.sent = [b"FLUSHDB", *args[1:]]  # the other databases of this server are not this token's
        return step

    async def _run(
        self, request: Request, access: Access, rules: Commands, steps: list[Step], transaction: bool
    ) -> list[Reply]:
        """Run what is to be sent; one reply for each step, worded as Upstash would."""
        backend = access.backend
        for step in steps:
            if step.answer is None and step.wants_token:
                step.answer = await backend.rest_token(step.args)
        if transaction:
            refused = next((step.answer for step in steps if isinstance(step.answer, Error)), None)
            if refused is not None:
                raise BadRequest(refused.text, _status([refused], False))
        writing = [rules.writes(step.name, step.traits) for step in steps]
        copy = None if transaction or any(writing) or self.faults is None else await self._copy(request, backend, steps)
        upstream = copy.upstream if copy else access.upstream
        sending = [step for step in steps if step.answer is None]
        outcome = Outcome([], [])
        if sending:
            upstream.metering = bool(self._bills)
            outcome = await self._send(upstream, sending, transaction)
        names = billed([step.name for step in sending] + outcome.inner)
        for bill in tuple(self._bills):
            bill.add(names)
        if self.config.count_billed:
            request.billed = len(names)
        arrived = iter(outcome.replies)
        replies = [step.settle(next(arrived)) if step.answer is None else step.answer for step in steps]
        backend.version += sum(map(_has_written, writing, replies))
        request.version = copy.version if copy else backend.version
        return replies

    async def _send(self, upstream: Upstream, sending: list[Step], transaction: bool) -> Outcome:
        payload = encode_commands([step.sent for step in sending])
        if not transaction:
            may_block = any(step.name in ("WAIT", "WAITAOF") for step in sending)
            run = upstream.execute_alone if may_block else upstream.execute
            return await run(payload, len(sending))
        payload += encode_command([b"EXEC"])
        outcome = await upstream.execute_alone(payload, len(sending) + 1, transaction=True)
        *queued, last = outcome.replies
        if isinstance(last, list):
            return Outcome(last, outcome.inner)
        for step, reply in zip(sending, queued, strict=False):
            if isinstance(reply, Error):  # why it was discarded; EXECABORT says only that it was
                raise BadRequest(reword(reply, step.name).text)
        raise BadRequest(reword(last, "MULTI").text if isinstance(last, Error) else "EXECABORT Transaction discarded")

    async def _copy(self, request: Request, backend: Backend, steps: list[Step]) -> Replica | None:
        """The copy that this request reads, if replica_lag is on and concerns it."""
        rule = self.faults.lag if self.faults else None
        copy = await backend.replica(rule)
        if rule is None or copy is None:
            return None
        if request.sync_token > copy.version or not concerns([step.args for step in steps], rule.pattern):
            return None
        return copy if rule.fires([step.name for step in steps]) else None

    async def _stream(self, request: Request, access: Access, kind: str) -> None:
        """SUBSCRIBE, PSUBSCRIBE and MONITOR as server-sent events, until either side ends."""
        name = kind.upper()
        request.names = [name]
        channels = request.segments[1:] if name != "MONITOR" else []
        if name == "MONITOR" and access.readonly:
            raise BadRequest(no_permission(name).text)
        if name != "MONITOR" and not channels:
            raise BadRequest(f"ERR wrong number of arguments for '{kind}' command")
        async with access.upstream.subscription(name.encode(), *channels) as subscription:
            try:
                message = await subscription.next(self.config.timeout)
            except (EOFError, TimeoutError):
                raise UpstreamError("the database did not answer", sent=False) from None
            if isinstance(message, Error):
                raise BadRequest(reword(message, name).text)
            for bill in tuple(self._bills):
                bill.add([name])
            kinds = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            await request.begin(200, [*kinds, *request.common_headers()])
            if request.method == "HEAD":
                return await request.write(b"", last=True)
            hung_up = asyncio.ensure_future(request.hung_up())
            hung_up.add_done_callback(lambda _: subscription.close())
            frame = event(message, access.backend.address.number)
            try:
                while True:
                    if frame:
                        await request.write(frame)
                    try:
                        message = await subscription.next(self.config.keepalive)
                        frame = event(message, access.backend.address.number)
                    except TimeoutError:
                        frame = b": keepalive\n\n"
            except EOFError:
                pass
            finally:
                hung_up.cancel()
            return await request.write(b"", last=True)

    def _is_control(self, request: Request) -> bool:
        if request.segments == [b"-", b"faults"]:
            return self.faults is not None
        return request.segments == [b"-", b"billed"] and self.config.count_billed

    async def _control(self, request: Request) -> None:
        if request.segments[1] == b"billed":
            content = {"total": self.billed.total, "commands": dict(self.billed.commands.most_common())}
            return await request.answer(200, to_json(content))
        faults = cast("Faults", self.faults)
        if request.method == "DELETE":
            faults.clear()
        elif request.method in ("POST", "PUT"):
            try:
                wish = json.loads(await request.body(self.config.max_request_bytes))
                if not isinstance(wish, dict):
                    raise ValueError("the body is to be a JSON object with an action")
                faults.arm(cast("dict[str, Any]", wish))
            except (ValueError, RecursionError) as error:
                raise BadRequest(f"ERR {error}") from None
        return await request.answer(200, to_json({"faults": [rule.summary for rule in faults.rules]}))

    async def _misbehave(self, request: Request, rules: list[Rule], *, executed: bool) -> bool:
        """Do what the rules of this side of the execution ask. True if the request has had its answer."""
        for rule in rules:
            if rule.action == "trickle":
                request.trickle = rule.seconds
            elif rule.action == "reply" and not executed:
                await self._answer_canned(request, rule)
                return True
            elif rule.action == "drop_reply" and rule.executed == executed:
                await request.cut()
            elif rule.action == "delay" and rule.executed == executed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), rule.seconds)
            elif rule.action == "silence" and rule.executed == executed:
                ends = [asyncio.ensure_future(request.hung_up()), asyncio.ensure_future(self._closing.wait())]
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for end in ends:
                    end.cancel()
                await request.cut()
        return False

    async def _answer_canned(self, request: Request, rule: Rule) -> None:
        content = rule.content
        length = len(content) + (100 if rule.cut else 0)
        headers = [(name.lower().encode(), value.encode()) for name, value in rule.headers.items()]
        await request.begin(rule.status, [(b"content-length", b"%d" % length), *headers])
        await request.write(content, last=not rule.cut)
        if rule.cut:
            await request.cut(flush=True)


def _fingerprint(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _has_written(writes: bool, reply: Reply) -> bool:
    return writes and (not isinstance(reply, Error) or isinstance(reply, ResultTooLarge))


def _formats(request: Request) -> tuple[bool, bool]:
    """Whether the answer is to be RESP2, and whether its strings are to be base64."""
    wanted = request.headers.get(b"upstash-response-format", b"json").lower()
    base64 = request.headers.get(b"upstash-encoding", b"").lower() == b"base64"
    if wanted not in (b"json", b"resp2"):
        raise BadRequest("ERR invalid Upstash-Response-Format: use json or resp2")
    if wanted == b"resp2" and base64:
        raise BadRequest("ERR Upstash-Encoding: base64 is not allowed with Upstash-Response-Format: resp2")
    return wanted == b"resp2", base64


def _status(replies: Sequence[Reply], many: bool) -> int:
    """The HTTP status. Only a lone command's failure shows in it, and a result that is too large not even then."""
    if many or not isinstance(replies[0], Error) or isinstance(replies[0], ResultTooLarge):
        return 200
    return 413 if replies[0].startswith(b"ERR max request size exceeded") else 400
