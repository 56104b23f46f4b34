"""Jobs over HTTP on any ASGI server: uvicorn app:app, granian --interface asgi app:app, hypercorn app:app."""

import hmac
import os
from typing import Any

from starlette.requests import Request

from outlast import AsyncClient, Queue
from outlast_edge import Edge

generate = Queue("generate", payload=dict, result=str)


def who(request: Request, action: str, job: Any) -> str | None:
    """Whose jobs the caller may make and see. Your session goes here; this one knows a single caller by a secret."""
    expected = f"Bearer {os.environ['API_TOKEN']}"
    known = hmac.compare_digest(request.headers.get("authorization", "").encode(), expected.encode())
    return "the caller" if known else None


# With REDIS_URL and outlast-worker installed, viewers wait on the database itself instead of polling it.
app = Edge(AsyncClient(), queues=[generate], authorize=who).app()
