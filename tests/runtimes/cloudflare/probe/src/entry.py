"""A Worker that reports what is possible where: while it starts, and inside a request."""

import json
import os
import sys
import uuid
import warnings
from typing import Any

from workers import Response, WorkerEntrypoint, asgi, env

from outlast import AsyncClient, Client, ConfigurationError, Queue
from outlast_edge import Edge


def attempt(what: Any) -> str:
    try:
        what()
    except OSError as error:
        return str(error)
    return "allowed"


at_start = {"uuid4": attempt(uuid.uuid4), "urandom": attempt(lambda: os.urandom(8))}

plain = Queue("generate")
client = AsyncClient.from_env(env)
jobs = client.queue(plain)
with warnings.catch_warnings(record=True):
    app = Edge(client, queues=[plain], public=True, keepalive=0.5).app()


class Default(WorkerEntrypoint):
    async def fetch(self, request: Any) -> Any:
        if "/v1/" in request.url:
            return await asgi.fetch(app, request, self.env, self.ctx)
        made = await jobs.enqueue({"prompt": "žluťoučký 🐎"})
        job = await jobs.get(made.id)
        assert job is not None
        cancelled = await jobs.cancel(made.id)
        events = [event.type async for event in jobs.watch(made.id)]
        try:
            Client(env.UPSTASH_REDIS_REST_URL, env.UPSTASH_REDIS_REST_TOKEN).queue(plain).get("x")
            refused = ""
        except ConfigurationError as error:
            refused = str(error)
        report = {
            "python": list(sys.version_info[:2]),
            "at_start": at_start,
            "job": {"payload": job.payload, "status": job.status},
            "cancelled": cancelled,
            "events": events,
            "plain client": refused,
            "pydantic": "pydantic" in sys.modules,
            "transport": type((await client._transport._client())._transport).__name__,
        }
        return Response(json.dumps(report), headers={"content-type": "application/json"})
