"""Jobs in a Django application, whole in one file: python django_app.py runserver.

In a project of your own the views go into views.py and the paths into urls.py.
"""

import json
import os
import sys
from itertools import chain

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.urls import path, reverse
from django.views.decorators.http import require_GET, require_POST

from outlast import Client, InvalidArgumentError, Job, Queue
from outlast_edge import sse_frames

generate = Queue("generate", payload=dict, result=str)
jobs = Client().queue(generate)


def user(request: HttpRequest) -> str:
    """Who is asking. Your sign-in goes here: str(request.user.pk) behind @login_required."""
    return request.headers.get("x-user", "nobody")


def own(request: HttpRequest, job_id: str) -> Job:
    """An id is no permission: somebody else's job looks like one that does not exist."""
    job = jobs.get(job_id)
    if job is None or job.owner != user(request):
        raise Http404
    return job


@require_POST
def create(request: HttpRequest) -> HttpResponseBase:
    payload = {"prompt": str(json.loads(request.body)["prompt"])}
    job = jobs.enqueue(payload, owner=user(request), idempotency_key=request.headers.get("idempotency-key"))
    return JsonResponse({"id": job.id, "events_url": reverse("events", args=[job.id])}, status=202)


@require_GET
def events(request: HttpRequest, job_id: str) -> HttpResponseBase:
    job = own(request, job_id)
    after = request.headers.get("last-event-id")  # EventSource sends it when it comes back
    try:
        # A stream keeps a thread of the server for as long as it lasts: it ends after half a minute, and is resumed.
        frames = sse_frames(jobs.watch(job_id, after=after, timeout=30))
    except InvalidArgumentError:
        return HttpResponse(status=400)
    if job.status in ("completed", "failed", "cancelled"):
        first = next(frames, None)
        if first is None:
            return HttpResponse(status=204)  # the viewer has seen the end: this stops its reconnecting
        frames = chain([first], frames)
    # A first line at once opens the stream in the browser; it belongs to the first event's block.
    frames = chain([b"retry: 1000\n"], frames)
    headers = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
    return StreamingHttpResponse(frames, content_type="text/event-stream", headers=headers)


@require_POST
def cancel(request: HttpRequest, job_id: str) -> HttpResponseBase:
    own(request, job_id)
    return JsonResponse({"cancelled": jobs.cancel(job_id)})


urlpatterns = [
    path("jobs", create),
    path("jobs/<job_id>/events", events, name="events"),
    path("jobs/<job_id>/cancel", cancel),
]

settings.configure(
    ROOT_URLCONF=__name__,
    SECRET_KEY=os.environ.get("DJANGO_SECRET_KEY", os.urandom(32).hex()),
    ALLOWED_HOSTS=["127.0.0.1", "localhost"],
)
application = get_wsgi_application()

if __name__ == "__main__":
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)
