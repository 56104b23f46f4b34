"""The demo: a page to put a prompt into, and to be rude to. Plain HTML, CSS and JavaScript, nothing from elsewhere.

::

    edge = Edge(client, queues=[generate], authorize=lambda request, action, job: ANY)
    app = demo_app(edge, model="SmolLM2-135M", note="runs on this machine")

The queue's payload is ``{"prompt": "…"}`` and its result the text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from outlast import InvalidArgumentError

from .._edge import Edge

__all__ = ["demo_app", "demo_routes"]

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_FILES = {
    "/": ("demo/page.html", "text/html"),
    "/demo/page.css": ("demo/page.css", "text/css"),
    "/demo/page.js": ("demo/page.js", "text/javascript"),
    "/demo/watch.js": ("watch.js", "text/javascript"),
    "/demo/icon.svg": ("demo/icon.svg", "image/svg+xml"),
}


def demo_app(edge: Edge, *, queue: str = "generate", model: str | None = None, note: str | None = None) -> Starlette:
    """An application with the edge's routes and the page at ``/``.

    `queue` is the one that the page uses. `model` names who answers and `note` says more of it, such as how to get a
    better one; the page shows both. Raises InvalidArgumentError when the edge does not serve the queue.
    """
    return Starlette(routes=[*edge.routes, *demo_routes(edge, queue=queue, model=model, note=note)])


def demo_routes(
    edge: Edge, *, queue: str = "generate", model: str | None = None, note: str | None = None
) -> list[BaseRoute]:
    """The page and what it loads, for an application that has the edge's routes already."""
    if queue not in edge.queues:
        raise InvalidArgumentError(f"queue={queue!r} is not served by this edge; choose from {sorted(edge.queues)}")
    info = {"model": model, "note": note, "jobs_url": f"{edge.prefix}/queues/{quote(queue, safe='')}/jobs".lstrip("/")}

    async def tell(request: Request) -> Response:
        return JSONResponse(info, headers=_HEADERS)

    return [*(Route(path, _file(*source)) for path, source in _FILES.items()), Route("/demo/info", tell)]


def _file(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def give(request: Request) -> Response:
        return Response(files("outlast_edge").joinpath(name).read_bytes(), media_type=kind, headers=_HEADERS)

    return give
