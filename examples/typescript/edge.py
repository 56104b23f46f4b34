"""outlast-edge behind the Next.js application: uvicorn edge:app --port 8100. Only that application may reach it."""

import hmac
import os
from typing import Any

from jobs import chat, generate
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request

from outlast import AsyncClient
from outlast_edge import Edge
from outlast_edge.facades.ai_sdk import AiSdk


def who(request: Request, action: str, job: Any) -> str | None:
    """The user whom the Next.js application has signed in. Its secret makes its word good."""
    expected = f"Bearer {os.environ['OUTLAST_EDGE_SECRET']}"
    if not hmac.compare_digest(request.headers.get("authorization", "").encode(), expected.encode()):
        raise HTTPException(401)
    return request.headers.get("x-user")


edge = Edge(AsyncClient(), queues=[generate, chat], authorize=who)
app = Starlette(routes=[*edge.routes, *AiSdk(edge, chat).routes])
