"""Uses of the client that both type checkers must accept, with the types that they must find."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal, assert_type

import httpx
import upstash_redis
import upstash_redis.asyncio
from pydantic import BaseModel, Field

from outlast import (
    AsyncClient,
    AsyncJobs,
    Chunk,
    Client,
    Completed,
    Enqueued,
    Event,
    EventPage,
    Job,
    JobFailedError,
    Jobs,
    Queue,
    Stats,
    TransportError,
)
from outlast.rest import AsyncRestTransport, RestTransport
from outlast.transport import AsyncTransport, Transport
from outlast.upstash import AsyncUpstashTransport, UpstashTransport
from outlast_worker.tcp import AsyncTcpTransport, TcpTransport


class Prompt(BaseModel):
    prompt: str


@dataclass
class Answer:
    text: str


plain = Queue("plain")
assert_type(plain, Queue[Any, Any])
typed = Queue("typed", payload=Prompt, result=str)
assert_type(typed, Queue[Prompt, str])
limited = Queue("limited", max_attempts=5, timeout=timedelta(minutes=5), lease=30)
assert_type(limited, Queue[Any, Any])
union = Queue("union", payload=Prompt | None, result=list[Answer])
assert_type(union, Queue[Prompt | None, list[Answer]])
literal = Queue("literal", payload=Literal["a", "b"], result=dict[str, int])
assert_type(literal, Queue[Literal["a", "b"], dict[str, int]])
positive = Queue("positive", payload=Annotated[int, Field(gt=0)], result=bool)
assert_type(positive, Queue[int, bool])


def plain_client() -> None:
    client = Client("https://x.example", "token", namespace="n", timeout=timedelta(seconds=5))
    jobs = client.queue(typed)
    assert_type(jobs, Jobs[Prompt, str])
    assert_type(jobs.enqueue(Prompt(prompt="hi"), delay=timedelta(seconds=1), priority=9, owner="o"), Enqueued)
    assert_type(jobs.get("id"), Job[Prompt, str] | None)
    if job := jobs.get("id"):
        assert_type(job.payload, Prompt)
        assert_type(job.result, str | None)
    assert_type(jobs.wait("id", timeout=5), str)
    assert_type(jobs.cancel("id"), bool)
    assert_type(jobs.watch("id", after=None, poll=1), Generator[Event[str], None, None])
    assert_type(jobs.events("id", limit=5, wait=2.5), EventPage[str])
    assert_type(jobs.stats(), Stats)
    assert_type(jobs.dead(), list[str])
    assert_type(jobs.retry_dead("id"), bool)
    assert_type(client.queue(plain), Jobs[Any, Any])
    assert_type(client.queue(plain).wait("id"), Any)
    client.queue(plain).enqueue({"any": ["json"]})
    client.queue(union).enqueue(None)
    for event in jobs.watch("id"):
        match event:
            case Chunk(data=data):
                assert_type(data, str)
            case Completed(result=result):
                assert_type(result, str)
            case _:
                pass
        if event.type == "completed":
            assert_type(event.result, str)
        elif event.type == "failed":
            assert_type(event.error, str)
    try:
        jobs.enqueue(Prompt(prompt="hi"))
    except TransportError as error:
        assert_type(error.job_id, str | None)
        assert_type(error.maybe_applied, bool)
    except JobFailedError as error:
        assert_type(error.job_id, str)


async def async_client() -> None:
    async with AsyncClient.from_env({}) as client:
        jobs = client.queue(typed)
        assert_type(jobs, AsyncJobs[Prompt, str])
        assert_type(await jobs.enqueue(Prompt(prompt="hi")), Enqueued)
        assert_type(await jobs.get("id"), Job[Prompt, str] | None)
        assert_type(await jobs.wait("id"), str)
        assert_type(jobs.watch("id"), AsyncGenerator[Event[str], None])
        assert_type(await jobs.events("id"), EventPage[str])
        async for event in jobs.watch("id", after="latest", timeout=3):
            if isinstance(event, Completed):
                assert_type(event.result, str)


def transports(redis: upstash_redis.Redis, aredis: upstash_redis.asyncio.Redis) -> None:
    one: list[Transport] = [
        RestTransport("https://x.example", "t", http_client=httpx.Client()),
        RestTransport("https://x.example", "t", http_client=lambda: httpx.Client()),
        UpstashTransport(redis),
        TcpTransport("redis://x"),
    ]
    two: list[AsyncTransport] = [
        AsyncRestTransport("https://x.example", "t", http_client=httpx.AsyncClient()),
        AsyncRestTransport("https://x.example", "t", http_client=lambda: httpx.AsyncClient()),
        AsyncUpstashTransport(aredis),
        AsyncTcpTransport("redis://x"),
    ]
    Client(transport=one[0])
    AsyncClient(transport=two[0])
    Client(upstash=redis)
    AsyncClient(upstash=aredis)
    Client(redis_url="redis://x")


assert_type(Queue("half", payload=Prompt), Queue[Prompt, Any])
assert_type(Queue("other half", result=Answer), Queue[Any, Answer])


def half_typed(jobs: Jobs[Prompt, Any], anything: Queue) -> None:
    assert_type(anything, Queue[Any, Any])
    assert_type(jobs.wait("id"), Any)
