"""Jobs in a Flask application: flask --app flask_app run."""

from itertools import chain
from typing import Any

from flask import Flask, Response, abort, request, url_for

from outlast import Client, InvalidArgumentError, Job, Queue
from outlast_edge import sse_frames

app = Flask(__name__)
generate = Queue("generate", payload=dict, result=str)
jobs = Client().queue(generate)


def user() -> str:
    """Who is asking. Your sign-in goes here."""
    return request.headers.get("x-user") or abort(401)


def own(job_id: str) -> Job[Any, Any]:
    """An id is no permission: somebody else's job looks like one that does not exist."""
    job = jobs.get(job_id)
    return job if job is not None and job.owner == user() else abort(404)


@app.post("/jobs")
def create() -> tuple[dict[str, Any], int]:
    payload = {"prompt": str(request.get_json()["prompt"])}
    job = jobs.enqueue(payload, owner=user(), idempotency_key=request.headers.get("idempotency-key"))
    return {"id": job.id, "events_url": url_for("events", job_id=job.id)}, 202


@app.get("/jobs/<job_id>/events")
def events(job_id: str) -> Response:
    job = own(job_id)
    after = request.headers.get("last-event-id")  # EventSource sends it when it comes back
    try:
        # A stream keeps a thread of the server for as long as it lasts: it ends after half a minute, and is resumed.
        frames = sse_frames(jobs.watch(job_id, after=after, timeout=30))
    except InvalidArgumentError:
        abort(400)
    if job.status in ("completed", "failed", "cancelled"):
        first = next(frames, None)
        if first is None:
            return Response(status=204)  # the viewer has seen the end: this stops its reconnecting
        frames = chain([first], frames)
    # A first line at once opens the stream in the browser; it belongs to the first event's block.
    frames = chain([b"retry: 1000\n"], frames)
    headers = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
    return Response(frames, content_type="text/event-stream", headers=headers)


@app.post("/jobs/<job_id>/cancel")
def cancel(job_id: str) -> dict[str, Any]:
    own(job_id)
    return {"cancelled": jobs.cancel(job_id)}
