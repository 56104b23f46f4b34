"""The floor: enqueue, reserve and settle as one bare script each over redis-py with hiredis. No retries, no delays.

What any queue with a record, a lease and a doorbell must do, and nothing else. It is no peer.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

import redis.asyncio as redis

from benchmarks.contest import CONCURRENCY, Contestant, main

ENQUEUE = """
redis.call('HSET', KEYS[1], 'id', ARGV[1], 'payload', ARGV[2], 'status', 'waiting', 'createdAt', ARGV[3])
redis.call('RPUSH', KEYS[2], ARGV[1])
redis.call('LPUSH', KEYS[3], '1')
redis.call('LTRIM', KEYS[3], 0, 99)
return ARGV[1]
"""
RESERVE = """
local out = {}
for i = 1, tonumber(ARGV[1]) do
  local id = redis.call('LPOP', KEYS[1])
  if not id then break end
  redis.call('ZADD', KEYS[2], ARGV[2], id)
  redis.call('HSET', ARGV[3] .. id, 'status', 'active', 'startedAt', ARGV[2])
  out[#out + 1] = id
  out[#out + 1] = redis.call('HGET', ARGV[3] .. id, 'payload')
end
return out
"""
SETTLE = """
if redis.call('ZREM', KEYS[2], ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'status', 'completed', 'result', ARGV[2], 'finishedAt', ARGV[3])
redis.call('XADD', KEYS[3], '*', 't', 'completed', 'd', ARGV[2])
redis.call('PEXPIRE', KEYS[1], 3600000)
redis.call('PEXPIRE', KEYS[3], 3600000)
return 1
"""


class Floor(Contestant):
    async def open(self) -> None:
        pool = redis.BlockingConnectionPool.from_url(self.url, max_connections=CONCURRENCY + 2, socket_timeout=10)
        self.redis: Any = redis.Redis(connection_pool=pool)
        self.redis.response_callbacks.clear()
        self.scripts = [await self.redis.script_load(text) for text in (ENQUEUE, RESERVE, SETTLE)]

    async def enqueue(self, kind: str, number: float, text: str = "") -> Any:
        id = os.urandom(16).hex()
        await self.redis.evalsha(
            self.scripts[0], 3, f"f:job:{id}", "f:ready", "f:bell", id, json.dumps([kind, number, text]), time.time()
        )
        return id

    async def start(self) -> None:
        self.free = CONCURRENCY
        self.wake = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        self.loops = [asyncio.create_task(self.take()), asyncio.create_task(self.listen())]

    async def listen(self) -> None:
        bell: Any = redis.Redis.from_url(self.url, socket_timeout=30)
        while True:
            await bell.blpop("f:bell", 10)
            self.wake.set()

    async def take(self) -> None:
        while True:
            asked = self.free
            found = await self.redis.evalsha(
                self.scripts[1], 2, "f:ready", "f:leases", asked, time.time() + 60, "f:job:"
            )
            for id, payload in zip(found[::2], found[1::2], strict=True):
                self.free -= 1
                task = asyncio.create_task(self.run(id.decode(), payload))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            if len(found) < 2 * asked or not self.free:
                await self.wake.wait()
            self.wake.clear()

    async def run(self, id: str, payload: bytes) -> None:
        kind, number, _ = json.loads(payload)
        await self.handle(kind, number)
        await self.redis.evalsha(
            self.scripts[2], 3, f"f:job:{id}", "f:leases", f"f:events:{id}", id, "null", time.time()
        )
        self.free += 1
        if self.free == 1 or self.free >= CONCURRENCY // 2:
            self.wake.set()


if __name__ == "__main__":
    main(Floor)
