"""A plain handler behind a function URL: make a job, look at it, cancel it. Each is one HTTP request to the database.

POST /       {"prompt": "…"}     202 {"id": "…"}
GET /<id>                        200 {"status": "…", "result": …}
DELETE /<id>                     200 {"cancelled": true}
"""

import json
from typing import Any

from outlast import Client, IdempotencyConflictError, InvalidArgumentError, Queue

generate = Queue("generate", payload=dict, result=str)

# Made once for all invocations of this instance, and opened by the first: nothing happens while the module loads. A
# connection that died while the instance was frozen is replaced, and no call takes effect twice.
jobs = Client().queue(generate)


def handler(event: dict[str, Any], context: Any) -> dict[str, Any]:
    method = event["requestContext"]["http"]["method"]
    job_id = event["rawPath"].strip("/")
    if method == "POST" and not job_id:
        return create(event)
    if method == "GET" and job_id:
        job = jobs.get(job_id)
        if job is None:
            return answer(404, {"error": "no such job"})
        return answer(200, {"id": job.id, "status": job.status, "result": job.result, "progress": job.progress})
    if method == "DELETE" and job_id:
        return answer(200, {"cancelled": jobs.cancel(job_id)})
    return answer(405, {"error": "use POST /, GET /<id> or DELETE /<id>"})


def create(event: dict[str, Any]) -> dict[str, Any]:
    try:
        prompt = str(json.loads(event.get("body") or "")["prompt"])
        # A click that is sent twice is one job: the browser makes the key, once for each click.
        job = jobs.enqueue({"prompt": prompt}, idempotency_key=event["headers"].get("idempotency-key"))
    except IdempotencyConflictError as error:
        return answer(422, {"error": "this key belongs to another prompt", "id": error.job_id})
    except (ValueError, KeyError, TypeError, InvalidArgumentError):
        return answer(400, {"error": 'send {"prompt": "…"}'})
    return answer(200 if job.deduplicated else 202, {"id": job.id})


def answer(status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"statusCode": status, "headers": {"content-type": "application/json"}, "body": json.dumps(body)}
