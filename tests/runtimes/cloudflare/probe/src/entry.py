"""A Worker that reports what is possible where: while it starts, and inside a request."""

import json
import os
import sys
import uuid
from typing import Any

from workers import Response, WorkerEntrypoint, env

from outlast import AsyncClient, Client, ConfigurationError, Queue


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


class Default(WorkerEntrypoint):
    async def fetch(self, request: Any) -> Any:
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
