"""Queues in every state that the dashboard shows. There is no worker: a test says who takes what and how it ends."""

from __future__ import annotations

import json
import time
from typing import Any

from outlast import Client, Queue
from outlast.protocol import Keys, calls, holding

LONG = 600_000
SECRET = "the moon is made of cheese"


class Fleet:
    """A queue and a worker's half of the protocol."""

    def __init__(self, url: str, name: str) -> None:
        self.client = Client(redis_url=url)
        self.jobs = self.client.queue(Queue(name))
        self.keys = Keys(name)
        self.requests = 0

    def send(self, call: calls.Call[Any]) -> Any:
        return self.client._transport.send(call)

    def alive(self, worker: str = "w1", **told: Any) -> None:
        info = {"at": round(time.time() * 1000), "name": None, "host": "box-1", "pid": 4711, "concurrency": 4}
        info |= {"active": 0, "state": "running", "version": "0.1.0", **told}
        self.send(holding.seen(self.keys, worker, json.dumps(info)))

    def take(self, worker: str = "w1", k: int = 1) -> list[holding.Reserved]:
        self.requests += 1
        call = holding.reserve(
            self.keys,
            worker=worker,
            request=self.requests,
            k=k,
            lease_ms=LONG,
            result_ttl_ms=LONG,
            dead_ttl_ms=LONG,
        )
        found: list[holding.Reserved] = self.send(call).jobs
        return found

    def say(self, job: holding.Reserved, *texts: str, progress: str = "") -> None:
        events = [("chunk", text) for text in texts]
        self.send(holding.flush(self.keys, job, first=job.n + 1, events=events, max_len=10_000, progress=progress))
        job.n += len(texts)

    def end(self, job: holding.Reserved, body: str = '"done"', status: Any = "completed") -> None:
        call = holding.settle(
            self.keys, job, status=status, body=body, ttl_ms=LONG, cancel_ttl_ms=LONG, count=job.n, steps=False
        )
        self.send(call)

    def die(self, count: int, error: str = "ProviderError: 529 overloaded") -> list[str]:
        """So many jobs that failed for good."""
        ids = [self.jobs.enqueue(SECRET, priority=9).id for _ in range(count)]
        for job in self.take(k=count):
            self.end(job, error, "failed")
        return ids

    def close(self) -> None:
        self.client.close()


def everything(url: str, name: str = "chat") -> dict[str, str]:
    """One queue with something in every state; ids by what they are."""
    fleet = Fleet(url, name)
    fleet.alive("w1", active=1)
    fleet.alive("w2", host="a-host-with-quite-a-long-name.example.internal", pid=99, name="gpu", state="blocked")
    ids: dict[str, str] = {}
    ids["dead"] = fleet.die(3)[0]
    fleet.die(1, "<img src=x onerror=alert(1)> ValueError: " + "a long reason " * 20)
    ids["active"] = fleet.jobs.enqueue({"prompt": SECRET}, owner="anna@example.com", budget={"cost": 1}).id
    [job] = fleet.take()
    for step, value in (("outline", '{"parts":3}'), ("search the archive", f'"{SECRET}"')):
        fleet.send(holding.step(fleet.keys, job, name=step, value=value))
    usage = '{"input_tokens":1200,"output_tokens":340,"cost":0.0123}'
    fleet.send(holding.flush(fleet.keys, job, first=1, events=[("chunk", SECRET + " ")], max_len=9, usage=usage))
    job.n = 1
    fleet.say(job, "and ", "so on. ", progress="0.4")
    ids["done"] = fleet.jobs.enqueue({"prompt": SECRET}, priority=9).id
    [done] = fleet.take()
    fleet.say(done, SECRET)
    fleet.end(done, json.dumps(SECRET))
    for n in range(40):
        ids["waiting"] = fleet.jobs.enqueue({"prompt": SECRET}, owner=f"user-{n}").id
    ids["scheduled"] = fleet.jobs.enqueue(SECRET, delay=3600).id
    ids["odd"] = fleet.jobs.enqueue(SECRET, id="<b>odd</b>/../%2F?&#ü").id
    fleet.jobs.set_rules(rate="30/60s", concurrency=8)
    fleet.client._transport.send(
        calls.Call(
            (
                "HSET",
                fleet.keys.usage(time.strftime("%Y-%m-%d", time.gmtime())),
                "cost",
                "1.5",
                "output_tokens",
                "88000",
            ),
            lambda _: None,
        )
    )
    fleet.close()
    return ids
