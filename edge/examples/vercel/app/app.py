"""Jobs over HTTP on Vercel: POST /v1/jobs, GET /v1/jobs/<id>, its /events as a stream, POST its /cancel."""

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


# Nothing is opened before the first request, and the connection then serves all requests of this instance. An event
# stream ends by itself five seconds before `maxDuration`, and its viewer comes back for the rest.
app = Edge(AsyncClient(), queues=[generate], authorize=who).app()
