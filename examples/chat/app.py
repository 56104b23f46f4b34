"""The web server: uvicorn app:app."""

import secrets
from pathlib import Path
from typing import Any

from jobs import chat
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from outlast import AsyncClient
from outlast_edge import Edge
from outlast_edge.facades.ai_sdk import AiSdk

PAGE = Path(__file__).parent / "web" / "dist"


def who(request: Request, action: str, job: Any) -> str | None:
    """Whose chats these are. Your sign-in goes here; this one knows a browser by a cookie."""
    return request.cookies.get("visitor")


async def page(request: Request) -> Response:
    response = FileResponse(PAGE / "index.html", headers={"Cache-Control": "no-cache"})
    if "visitor" not in request.cookies:
        secure = request.url.scheme == "https"
        response.set_cookie("visitor", secrets.token_hex(16), max_age=31_536_000, httponly=True, secure=secure)
    return response


edge = Edge(AsyncClient(), queues=[chat], authorize=who)
app = Starlette(
    routes=[
        Route("/", page),
        Mount("/assets", StaticFiles(directory=PAGE / "assets", check_dir=False)),
        *AiSdk(edge, replay_finished=True).routes,
    ]
)
