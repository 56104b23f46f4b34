"""FastAPI: uvicorn fastapi_app:app. A dependency gives the jobs; the edge's routes stand beside your own.

Your routes do what is special: here they check the request's model and name the result's. Watching across reconnects
and cancelling come from the edge, with the same idea of who may do what.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, HTTPException
from pydantic import BaseModel, Field
from starlette.requests import Request

from outlast import AsyncClient, AsyncJobs, IdempotencyConflictError, JobFailedError, Queue
from outlast_edge import Edge


class Prompt(BaseModel):
    prompt: Annotated[str, Field(min_length=1, max_length=10_000)]


class Story(BaseModel):
    title: str
    text: str


class Made(BaseModel):
    id: str
    events_url: str


stories = Queue("stories", payload=Prompt, result=Story)
client = AsyncClient()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    await client.aclose()


def user(x_user: Annotated[str | None, Header()] = None) -> str:
    """Who is asking: your session goes here."""
    if x_user is None:
        raise HTTPException(401, "Say who you are.")
    return x_user


def story_jobs() -> AsyncJobs[Prompt, Story]:
    return client.queue(stories)


User = Annotated[str, Depends(user)]
Jobs = Annotated[AsyncJobs[Prompt, Story], Depends(story_jobs)]


def who(request: Request, action: str, job: Any) -> str:
    return user(request.headers.get("x-user"))


edge = Edge(client, queues=[stories], authorize=who)
app = FastAPI(lifespan=lifespan, routes=edge.routes)


@app.post("/stories", status_code=202)
async def create(
    prompt: Prompt, jobs: Jobs, user: User, idempotency_key: Annotated[str | None, Header(max_length=200)] = None
) -> Made:
    key = None if idempotency_key is None else f"{user}:{idempotency_key}"
    try:
        job = await jobs.enqueue(prompt, owner=user, idempotency_key=key)
    except IdempotencyConflictError:
        raise HTTPException(422, "This Idempotency-Key was used with another prompt.") from None
    return Made(id=job.id, events_url=f"/v1/jobs/{job.id}/events")


@app.get("/stories/{id}")
async def read(id: str, jobs: Jobs, user: User) -> Story:
    """The story, waited for up to twenty seconds; 503 asks to come again."""
    job = await jobs.get(id)
    if job is None or job.owner != user:
        raise HTTPException(404)  # an id is no permission
    try:
        return await jobs.wait(id, timeout=20)
    except TimeoutError:
        raise HTTPException(503, "Not yet.", headers={"Retry-After": "1"}) from None
    except JobFailedError:
        raise HTTPException(502, "The story could not be written.") from None
