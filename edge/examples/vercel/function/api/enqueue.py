"""A plain function on Vercel: POST {"prompt": "…"} to /api/enqueue. One HTTP request to the database."""

import hmac
import json
import os
from http.server import BaseHTTPRequestHandler
from typing import Any

from outlast import Client, IdempotencyConflictError, InvalidArgumentError, Queue

generate = Queue("generate", payload=dict, result=str)
jobs = Client().queue(generate)  # for all requests of this instance, which come in threads


class handler(BaseHTTPRequestHandler):  # the name that Vercel looks for
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        expected = f"Bearer {os.environ['API_TOKEN']}"
        if not hmac.compare_digest(self.headers.get("authorization", "").encode(), expected.encode()):
            return self.answer(401, {"error": "who are you?"})
        try:
            prompt = str(json.loads(body)["prompt"])
            # A click that is sent twice is one job: the browser makes the key, once for each click.
            job = jobs.enqueue({"prompt": prompt}, idempotency_key=self.headers.get("idempotency-key"))
        except IdempotencyConflictError as error:
            return self.answer(422, {"error": "this key belongs to another prompt", "id": error.job_id})
        except (ValueError, KeyError, TypeError, InvalidArgumentError):
            return self.answer(400, {"error": 'send {"prompt": "…"}'})
        return self.answer(200 if job.deduplicated else 202, {"id": job.id})

    def answer(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
