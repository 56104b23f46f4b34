"""What every facade has: an edge's hook and limits behind its own routes, and its own form of refusal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from outlast import AsyncJobs, ConfigurationError
from outlast._checks import Duration
from outlast.protocol import Call

from .._edge import Action, AnyJob, AnyQueue, Edge, Target, problem_of
from .._http import Problem

__all__ = ["Facade", "as_dict", "as_list", "submit"]


class Facade:
    """Routes over the queues of an edge."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    @property
    def routes(self) -> list[BaseRoute]:
        """For the routes of your application, beside the edge's or without them."""
        raise NotImplementedError

    def app(self) -> Starlette:
        """An ASGI application with these routes and nothing else."""
        return Starlette(routes=self.routes)

    def _fail(self, problem: Problem) -> Response:
        """A refusal as the protocol's clients read it."""
        return problem.response()

    def _route(self, path: str, handler: Callable[[Request], Awaitable[Response]], *methods: str) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=400)  # to nobody
            except Exception as error:
                return self._fail(problem_of(error, f"{request.method} {path}"))

        route = Route(path, endpoint, methods=methods)
        route.methods = set(methods)  # without the HEAD that Starlette adds: nobody should hold a stream unseen
        return route

    def _only(self, queue: AnyQueue | None) -> AnyQueue:
        """`queue`, or the only one that there is."""
        queues = self._edge.queues
        if queue is None and len(queues) == 1:
            return next(iter(queues.values()))
        if queue is None or queue.name not in queues:
            raise ConfigurationError(f"{type(self).__name__} needs one queue of its edge; choose from {sorted(queues)}")
        return queue

    async def _load(self, request: Request, action: Action, queue: AnyQueue, id: str) -> AnyJob | None:
        """The job, if it is there for this caller."""
        edge = self._edge
        return await edge._load(request, action, Target(queue, "job", id, ""), edge._jobs(request, queue))


async def submit(
    jobs: AsyncJobs[Any, Any],
    payload: Any,
    note: Callable[[str], Call[Any]] | None,
    *,
    owner: str | None,
    id: str | None = None,
    idempotency_key: str | None = None,
) -> tuple[str, Any]:
    """Enqueue; the job's id. `note(id)` is written in the same round trip, and its answer comes back too.

    The note comes first: a crash in between leaves a note without a job, which readers take for no note at all, and
    never a job that nobody can find.
    """
    rest: dict[str, Duration | None] = dict.fromkeys(
        ("idempotency_ttl", "max_attempts", "timeout", "expires", "deadline", "result_ttl")
    )
    order = jobs._order(
        payload,
        id=id,
        idempotency_key=idempotency_key,
        owner=owner,
        priority=0,
        delay=0.0,
        **rest,  # type: ignore[arg-type]
    )
    if note is None:
        return (await jobs._transport.send(order.call)).id, None
    noted, made = await jobs._transport.send_many([note(order.id), order.call])
    return made.id, noted


def as_dict(value: Any) -> dict[str, Any]:
    """A JSON object, or an empty one in place of anything else."""
    return cast("dict[str, Any]", value) if isinstance(value, Mapping) else {}


def as_list(value: Any) -> list[Any]:
    """A JSON array, or an empty one in place of anything else."""
    return list(cast("Sequence[Any]", value)) if isinstance(value, list) else []
