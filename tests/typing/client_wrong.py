"""Uses of the client that both type checkers must refuse: on each line that says so, and on no other."""

from __future__ import annotations

import httpx
import upstash_redis
from pydantic import BaseModel

from outlast import AsyncClient, Client, Event, Failed, Queue
from outlast.rest import RestTransport
from outlast_worker.tcp import AsyncTcpTransport, TcpTransport


class Prompt(BaseModel):
    prompt: str


typed = Queue("typed", payload=Prompt, result=str)
Queue(5)  # refused
Queue("q", payload=5)  # refused
Queue("q", "payload")  # refused
Queue("q", retries=3)  # refused
Queue("q", timeout="1h")  # refused


def plain_client(redis: upstash_redis.Redis) -> None:
    jobs = Client().queue(typed)
    jobs.enqueue("text")  # refused
    jobs.enqueue({"prompt": "hi"})  # refused
    jobs.enqueue(Prompt(prompt="hi"), "id")  # refused
    jobs.enqueue(Prompt(prompt="hi"), key="k")  # refused
    jobs.enqueue(Prompt(prompt="hi"), priority="high")  # refused
    jobs.enqueue(Prompt(prompt="hi"), delay="1s")  # refused
    jobs.get(5)  # refused
    jobs.watch("id", "1-1")  # refused
    number: int = jobs.wait("id")  # refused
    prompt: str = jobs.get("id").payload  # refused
    result: int | None = job.result if (job := jobs.get("id")) else None  # refused
    for event in jobs.watch("id"):
        print(event.data)  # refused
        if event.type == "ended":  # refused
            print(number, prompt, result)
    Client().queue("typed")  # refused
    AsyncClient(upstash=redis)  # refused
    Client(transport=AsyncTcpTransport("redis://x"))  # refused
    AsyncClient(transport=TcpTransport("redis://x"))  # refused
    RestTransport("https://x.example", "t", http_client=httpx.AsyncClient())  # refused


async def async_client() -> None:
    client = AsyncClient()
    jobs = client.queue(typed)
    text: str = jobs.wait("id")  # refused
    for _ in jobs.watch("id"):  # refused
        print(text)
    client.close()  # refused


def ends(event: Event[str]) -> str:
    if isinstance(event, Failed):
        return event.result  # refused
    return event.id
