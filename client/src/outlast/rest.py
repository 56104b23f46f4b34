"""Calls over HTTP, in the REST protocol of Upstash: one POST a call, one POST a pipeline.

What is sent again, and when (`_Exchange` decides, the two transports only do the I/O):

- nothing left this machine (refused, no such host): always;
- the outcome is unknown (timed out, cut off, 5xx, not an answer of this protocol): when every call is replayable;
- LOADING, BUSY, READONLY and their kind: the command did not run, so always, until the time is up;
- NOSCRIPT: at once, with the script's text;
- any other refusal: never.

Repeats come at once after a kept connection turned out dead, else after a growing pause with jitter, or when the
server's Retry-After says so. All of it happens within `timeout` seconds of the call.
"""

from __future__ import annotations

import json
import os
import random
import sys
from binascii import a2b_base64
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import cache
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar
from weakref import WeakKeyDictionary

from ._checks import Duration, is_list, to_ms
from .errors import AuthError, ConfigurationError, InvalidArgumentError, OutlastError, ServerError, TransportError
from .protocol import Call
from .transport import TRANSIENT, outcome_of, server_error

if TYPE_CHECKING:
    import asyncio

    import httpx

__all__ = ["AsyncRestTransport", "RestTransport", "backoff"]

T = TypeVar("T")
C = TypeVar("C")

CONNECT = 3.0
"""Seconds to open a connection."""
READ = 10.0
"""Seconds of silence from the server, or for one write to it."""
TOTAL = 20.0
"""Seconds for a call with all its repeats: one silent server and one more try."""
REPEATS = 4
"""Repeats after an answer that is none. Refusals that pass by themselves are repeated until the time is up."""
KEEP_ALIVE = 30.0
"""Seconds that an idle connection is kept: over the pauses of a slow poll, below the idle limit of usual proxies."""
MAX_REPLY = 32 * 1024 * 1024
"""Bytes of one answer. Three times Upstash's own limit for a command's result, which base64 makes a third longer."""


def backoff(repeat: int) -> float:
    """Seconds before repeat number `repeat` (from 0): doubling from 0.1 to 2, half of it random."""
    return random.uniform(0.5, 1.0) * min(2.0, 0.1 * 2.0**repeat)


class _Base(Generic[C]):
    """Address, headers, limits. `C` is the kind of httpx client."""

    blocking = False

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout: Duration = TOTAL,
        read_timeout: Duration = READ,
        sync_token: str | None = None,
        allow_http: bool = False,
        max_reply: int = MAX_REPLY,
        http_client: C | Callable[[], C] | None = None,
    ) -> None:
        """A transport for the database at `url`; nothing is opened yet.

        - `timeout`: the longest that a call may take, repeats included. A server that trickles its answer is cut
          off then, too; only one that trickles the very headers can stretch a sync call, by `read_timeout` a byte.
        - `read_timeout`: how long the server may stay silent before the call is sent again.
        - `allow_http`: permit plain http:// to another machine, which shows the token to the network.
        - `max_reply`: bytes; a larger answer is dropped unread, as TransportError.
        - `http_client`: a client of your own, or a function that makes one for each process or event loop.
        """
        self.url, self.host, self._tls = _check_url(url, allow_http)
        self.token = _check_token(token)
        self.timeout = to_ms(timeout, "timeout", least=0.05) / 1000
        self.read_timeout = to_ms(read_timeout, "read_timeout", least=0.05) / 1000
        self.max_reply = max_reply
        self.warm = False
        """Whether a call was answered before, so that a connection may be a kept one."""
        self._sync_token = sync_token
        self._given = http_client
        self._start()

    def _start(self) -> None:
        """Make the place where the clients are kept."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.host!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} holds a token and connections; make one where it is used")

    @property
    def sync_token(self) -> str | None:
        """Upstash's read-your-writes token as of the latest write that this transport knows of."""
        return self._sync_token

    def headers(self) -> dict[str, str]:
        from . import __version__

        headers = {
            "Authorization": f"Bearer {self.token}",
            "Content-Type": "application/json",
            "Upstash-Encoding": "base64",
            "User-Agent": f"outlast/{__version__}",
        }
        if self._sync_token is not None:
            headers["Upstash-Sync-Token"] = self._sync_token
        return headers

    def saw(self, headers: Mapping[str, str]) -> None:
        """Keep the sync token of an answer. Where it is a counter, a late answer does not set it back."""
        self.warm = True
        new, old = headers.get("upstash-sync-token"), self._sync_token
        if not new or (old and new.isdecimal() and old.isdecimal() and int(new) < int(old)):
            return
        self._sync_token = new

    def clean(self, text: str, limit: int = 300) -> str:
        """Text from outside, fit for a message: one line, no secret, and no argument of ours quoted back."""
        text = text.partition(", with args beginning")[0].replace(self.token, "***")
        return "".join(c if c.isprintable() else " " for c in text)[:limit].strip()

    def _options(self) -> dict[str, Any]:
        if sys.platform == "emscripten":  # only fetch() reaches anything there; the plain transport never gets here
            from .jsfetch import FetchTransport

            return {"transport": FetchTransport()}
        import httpx

        return {
            # Without TLS no certificates need to be loaded, which is most of what a client costs.
            "verify": _ssl_context() if self._tls else False,
            # A proxy for the internet has no way to this machine's own loopback.
            "trust_env": self._tls or not _is_loopback(self.host),
            "limits": httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=KEEP_ALIVE),
        }

    def _make(self, class_: Callable[..., C]) -> C:
        if callable(self._given):
            make: Any = self._given
            made: C = make()
            return made
        try:
            return class_(**self._options())
        except (OSError, ValueError) as error:  # a certificate file or a proxy variable that cannot be used
            raise ConfigurationError(f"no HTTP client can be made: {self.clean(str(error))}") from error


class RestTransport(_Base["httpx.Client"]):
    """Calls over HTTP, for plain code. Threads may share it; after a fork each process opens its own connections."""

    def _start(self) -> None:
        self._clients: dict[int, httpx.Client] = {}

    def _client(self) -> httpx.Client:
        if self._given is not None and not callable(self._given):
            return self._given
        pid = os.getpid()
        client = self._clients.get(pid)
        if client is None:
            if sys.platform == "emscripten" and self._given is None:
                raise ConfigurationError("WebAssembly has no blocking sockets; use AsyncClient instead of Client")
            import httpx

            made = self._make(httpx.Client)
            client = self._clients.setdefault(pid, made)
            if client is not made:  # another thread was quicker
                made.close()
        return client

    def send(self, call: Call[T], *, block: float | None = None) -> T:
        """Send one call. HTTP cannot wait on the server, so `block` means nothing here."""
        value: T = self._run(_Exchange(self, [call], pipeline=False))[0]
        return value

    def send_many(self, calls: Sequence[Call[Any]], *, outcomes: bool = False) -> list[Any]:
        """Send independent calls in one request."""
        return self._run(_Exchange(self, calls, pipeline=True, outcomes=outcomes)) if calls else []

    def _run(self, exchange: _Exchange) -> list[Any]:
        client = self._client()
        while True:
            try:
                with client.stream("POST", **exchange.request()) as response:
                    exchange.begin(response)
                    for piece in response.iter_bytes():
                        exchange.piece(piece)
                pause = exchange.answered(response)
            except OutlastError:
                raise
            except Exception as error:
                pause = exchange.failed(error)
            if pause is None:
                return exchange.values()
            if pause:
                sleep(pause)

    def close(self) -> None:
        """Close the connections. A later call opens new ones."""
        client = self._clients.pop(os.getpid(), None)
        if client is not None:
            client.close()


class _Held(NamedTuple):
    client: httpx.AsyncClient
    keeper: AsyncGenerator[httpx.AsyncClient, None]


class AsyncRestTransport(_Base["httpx.AsyncClient"]):
    """Calls over HTTP, for coroutines. Each event loop has connections of its own, which end with the loop."""

    def _start(self) -> None:
        # Keyed by the loop itself, not by its id(), which the next loop may get.
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, _Held] = WeakKeyDictionary()

    async def _client(self) -> httpx.AsyncClient:
        if self._given is not None and not callable(self._given):
            return self._given
        import asyncio  # 20 ms of CPU, which a plain cold function need not pay

        loop = asyncio.get_running_loop()
        held = self._clients.get(loop)
        if held is None:
            for ref in self._clients.keyrefs():
                if (other := ref()) is not None and other.is_closed():
                    # A loop that was closed by hand. The client refers to it, so nothing else would let go.
                    self._clients.pop(other, None)
            keeper = self._keep(loop)
            # Runs up to the yield without giving way, so that two tasks cannot both get here.
            held = self._clients[loop] = _Held(await anext(keeper), keeper)
        return held.client

    async def _keep(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[httpx.AsyncClient, None]:
        """Holds a loop's client. asyncio.run ends open generators before it closes the loop: then it is closed."""
        import httpx

        async with self._make(httpx.AsyncClient) as client:
            try:
                yield client
            finally:
                self._clients.pop(loop, None)

    async def send(self, call: Call[T], *, block: float | None = None) -> T:
        """Send one call. HTTP cannot wait on the server, so `block` means nothing here."""
        value: T = (await self._run(_Exchange(self, [call], pipeline=False)))[0]
        return value

    async def send_many(self, calls: Sequence[Call[Any]], *, outcomes: bool = False) -> list[Any]:
        """Send independent calls in one request."""
        return await self._run(_Exchange(self, calls, pipeline=True, outcomes=outcomes)) if calls else []

    async def _run(self, exchange: _Exchange) -> list[Any]:
        import asyncio

        client = await self._client()
        while True:
            try:
                async with (
                    asyncio.timeout(exchange.left()),
                    client.stream("POST", **exchange.request()) as response,
                ):
                    exchange.begin(response)
                    async for piece in response.aiter_bytes():
                        exchange.piece(piece)
                pause = exchange.answered(response)
            except OutlastError:
                raise
            except Exception as error:
                pause = exchange.failed(error)
            if pause is None:
                return exchange.values()
            if pause:
                await asyncio.sleep(pause)

    async def aclose(self) -> None:
        """Close the running loop's connections. A later call opens new ones."""
        import asyncio

        held = self._clients.get(asyncio.get_running_loop())
        if held is not None:
            await held.keeper.aclose()


class _Exchange:
    """Calls on their way until each has its answer: what to post, what came back, how long to pause. No I/O."""

    def __init__(self, rest: _Base[Any], calls: Sequence[Call[Any]], *, pipeline: bool, outcomes: bool = False) -> None:
        self._rest = rest
        self._calls = calls
        self._pipeline = pipeline
        self._outcomes = outcomes
        self._deadline = monotonic() + rest.timeout
        self._replies: list[Any] = [None] * len(calls)
        self._open = list(range(len(calls)))
        self._unknown: set[int] = set()
        """Slots whose script the server does not know."""
        self._sourced: set[int] = set()
        """Those of them that were sent with its text."""
        self._refused: ServerError | None = None
        self._applied = False
        self._sends = 0
        self._repeats = 0
        self._body = bytearray()

    def left(self) -> float:
        return max(0.001, self._deadline - monotonic())

    def request(self) -> dict[str, Any]:
        """What to POST now: the calls that have no answer yet."""
        import httpx

        self._bringing: list[int] = []
        commands = [self._calls[slot].command(source=self._needs_source(slot)) for slot in self._open]
        try:
            content = json.dumps(
                commands if self._pipeline else commands[0], ensure_ascii=False, separators=(",", ":")
            ).encode()
        except UnicodeEncodeError:
            raise InvalidArgumentError("an argument has half a surrogate pair; give text that UTF-8 can hold") from None
        self._sends += 1
        self._body.clear()
        left, read = self.left(), self._rest.read_timeout
        return {
            "url": self._rest.url + ("/pipeline" if self._pipeline else ""),
            "content": content,
            "headers": self._rest.headers(),
            "timeout": httpx.Timeout(min(read, left), connect=min(CONNECT, left), pool=left),
            "follow_redirects": False,
            "auth": None,
        }

    def _needs_source(self, slot: int) -> bool:
        """The first of many calls of a script brings its text for all."""
        script = self._calls[slot].script
        if slot not in self._unknown or any(self._calls[other].script is script for other in self._bringing):
            return False
        self._bringing.append(slot)
        self._sourced.add(slot)
        return True

    def begin(self, response: httpx.Response) -> None:
        size = response.headers.get("content-length", "")
        if size.isdecimal():
            self._check_size(int(size))

    def piece(self, piece: bytes) -> None:
        self._body += piece
        self._check_size(len(self._body))
        if monotonic() > self._deadline:
            raise self._late()

    def _check_size(self, size: int) -> None:
        if size > self._rest.max_reply:
            raise self._error(f"answered with more than max_reply={self._rest.max_reply} bytes")

    # -- what came back ----------------------------------------------------------------------------------------------

    def answered(self, response: httpx.Response) -> float | None:
        """None when every call has its answer, else the seconds until the rest is sent again."""
        status = response.status_code
        try:
            data: Any = json.loads(self._body.decode("utf-8"))
        except (ValueError, RecursionError):
            return self._unusable(response, _excerpt(bytes(self._body)))
        slots: list[Any] = [data]
        if self._pipeline:
            # A refusal of the whole pipeline stands for each of its commands; anything else is no answer.
            slots = data if is_list(data) else [data] * len(self._open)
            if len(slots) != len(self._open):
                return self._unusable(response, "another number of answers than of commands")
        still_open: list[int] = []
        pause = 0.0
        replies: list[tuple[int, Any]] = []
        for slot, item in zip(self._open, slots, strict=True):
            match item:
                case {"error": str(message)}:
                    error = self._refusal(status, message)
                    if isinstance(error, TransportError):
                        return self._again(error, _retry_after(response))
                    if error.code == "NOSCRIPT" and self._calls[slot].script and slot not in self._sourced:
                        self._unknown.add(slot)
                        still_open.append(slot)
                    elif error.code in TRANSIENT:
                        self._refused = error
                        pause = backoff(self._repeats)
                        still_open.append(slot)
                    else:
                        replies.append((slot, error))
                case {"result": value} if status < 300 and not (self._pipeline and data is item):
                    try:
                        replies.append((slot, _decode(value)))
                    except ValueError:
                        return self._unusable(response, "a result that is not base64")
                case _:
                    return self._unusable(response, "JSON that is neither a result nor an error")
        self._rest.saw(response.headers)
        for slot, reply in replies:
            self._replies[slot] = reply
        self._open = still_open
        if not still_open:
            return None
        if pause:
            self._repeats += 1
            pause = max(pause, _retry_after(response) or 0.0)
            if monotonic() + pause >= self._deadline:
                assert self._refused is not None
                raise self._refused
        return pause

    def values(self) -> list[Any]:
        """The decoded answers. The first refusal is raised, or stands among them."""
        if self._outcomes:
            return [outcome_of(call, reply) for call, reply in zip(self._calls, self._replies, strict=True)]
        for reply in self._replies:
            if isinstance(reply, ServerError):
                raise reply
        return [call.decode(reply) for call, reply in zip(self._calls, self._replies, strict=True)]

    def _refusal(self, status: int, message: str) -> ServerError | TransportError:
        text = self._rest.clean(message) or "ERR refused without a reason"
        error = server_error(text)
        if status == 401 or error.code in ("WRONGPASS", "NOAUTH"):
            return AuthError(f"{self._rest.host} refused the token: {text}", code=error.code)
        if type(error) is not ServerError or error.code in TRANSIENT or error.code == "NOSCRIPT":
            return error
        if status == 429 or status >= 500:
            return self._error(f"answered {status}: {text}", status=status, applied=status != 429)
        return error

    def _unusable(self, response: httpx.Response, what: str) -> float:
        """An answer that is none of this protocol's: a proxy's page, a cut body, another server."""
        status = response.status_code
        if status == 401:
            raise AuthError(f"{self._rest.host} answered 401 with {self._rest.clean(what)}", code="WRONGPASS")
        if 300 <= status < 400:
            what = "a redirect, which is not followed; give the address that it leads to"
        # The command reached no database, except where a server on the way gave up waiting for it.
        elsewhere = 300 <= status < 500 and status not in (408, 425)
        error = self._error(f"answered {status} with {what}", status=status, applied=not elsewhere)
        if elsewhere and status != 429:
            raise error
        return self._again(error, _retry_after(response))

    def failed(self, cause: Exception) -> float:
        """The seconds until the next try, after an exception of the HTTP client. Raises TransportError."""
        import httpx

        what = self._rest.clean(f"{type(cause).__name__}: {cause}")
        if isinstance(cause, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError)):
            error = self._error(f"cannot be reached: {what}", applied=False)
        elif isinstance(cause, httpx.TimeoutException):
            error = self._error(f"was silent for {self._rest.read_timeout:g} s")
        elif isinstance(cause, TimeoutError):
            raise self._late() from cause
        elif isinstance(cause, (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.LocalProtocolError)):
            raise ConfigurationError(f"no request can be made for {self._rest.host}: {what}") from cause
        elif isinstance(cause, httpx.TransportError):
            error = self._error(f"cut the connection: {what}")
            error.__cause__ = cause
            return self._again(error, at_once=self._rest.warm)
        elif isinstance(cause, httpx.HTTPError):
            error = self._error(f"gave an answer that cannot be read: {what}")
        else:
            # The caller's own client, closed or bound to another loop: not mended by trying again.
            raise self._error(f"could not be asked: {what}") from cause
        error.__cause__ = cause
        return self._again(error)

    # -- whether to go on --------------------------------------------------------------------------------------------

    def _again(self, error: TransportError, retry_after: float | None = None, *, at_once: bool = False) -> float:
        """The seconds until the next try, or `error` when there must be none."""
        error.retry_after = retry_after
        if error.maybe_applied and not all(self._calls[slot].replayable for slot in self._open):
            raise error
        pause = 0.0 if at_once and self._repeats == 0 else backoff(self._repeats)
        pause = max(pause, retry_after or 0.0)
        if self._repeats >= REPEATS or monotonic() + pause >= self._deadline:
            raise error
        self._repeats += 1
        import logging

        logging.getLogger("outlast").debug("%s; sent again in %.2f s", error, pause)
        return pause

    def _error(self, what: str, *, status: int | None = None, applied: bool = True) -> TransportError:
        # Once one try may have taken effect, no later one makes the outcome known again.
        self._applied = self._applied or applied
        tries = "" if self._sends < 2 else f" (try {self._sends})"
        outcome = "; whether the call took effect is unknown" if self._applied else ""
        return TransportError(f"{self._rest.host} {what}{tries}{outcome}", maybe_applied=self._applied, status=status)

    def _late(self) -> TransportError:
        return self._error(f"gave no whole answer within timeout={self._rest.timeout:g} s")


# -- details ---------------------------------------------------------------------------------------------------------


def _decode(value: Any) -> Any:
    """A base64 reply in its bytes. OK is never encoded, and cannot be mistaken: base64 has no text of length 2."""
    if isinstance(value, str):
        return value if value == "OK" else a2b_base64(value, strict_mode=True)
    if is_list(value):
        return [_decode(part) for part in value]
    if value is None or isinstance(value, int):
        return value
    raise ValueError("neither text, number, list nor null")


def _excerpt(body: bytes) -> str:
    """Enough to recognise a proxy's page by. Of what may be a reply nothing is quoted: it can hold a payload."""
    text = body[:2000].decode("utf-8", "replace").strip()
    if not text:
        return "an empty body"
    if text[0] == "<":
        _, _, rest = text.partition("<title>")
        title = rest.partition("<")[0].strip()
        return f"an HTML page{f' titled {title[:60]!r}' if title else ''}"
    if text[0] in '{["' or not text.isascii():
        return f"{len(body)} bytes that are not JSON"
    return f"{text[:60]!r}"


def _retry_after(response: httpx.Response) -> float | None:
    value = response.headers.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value[:9])
    if value:
        from datetime import UTC, datetime
        from email.utils import parsedate_to_datetime

        try:
            return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
        except (ValueError, TypeError):
            return None
    return None


@cache
def _ssl_context() -> Any:
    import httpx

    return httpx.create_ssl_context()


def _is_loopback(host: str) -> bool:
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    name = name.strip("[]")
    return (
        name in ("localhost", "::1")
        or name.endswith(".localhost")
        or (name.startswith("127.") and name[-1].isdecimal())
    )


def _check_url(url: str, allow_http: bool) -> tuple[str, str, bool]:
    """The URL without trailing slashes, its host and port, and whether it has TLS. No message quotes the URL."""
    from urllib.parse import urlsplit

    url = url.strip()
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigurationError("url is not a URL; give one such as https://name.upstash.io") from None
    if parts.scheme not in ("https", "http") or not parts.hostname:
        hint = "take the quotes off" if url[:1] in "\"'" and url else "give one such as https://name.upstash.io"
        raise ConfigurationError(f"url starts with neither https:// nor http:// and a host; {hint}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigurationError("url has a user, a query or a fragment; give the secret as token, not in the URL")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    host = host if port is None else f"{host}:{port}"
    if parts.scheme == "http" and not allow_http and not _is_loopback(host):
        raise ConfigurationError(
            f"http://{host} would show the token to the network; use https://, or say allow_http=True"
        )
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}", host, parts.scheme == "https"


def _check_token(token: str) -> str:
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token or token[0] in "\"'":
        raise ConfigurationError(
            "token is empty, or has quotes, blanks, line breaks or characters outside ASCII; "
            "copy it again without what surrounds it"
        )
    return token
