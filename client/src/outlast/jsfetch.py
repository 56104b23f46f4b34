"""httpx over the JavaScript `fetch()`, for Python in WebAssembly: Pyodide, Cloudflare Python Workers.

There are no sockets and no TLS there except inside fetch(). `AsyncRestTransport` takes this transport by itself where
``sys.platform == "emscripten"``. It holds nothing between requests, so one client may serve them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib import import_module
from typing import Any

import httpx

__all__ = ["FetchTransport"]

js: Any = import_module("js")
ffi: Any = import_module("pyodide.ffi")

# fetch() sets these itself, and refuses some of them or goes by its own value.
_NOT_SENT = frozenset({"accept-encoding", "connection", "content-length", "host", "transfer-encoding"})
# fetch() has decoded the body already: these describe bytes that nobody here has seen.
_NOT_TOLD = frozenset({"content-encoding", "content-length", "transfer-encoding"})


class FetchTransport(httpx.AsyncBaseTransport):
    """One fetch() a request. Redirects are returned, not followed.

    Of the timeouts only `read` exists: it bounds the wait for the response's head and for each part of its body.
    fetch() cannot say whether a request that failed was sent, so every failure is a ReadError or ReadTimeout, never a
    ConnectError: callers must take it as "may have happened".
    """

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        limit: float | None = request.extensions.get("timeout", {}).get("read")
        abort = js.AbortController.new()
        options: dict[str, Any] = {
            "method": request.method,
            "headers": [[name, value] for name, value in request.headers.multi_items() if name not in _NOT_SENT],
            "redirect": "manual",
            "signal": abort.signal,
        }
        if body:
            options["body"] = ffi.to_js(body)
        url = str(request.url)
        response = await _settled(
            js.fetch(url, ffi.to_js(options, dict_converter=js.Object.fromEntries)), limit, abort, request
        )
        reader = response.body.getReader() if response.body else None
        return httpx.Response(
            response.status,
            headers=[(name, value) for name, value in response.headers if name not in _NOT_TOLD],
            stream=_Body(reader, limit, abort, request),
        )


class _Body(httpx.AsyncByteStream):
    """The response's body as it arrives. Closing it early aborts the request, which frees its connection."""

    def __init__(self, reader: Any, limit: float | None, abort: Any, request: httpx.Request) -> None:
        self._reader = reader
        self._limit = limit
        self._abort = abort
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self._reader is not None:
            part = await _settled(self._reader.read(), self._limit, self._abort, self._request)
            if part.done:
                self._reader = None
            else:
                yield part.value.to_bytes()

    async def aclose(self) -> None:
        if self._reader is not None:
            self._reader = None
            self._abort.abort()


async def _settled(promise: Any, limit: float | None, abort: Any, request: httpx.Request) -> Any:
    """What a promise of fetch() resolves to; whoever stops waiting for it also stops the request."""
    try:
        return await asyncio.wait_for(promise, limit)
    except TimeoutError as error:
        abort.abort()
        raise httpx.ReadTimeout(f"nothing came for {limit:g} s", request=request) from error
    except asyncio.CancelledError:
        abort.abort()
        raise
    except ffi.JsException as error:
        raise httpx.ReadError(str(error), request=request) from error
