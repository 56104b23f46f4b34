"""Jobs over HTTP on Cloudflare: POST /v1/jobs, GET /v1/jobs/<id>, its /events as a stream, POST its /cancel."""

import hmac
from typing import Any

from starlette.requests import Request
from workers import WorkerEntrypoint, asgi, env

from outlast import AsyncClient, Queue
from outlast_edge import Edge

generate = Queue("generate", payload=dict, result=str)


def who(request: Request, action: str, job: Any) -> str | None:
    """Whose jobs the caller may make and see. Your session goes here; this one knows a single caller by a secret."""
    given = request.headers.get("authorization", "")
    known = hmac.compare_digest(given.encode(), f"Bearer {env.API_TOKEN}".encode())
    return "the caller" if known else None


# The client reads the secrets at its first call and speaks through fetch(); it holds nothing between requests.
app = Edge(AsyncClient.from_env(env), queues=[generate], authorize=who).app()


class Default(WorkerEntrypoint):
    async def fetch(self, request: Any) -> Any:
        return await asgi.fetch(app, request, self.env, self.ctx)
