"""The gateway: a raw ASGI application that speaks Upstash's REST protocol to callers and RESP to a database.

    request → host, token → commands → rules (commands.py) → one batch upstream (upstream.py) → JSON

Nothing is ever repeated, and no value or token reaches a log or a message.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from outlast_worker.gateway.commands import WRONGPASS, Commands, Traits, read_table, reword
from outlast_worker.gateway.config import Database, GatewayConfig
from outlast_worker.gateway.faults import Faults, Rule
from outlast_worker.gateway.meter import Bill, billed
from outlast_worker.gateway.resp import Error, Reply, encode_command, encode_commands, encode_reply
from outlast_worker.gateway.scripts import Scripts, digest
from outlast_worker.gateway.upstream import Address, Outcome, Refused, Subscription, Upstream, UpstreamError
from outlast_worker.gateway.wire import (
    BadRequest,
    parse_command,
    parse_commands,
    slot,
    split_path,
    split_query,
    to_json,
)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

logger = logging.getLogger("outlast.gateway")

TRANSPORT = "outlast.transport"  # in the scope: what our server puts there, so that faults can cut the connection
BODY_FACTOR = 16  # a whole HTTP body may have this many times the bytes of one command; escapes need up to 6
_JSON = b"application/json; charset=utf-8"


class Gone(Exception):
    """The caller has hung up, or a fault has cut the connection; there is nobody to answer."""


@dataclass(slots=True)
class Request:
    """One HTTP request, read as far as its headers."""

    method: str
    segments: list[bytes]
    query: list[tuple[bytes, bytes | None]]
    headers: Mapping[bytes, bytes]
    receive: Receive
    send: Send
    transport: asyncio.Transport | None
    names: list[str] = field(default_factory=list[str])  # of its commands
    status: int = 0  # of the answer, once it has begun
    version: int | None = None  # the sync token to send
    billed: int | None = None
    trickle: float = 0.0

    @classmethod
    def read(cls, scope: Scope, receive: Receive, send: Send) -> Request:
        raw = scope.get("raw_path")
        return cls(
            scope["method"],
            split_path(raw if raw is not None else scope["path"].encode()),
            split_query(scope.get("query_string", b"")),
            dict(scope["headers"]),
            receive,
            send,
            scope.get(TRANSPORT),
        )

    @property
    def token(self) -> bytes:
        for name, value in self.query:
            if name == b"_token":
                return value or b""
        header = self.headers.get(b"authorization", b"").strip()
        return header[7:].strip() if header[:7].lower() == b"bearer " else header

    async def body(self, limit: int) -> bytes:
        """The whole body; past `limit` its bytes are only counted, and the answer is 413 with their number."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise Gone
            part = message.get("body", b"")
            size += len(part)
            if size <= limit:
                parts.append(part)
            more = message.get("more_body", False)
            if size > limit and (not more or size > 4 * limit):
                raise BadRequest(f"ERR max request size exceeded. Limit: {limit}, Actual: {size}", 413)
            if not more:
                return b"".join(parts)

    async def hung_up(self) -> None:
        """Returns when the caller is gone."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def answer(
        self, status: int, body: bytes, content_type: bytes = _JSON, headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> None:
        fields = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *self.common(), *headers]
        if self.method == "HEAD":
            body = b""
        await self.begin(status, fields)
        if self.trickle:
            for at in range(len(body)):
                await self.send({"type": "http.response.body", "body": body[at : at + 1], "more_body": True})
                await asyncio.sleep(self.trickle)
            body = b""
        await self.send({"type": "http.response.body", "body": body})

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    def common(self) -> list[tuple[bytes, bytes]]:
        fields = [(b"access-control-allow-credentials", b"true")]
        if origin := self.headers.get(b"origin"):
            fields += [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        if self.version is not None:
            fields.append((b"upstash-sync-token", b"%d" % self.version))
        if self.billed is not None:
            fields.append((b"outlast-billed", b"%d" % self.billed))
        return fields


@dataclass(slots=True)
class Step:
    """One command of a request: what is sent for it, or what is answered without sending."""

    name: str
    args: Sequence[bytes]
    traits: Traits
    answer: Reply | None = None

    def reply(self, reply: Reply, original: Sequence[bytes]) -> Reply:
        """The server's reply as the caller should see it."""
        if isinstance(reply, Error):
            return reword(reply, self.name)
        if self.name == "SCRIPT" and len(original) > 2 and original[1].upper() == b"LOAD":
            return digest(original[2])  # of the script as the caller knows it, with its flags
        return reply


class Backend:
    """One database as the gateway sees it: its connections, its commands, its scripts, its sync token."""

    def __init__(self, database: Database, config: GatewayConfig) -> None:
        self.address = Address.parse(database.redis_url)
        self.scripts = Scripts()
        # Rises with each write. It starts at the time, so that a restarted gateway does not fall back behind tokens
        # that clients still hold.
        self.version = time.time_ns() // 1_000_000
        self._config = config
        self._key = database.token.encode()
        self._commands: Commands | None = None
        self._users: dict[tuple[str, str], Upstream] = {}
        self.upstream = self._open(self.address)

    def _open(self, address: Address) -> Upstream:
        config = self._config
        return Upstream(address, size=config.connections, limit=config.max_request_bytes, timeout=config.timeout)

    @property
    def upstreams(self) -> list[Upstream]:
        return [self.upstream, *self._users.values()]

    async def commands(self) -> Commands:
        """The rules, from the server's own list of commands."""
        if self._commands is not None:
            return self._commands
        reply = (await self.upstream.execute(encode_command([b"COMMAND"]), 1)).replies[0]
        commands = Commands(
            read_table(reply), allow_admin=self._config.allow_admin, max_bytes=self._config.max_request_bytes
        )
        if not isinstance(reply, Error):  # while it loads its data, a server refuses even this: ask again
            self._commands = commands
        return commands

    def user(self, name: str, password: str) -> Upstream:
        """The connections of an ACL user."""
        if (name, password) not in self._users:
            address = Address(
                host=self.address.host,
                port=self.address.port,
                path=self.address.path,
                tls=self.address.tls,
                username=name,
                password=password,
                number=self.address.number,
            )
            self._users[name, password] = self._open(address)
        return self._users[name, password]

    def sign(self, name: str, password: str) -> str:
        """The REST token of an ACL user: it holds the credentials, sealed with the database's own token.

        So it stays good over restarts and nothing is stored. Whoever reads one could also log in with it.
        """
        content = f"{name}\0{password}".encode()
        return "AU" + urlsafe_b64encode(hmac.digest(self._key, content, "sha256") + content).decode()

    def open_token(self, token: bytes) -> tuple[str, str] | None:
        """The user and password in a token that `sign` made; None for any other."""
        if not token.startswith(b"AU"):
            return None
        with suppress(ValueError):
            raw = urlsafe_b64decode(token[2:])
            if hmac.compare_digest(raw[:32], hmac.digest(self._key, raw[32:], "sha256")):
                name, _, password = raw[32:].decode().partition("\0")
                return name, password
        return None

    async def rest_token(self, args: Sequence[bytes]) -> Reply:
        """ACL RESTTOKEN <user> <password>."""
        if len(args) != 4:
            return Error(b"ERR wrong number of arguments for 'acl|resttoken' command")
        name, password = args[2].decode("utf-8", "replace"), args[3].decode("utf-8", "replace")
        known = (name, password) in self._users
        try:
            (await self.user(name, password).open()).close()
        except Refused:
            if not known:
                del self._users[name, password]
            return Error(f'ERR Wrong password or user "{name}" does not exist'.encode())
        return self.sign(name, password).encode()


@dataclass(frozen=True, slots=True)
class Access:
    """What a token opens."""

    backend: Backend
    upstream: Upstream
    readonly: bool = False


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
    """An ASGI application. It connects when the first request comes; `aclose()` (or the lifespan's end) closes.

    `faults` are the configuration's test switches. `billed` is the running total since the start, of which the
    calls inside scripts are a part only while something counts: `count_billed` or an open `counting()`.
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
                key = _fingerprint(database.readonly_token.encode())
                self._access[key] = Access(backend, backend.upstream, readonly=True)

    def counting(self) -> Counting:
        """Count what Upstash would bill for the requests of a block, to the command, calls in scripts included.

        `async with gateway.counting() as bill: …` or, from another thread, a plain `with`; then `bill.total`.
        """
        return Counting(self._bills)

    def begin_shutdown(self) -> None:
        """End what would keep a server waiting: subscriptions, delays, silences."""
        self._closing.set()
        for backend in self._backends:
            for upstream in backend.upstreams:
                upstream.close_subscriptions()

    async def aclose(self) -> None:
        """Close every connection to the databases."""
        self.begin_shutdown()
        for backend in self._backends:
            for upstream in backend.upstreams:
                await upstream.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            while True:
                kind = (await receive())["type"]
                if kind == "lifespan.shutdown":
                    await self.aclose()
                await send({"type": f"{kind}.complete"})
                if kind == "lifespan.shutdown":
                    return
        else:
            await send({"type": "websocket.close"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request.read(scope, receive, send)
        started = time.perf_counter()
        try:
            try:
                await self._serve(request)
            except BadRequest as bad:
                await request.answer(bad.status, to_json({"error": bad.text}))
            except UpstreamError as error:
                if request.status:
                    raise Gone from error
                # 502: it may have been applied; 503: it has not.
                await request.answer(502 if error.sent else 503, to_json({"error": f"ERR {error}"}))
            except Refused:
                await request.answer(401, to_json({"error": WRONGPASS}))
        except Gone:
            pass
        finally:
            if self.config.access_log:
                took = (time.perf_counter() - started) * 1000
                names = " ".join(request.names[:8]) + (" …" if len(request.names) > 8 else "")
                logger.info("%s %s %d %.1f ms", request.method, names or "-", request.status, took)

    async def _serve(self, request: Request) -> None:
        self._check_host(request)
        if request.method == "OPTIONS":
            asked = request.headers.get(b"access-control-request-headers", b"authorization, content-type")
            allow = [
                (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, OPTIONS"),
                (b"access-control-allow-headers", asked),
            ]
            return await request.answer(200, b"", headers=allow)
        control = self._is_control(request)
        if request.method not in ("GET", "HEAD", "POST", "PUT") and not (control and request.method == "DELETE"):
            return await request.answer(405, b"", headers=[(b"allow", b"GET, HEAD, POST, PUT, OPTIONS")])
        access = self._authenticate(request)
        request.version = access.backend.version
        if control and not access.readonly:
            return await self._control(request)
        response_format = request.headers.get(b"upstash-response-format", b"json").lower()
        base64 = request.headers.get(b"upstash-encoding", b"").lower() == b"base64"
        if response_format not in (b"json", b"resp2"):
            raise BadRequest("ERR invalid Upstash-Response-Format: use json or resp2")
        resp2 = response_format == b"resp2"
        if resp2 and base64:
            raise BadRequest("ERR Upstash-Encoding: base64 is not allowed with Upstash-Response-Format: resp2")

        first = request.segments[0].lower() if request.segments else b""
        if first in _STREAMS and b"text/event-stream" in request.headers.get(b"accept", b"").lower():
            return await self._stream(request, access, first)
        whole = len(request.segments) == 1 and request.method in ("POST", "PUT")
        pipeline, transaction = whole and first == b"pipeline", whole and first == b"multi-exec"
        batch = await self._read_commands(request, many=pipeline or transaction)

        commands = await access.backend.commands()
        steps = [self._plan(commands, access, args) for args in batch]
        request.names = [step.name for step in steps]
        rules = self.faults.for_request(request.names) if self.faults else []
        if await self._misbehave(request, rules, executed=False):
            return None
        replies = await self._run(request, access, steps, batch, transaction)
        request.version = access.backend.version
        await self._misbehave(request, rules, executed=True)

        if resp2 and not transaction:
            body = b"".join([encode_reply(reply) for reply in replies])
            if pipeline:
                body = b"*%d\r\n%b" % (len(replies), body)
            return await request.answer(_status(replies, pipeline), body, b"application/octet-stream")
        slots = [slot(reply, base64=base64) for reply in replies]
        many = pipeline or transaction
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
        access = self._access.get(_fingerprint(token))
        if access is not None:
            return access
        for backend in self._backends:
            if user := backend.open_token(token):
                return Access(backend, backend.user(*user))
        raise BadRequest(WRONGPASS, 401)

    async def _read_commands(self, request: Request, *, many: bool) -> list[list[bytes]]:
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
                args.append(name)
                if value is not None:
                    args.append(value)
        return [args]

    def _plan(self, commands: Commands, access: Access, args: list[bytes]) -> Step:
        name = args[0][:128].decode("utf-8", "replace").upper()
        traits = commands.traits(name, args)
        if name == "ACL" and len(args) > 1 and args[1].upper() == b"RESTTOKEN" and not access.readonly:
            return Step(name, args, traits)
        answer = commands.answer(name, args, traits, readonly=access.readonly)
        if answer is None and self.faults and (text := self.faults.for_command(name)):
            answer = Error(text.encode())
        sent = access.backend.scripts.translate(name, args)
        if name == "FLUSHALL" and not self.config.allow_admin:
            sent[0] = b"FLUSHDB"  # the other databases of this server are not this token's
        return Step(name, sent, traits, answer)

    async def _run(
        self, request: Request, access: Access, steps: list[Step], batch: list[list[bytes]], transaction: bool
    ) -> list[Reply]:
        """Run what is to be sent; one reply for each step, worded as Upstash would."""
        backend = access.backend
        for step in steps:
            if step.name == "ACL" and step.answer is None and step.args[1].upper() == b"RESTTOKEN":
                step.answer = await backend.rest_token(step.args)
        if transaction:
            refused = next((step.answer for step in steps if isinstance(step.answer, Error)), None)
            if refused is not None:
                raise BadRequest(refused.text, _status([refused], False))
        sending = [step for step in steps if step.answer is None]
        outcome = Outcome([], [])
        if sending:
            access.upstream.metering = bool(self._bills)
            outcome = await self._send(access, sending, transaction)
        names = billed([step.name for step in sending] + outcome.inner)
        for bill in tuple(self._bills):
            bill.add(names)
        if self.config.count_billed:
            request.billed = len(names)
        commands = await backend.commands()
        replies: list[Reply] = []
        arrived = iter(outcome.replies)
        for step, args in zip(steps, batch, strict=True):
            if step.answer is not None:
                replies.append(step.answer)
                continue
            reply = step.reply(next(arrived), args)
            if commands.writes(step.name, step.traits) and not isinstance(reply, Error):
                backend.version += 1
            replies.append(reply)
        return replies

    async def _send(self, access: Access, sending: list[Step], transaction: bool) -> Outcome:
        payload = encode_commands([step.args for step in sending])
        if not transaction:
            may_block = any(step.name in ("WAIT", "WAITAOF") for step in sending)
            run = access.upstream.execute_alone if may_block else access.upstream.execute
            return await run(payload, len(sending))
        payload += encode_command([b"EXEC"])
        outcome = await access.upstream.execute_alone(payload, len(sending) + 1, transaction=True)
        *queued, last = outcome.replies
        if isinstance(last, list):
            return Outcome(last, outcome.inner)
        for step, reply in zip(sending, queued, strict=False):
            if isinstance(reply, Error):  # why it was discarded; EXECABORT says only that it was
                raise BadRequest(reword(reply, step.name).text)
        text = last.text if isinstance(last, Error) else "EXECABORT Transaction discarded"
        raise BadRequest(text)

    async def _stream(self, request: Request, access: Access, kind: bytes) -> None:
        """SUBSCRIBE, PSUBSCRIBE and MONITOR as server-sent events, until either side ends."""
        name = kind.decode().upper()
        request.names = [name]
        channels = request.segments[1:]
        if name == "MONITOR":
            channels = []
            if access.readonly:
                raise BadRequest("NOPERM this user has no permissions to run the 'monitor' command or its subcommand")
        elif not channels:
            raise BadRequest(f"ERR wrong number of arguments for '{kind.decode()}' command")
        async with access.upstream.subscription(name.encode(), *channels) as subscription:
            try:
                first = await subscription.next(self.config.timeout)
            except (EOFError, TimeoutError):
                raise UpstreamError("the database did not answer", sent=False) from None
            if isinstance(first, Error):
                raise BadRequest(reword(first, name).text)
            for bill in tuple(self._bills):
                bill.add([name])
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"), *request.common()]
            await request.begin(200, headers)
            if request.method == "HEAD":
                return await request.send({"type": "http.response.body", "body": b""})
            hung_up = asyncio.ensure_future(request.hung_up())
            hung_up.add_done_callback(lambda _: subscription.close())
            try:
                await self._relay(request, subscription, first, access.backend.address.number)
            finally:
                hung_up.cancel()
            await request.send({"type": "http.response.body", "body": b""})
        return None

    async def _relay(self, request: Request, subscription: Subscription, message: Reply, number: int) -> None:
        while True:
            frame = _event(message, number)
            if frame:
                await request.send({"type": "http.response.body", "body": frame, "more_body": True})
            while True:
                try:
                    message = await subscription.next(self.config.keepalive)
                    break
                except TimeoutError:
                    frame = b": keepalive\n\n"
                    await request.send({"type": "http.response.body", "body": frame, "more_body": True})
                except EOFError:
                    return

    def _is_control(self, request: Request) -> bool:
        match request.segments:
            case [b"-", b"faults"]:
                return self.faults is not None
            case [b"-", b"billed"]:
                return self.config.count_billed
            case _:
                return False

    async def _control(self, request: Request) -> None:
        if request.segments[1] == b"billed":
            content = {"total": self.billed.total, "commands": dict(self.billed.commands.most_common())}
            return await request.answer(200, to_json(content))
        assert self.faults is not None
        if request.method == "DELETE":
            self.faults.clear()
        elif request.method in ("POST", "PUT"):
            try:
                wish = json.loads(await request.body(self.config.max_request_bytes))
                if not isinstance(wish, dict):
                    raise ValueError("the body is a JSON object with an action")
                self.faults.arm(cast("dict[str, Any]", wish))
            except (ValueError, RecursionError) as error:
                raise BadRequest(f"ERR {error}") from None
        rules = [
            {"action": r.action, "command": r.command, "times": r.times, "every": r.every, "fired": r.fired}
            for r in self.faults.rules
        ]
        return await request.answer(200, to_json({"faults": rules}))

    async def _misbehave(self, request: Request, rules: list[Rule], *, executed: bool) -> bool:
        """Do what the rules of this side of the execution ask. True if the request has had its answer."""
        for rule in rules:
            if rule.action == "reply":
                if not executed:
                    await self._answer_canned(request, rule)
                    return True
            elif rule.action == "trickle":
                request.trickle = rule.seconds
            elif rule.executed == executed:
                if rule.action == "drop_reply":
                    await self._cut(request)
                wait = rule.seconds if rule.action == "delay" else None
                await self._wait_or_gone(request, wait)
        return False

    async def _wait_or_gone(self, request: Request, seconds: float | None) -> None:
        """Wait; raises Gone when the caller hangs up or, as a silence has no other end, when the gateway closes."""
        if seconds is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), seconds)
            return
        ends = [asyncio.ensure_future(request.hung_up()), asyncio.ensure_future(self._closing.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        await self._cut(request)

    async def _answer_canned(self, request: Request, rule: Rule) -> None:
        content = rule.content
        length = len(content) + (100 if rule.cut else 0)
        headers = [(k.lower().encode(), v.encode()) for k, v in rule.headers.items()]
        await request.begin(rule.status, [(b"content-length", b"%d" % length), *headers])
        body = {"type": "http.response.body", "body": b"" if request.method == "HEAD" else content}
        await request.send({**body, "more_body": rule.cut})
        if rule.cut:
            await self._cut(request, flush=True)

    async def _cut(self, request: Request, *, flush: bool = False) -> None:
        """Close the caller's connection without (more of) an answer."""
        if request.transport is None:  # another server, or none: the nearest thing is to fail
            raise ConnectionResetError("a test switch has cut this connection")
        request.transport.close() if flush else request.transport.abort()
        await request.hung_up()
        raise Gone


_STREAMS = frozenset({b"subscribe", b"psubscribe", b"monitor"})


def _fingerprint(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _status(replies: Sequence[Reply], many: bool) -> int:
    """The HTTP status. Only a lone command's failure shows in it, and a result that is too large not even then."""
    if many or not isinstance(replies[0], Error):
        return 200
    return 413 if replies[0].startswith(b"ERR max request size exceeded") else 400


def _event(message: Reply, number: int) -> bytes:
    """A push as one server-sent event; empty for a MONITOR line of another database."""
    if isinstance(message, list):
        text = b",".join([b"%d" % part if isinstance(part, int) else cast("bytes", part) for part in message])
    elif isinstance(message, bytes):
        text = message
        if text == b"OK":
            text = b'"OK"'
        elif not text.partition(b"[")[2].startswith(b"%d " % number):
            return b""
    else:
        return b""
    # A line break in a message would end the field: the rest of it goes into further fields, as the format has it.
    lines = text.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "".join([f"data: {line}\n" for line in lines]).encode() + b"\n"
