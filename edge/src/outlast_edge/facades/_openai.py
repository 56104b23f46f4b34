"""What the two OpenAI facades share: models, errors, repeats of a request, waiting for a result."""

from __future__ import annotations

import json
from contextlib import suppress
from hashlib import sha256
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from outlast import IdempotencyConflictError, InvalidArgumentError, JobError, JobInUseError
from outlast.protocol import Call
from outlast.protocol.wire import maybe_text
from outlast.records import TERMINAL

from .._edge import AnyJob, AnyQueue, Edge, owned_key, parse_payload
from .._frames import dump
from .._http import Problem, idempotency_key, object_body
from ._facade import Facade, as_dict, submit

__all__ = ["OpenAIFacade", "payload_of", "text_of"]

KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
REPEAT_MS = 60_000
"""How long after its connection was lost a request counts as a repeat of the one before."""


class OpenAIFacade(Facade):
    """Where the official SDKs can point their `base_url`.

    A request's `model` names the queue, and its whole body is the payload. A model that is no queue's name goes to
    `default`; without `default` to the only queue there is, and with several it is unknown.

    The SDKs repeat a request by themselves when a connection breaks; such a repeat (``x-stainless-retry-count``) finds
    the job of the first one by caller and body, as any repeat does that carries an Idempotency-Key.
    """

    def __init__(self, edge: Edge, *, default: AnyQueue | None = None, path: str = "/v1") -> None:
        super().__init__(edge)
        self._default = self._only(default) if default is not None or len(edge.queues) == 1 else None
        self._path = path

    def _fail(self, problem: Problem) -> Response:
        kind = KINDS.get(problem.status, "server_error" if problem.status >= 500 else "invalid_request_error")
        error = {"message": problem.body["detail"], "type": kind, "code": problem.body["code"], "param": None}
        return Response(dump({"error": error}), problem.status, {**problem.headers, "Content-Type": "application/json"})

    def _queue_of(self, model: Any) -> AnyQueue:
        queue = self._edge.queues.get(model, self._default) if isinstance(model, str) else None
        if queue is None:
            raise Problem(404, "model_not_found", "There is no such model here.")
        return queue

    async def _create(self, request: Request) -> tuple[AnyQueue, AnyJob, dict[str, Any]]:
        """The job of a request, made or found again, and the request's body."""
        edge = self._edge
        caller = await edge._owner(request, "enqueue", None)
        if caller is None:
            raise Problem(401, "invalid_api_key", "You may not make requests here; check your API key.")
        owner = caller if isinstance(caller, str) else None
        body = await object_body(request, max(map(edge._most, edge.queues.values())))
        queue = self._queue_of(body.get("model"))
        payload = parse_payload(queue, body)
        jobs = edge._jobs(request, queue)
        key = idempotency_key(request)
        try:
            if key is not None:
                id, _ = await submit(jobs, payload, None, owner=owner, idempotency_key=owned_key(owner, key))
            else:
                route = json.dumps([owner, request.url.path, body], sort_keys=True)
                mark = f"{jobs._keys.base}posted:{sha256(route.encode()).hexdigest()}"
                lasts = str(REPEAT_MS + round(edge._limit(request.scope, edge._max_stream) * 1000))

                def note(id: str) -> Call[None]:
                    return Call(("SET", mark, id, "PX", lasts), lambda _: None)

                first = None
                if request.headers.get("x-stainless-retry-count", "0") != "0":
                    first = await jobs._transport.send(Call(("GET", mark), maybe_text))
                    if first is not None and (job := await jobs.get(first)) is not None:
                        return queue, job, body
                id, _ = await submit(jobs, payload, note, owner=owner, id=first)
        except IdempotencyConflictError:
            raise Problem(422, "idempotency_conflict", "This Idempotency-Key was used with another request.") from None
        except JobInUseError as error:
            id = error.job_id  # the first request has come through after all
        except InvalidArgumentError as error:
            raise Problem(422, "invalid", f"{error}.") from None
        job = await jobs.get(id)
        if job is None:
            raise Problem(503, "unavailable", "The request was taken, but cannot be read yet.")
        return queue, job, body

    async def _finished(self, request: Request, queue: AnyQueue, job: AnyJob) -> AnyJob:
        """The job after its end. An SDK that is sent away because it takes too long comes back for the same job."""
        edge = self._edge
        if job.status not in TERMINAL:
            shown = edge._jobs(request, edge._shown[queue.name])
            with suppress(TimeoutError, JobError):
                await shown.wait(job.id, timeout=edge._limit(request.scope, edge._max_stream))
            job = await edge._jobs(request, queue).get(job.id) or job
        if job.status not in TERMINAL:
            headers = {"x-should-retry": "true", "retry-after-ms": "100"}
            raise Problem(503, "still_running", "The job goes on; send the same request again.", headers=headers)
        return job


def payload_of(job: AnyJob) -> dict[str, Any]:
    """The request that made the job, as far as it can be read."""
    with suppress(ValueError, RecursionError):
        return as_dict(json.loads(job._payload or ""))
    return {}


def text_of(result: Any) -> str:
    """A result as text: itself, nothing for None, else its JSON."""
    return result if isinstance(result, str) else "" if result is None else dump(result).decode()
