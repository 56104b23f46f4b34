"""The web server: uvicorn web:app. It makes jobs and shows them; it needs neither the model nor its key."""

from typing import Any

from jobs import summaries
from starlette.exceptions import HTTPException
from starlette.requests import Request

from outlast import AsyncClient
from outlast_edge import Edge


def who(request: Request, action: str, job: Any) -> str | None:
    """Whose jobs a caller may see: your session goes here. Other people's jobs answer like jobs that do not exist."""
    user = request.headers.get("x-user")
    if user is None:
        raise HTTPException(401, "Say who you are.")
    if action == "enqueue" and "idempotency-key" not in request.headers:
        # A browser that sends its request again must not start a second run.
        raise HTTPException(400, "Send an Idempotency-Key.")
    return user


app = Edge(AsyncClient(), queues=[summaries], authorize=who, accept=["webhook"]).app()
