"""Jobs over HTTP on Lambda, behind a function URL: POST /v1/jobs, GET /v1/jobs/<id>, its /events, POST its /cancel.

`app.handler` runs on AWS's own runtime, which sends an answer only once it is whole: viewers ask for the events as
JSON pages (`Accept: application/json`, `?after=<next>&wait=20`). `app.app` under `stream.py` streams them.
"""

import hmac
import os
from typing import Any

from mangum import Mangum
from starlette.requests import Request

from outlast import AsyncClient, Queue
from outlast_edge import Edge

generate = Queue("generate", payload=dict, result=str)


def who(request: Request, action: str, job: Any) -> str | None:
    """Whose jobs the caller may make and see. Your session goes here; this one knows a single caller by a secret."""
    expected = f"Bearer {os.environ['API_TOKEN']}"
    known = hmac.compare_digest(request.headers.get("authorization", "").encode(), expected.encode())
    return "the caller" if known else None


app = Edge(AsyncClient(), queues=[generate], authorize=who).app()
handler = Mangum(app, lifespan="off")  # "auto" would start and stop the app at every invocation
