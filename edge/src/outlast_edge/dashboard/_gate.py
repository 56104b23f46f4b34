"""One token in front of a whole application: for a dashboard that somebody starts for himself."""

from __future__ import annotations

from hashlib import sha256
from hmac import compare_digest
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from outlast import InvalidArgumentError

__all__ = ["TokenGate"]


class TokenGate:
    """Lets in who has the token: once as ``?token=`` in the address, from then on by the cookie that this sets.

    The token leaves the address bar at once; the cookie holds a digest of it, ends with the browser's session, and no
    script can read it. Over plain HTTP both are readable on the way: beyond loopback put TLS in front.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        if len(token) < 16:
            raise InvalidArgumentError("token is shorter than 16 characters; use 32 random ones")
        self._app = app
        self._token = token.encode()
        self._key = sha256(b"outlast dashboard:" + self._token).hexdigest()
        # Cookies know no ports: another dashboard on this host has another name, or each would throw the other out.
        self._cookie = "outlast_" + self._key[:8]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            query = parse_qs(scope["query_string"].decode("latin-1"))
            if scope["method"] == "GET" and "token" in query:
                response = self._refused()
                if compare_digest(query["token"][0].encode(), self._token):
                    # Relative, so that it holds behind any proxy.
                    response = RedirectResponse("./", 303)
                    response.set_cookie(
                        self._cookie,
                        self._key,
                        path=scope.get("root_path") or "/",
                        secure=scope["scheme"] == "https",
                        httponly=True,
                        samesite="lax",
                    )
                response.headers.update({"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"})
                return await response(scope, receive, send)
            if not self._known(dict(scope["headers"]).get(b"cookie", b"").decode("latin-1")):
                return await self._refused()(scope, receive, send)
        elif scope["type"] == "websocket":
            return None
        return await self._app(scope, receive, send)

    def _known(self, header: str) -> bool:
        try:
            found = SimpleCookie(header).get(self._cookie)
        except CookieError:
            return False
        return found is not None and compare_digest(found.value.encode(), self._key.encode())

    @staticmethod
    def _refused() -> PlainTextResponse | RedirectResponse:
        text = "Open the address that `outlast dashboard` printed: it has the token.\n"
        return PlainTextResponse(text, 401, {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})
