"""For the tests of your own code: run a worker until it is idle, let time pass, and play the model's provider.

Everything runs against a real server; see `outlast_worker.pytest_plugin` for the fixtures. Nothing here needs pytest.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from outlast import AsyncJobs, Jobs, OutlastError
from outlast._checks import Duration, to_ms
from outlast.protocol import Call, Keys, calls, holding
from outlast.protocol.calls import Plan
from outlast.protocol.wire import items, number, table, text
from outlast.transport import adrive, drive

from .schedules import Scheduler
from .tcp import AsyncTcpTransport
from .worker import Worker

__all__ = [
    "Answer",
    "Cut",
    "Failure",
    "ScriptedProvider",
    "aabandon",
    "abandon",
    "arun_until_idle",
    "atime_travel",
    "run_until_idle",
    "time_travel",
]

# -- workers ---------------------------------------------------------------------------------------------------------


def run_until_idle(worker: Worker, *, timeout: float = 30.0) -> None:
    """Run the worker until no job of its queues is waiting, due or running. Delayed jobs stay where they are.

    What its schedules have due is made first. A queue that is paused for a time is waited for.

    Raises TimeoutError after `timeout` seconds; what runs then is handed back.
    """
    with ThreadPoolExecutor(1) as threads:  # also where an event loop runs already
        threads.submit(asyncio.run, arun_until_idle(worker, timeout=timeout)).result()


async def arun_until_idle(worker: Worker, *, timeout: float = 30.0) -> None:
    """`run_until_idle` for coroutines."""
    if worker._schedules:
        settings = worker._settings()
        transport = AsyncTcpTransport(settings.url)
        try:
            await Scheduler(transport, settings.prefix, list(worker._schedules.values()), _fail).tick()
        finally:
            await transport.aclose()
    try:
        async with asyncio.timeout(timeout):
            await worker.serve(burst=True)
    except TimeoutError:
        raise TimeoutError(f"{worker!r} was still busy after timeout={timeout:g} s") from None


def _fail(error: OutlastError) -> None:
    raise error


def abandon(jobs: Jobs[Any, Any], *, lease: Duration = 60.0) -> str | None:
    """A worker takes the next job and is never heard of again. The job's id; None: there was none to take.

    Once `time_travel` has passed the lease, the next worker takes the job back.
    """
    taken = jobs._transport.send(_reserve(jobs._keys, lease)).jobs
    return taken[0].id if taken else None


async def aabandon(jobs: AsyncJobs[Any, Any], *, lease: Duration = 60.0) -> str | None:
    """`abandon` for coroutines."""
    taken = (await jobs._transport.send(_reserve(jobs._keys, lease))).jobs
    return taken[0].id if taken else None


def _reserve(keys: Keys, lease: Duration) -> Call[holding.Reservation]:
    return holding.reserve(
        keys,
        worker="abandoned",
        request=time.monotonic_ns(),
        k=1,
        lease_ms=to_ms(lease, "lease", least=0.1),
        result_ttl_ms=3_600_000,
        dead_ttl_ms=7 * 86_400_000,
    )


# -- time ------------------------------------------------------------------------------------------------------------


def time_travel(jobs: Jobs[Any, Any], by: Duration) -> None:
    """Let `by` seconds pass for a queue: all that the database remembers of it moves so far into the past.

    Delays and retries become due, leases and pauses end, deadlines pass, schedules fall behind, and records and keys
    expire. The clock itself stays, so events keep their ids. Not while workers run: they know what they took.
    """
    drive(jobs._transport, _shift(jobs._keys, to_ms(by, "by")))


async def atime_travel(jobs: AsyncJobs[Any, Any], by: Duration) -> None:
    """`time_travel` for coroutines."""
    await adrive(jobs._transport, _shift(jobs._keys, to_ms(by, "by")))


_TIMES = ("createdAt", "updatedAt", "startedAt", "finishedAt", "expiresAt", "deadlineAt")


def _shift(keys: Keys, ms: int) -> Plan[None]:
    [now] = yield [calls.CLOCK]
    found: set[str] = set()
    cursor = "0"
    while True:
        [(cursor, names)] = yield [
            Call(("SCAN", cursor, "MATCH", _escaped(keys.base) + "*", "COUNT", "1000"), lambda reply: _page(reply))
        ]
        found |= names
        if cursor == "0":
            break
    for key in found:
        changes: list[Call[Any]] = []
        [left] = yield [Call(("PTTL", key), number)]
        if left >= 0:
            changes.append(Call(("PEXPIRE", key, str(left - ms)), number))  # at or below 0 it is deleted
        if key in (keys.scheduled, keys.leases, keys.dead):
            [members] = yield [Call(("ZRANGE", key, "0", "-1", "WITHSCORES"), table)]
            for id, score in members.items():
                at = float(score) - ms
                if key == keys.leases and at <= now:
                    at = int(at) + 0.5  # as a worker leaves one that it found lapsed: the next to look takes it back
                changes.append(Call(("ZADD", key, repr(at) if at % 1 else str(int(at)), id), number))
        elif key.startswith(keys.base + "job:"):
            changes += yield from _earlier(key, _TIMES, ms)
        elif key == keys.config:
            changes += yield from _earlier(key, ("pausedUntil", "paused", "tat"), ms)
        elif key == keys.schedules:
            [fields] = yield [Call(("HGETALL", key), table)]
            changes += yield from _earlier(key, tuple(name for name in fields if name.startswith("last:")), ms)
        if changes:
            yield changes


def _earlier(key: str, names: tuple[str, ...], ms: int) -> Plan[list[Call[Any]]]:
    if not names:
        return []
    [values] = yield [Call(("HMGET", key, *names), items)]
    return [
        Call(("HSET", key, name, str(number(value) - ms)), number)
        for name, value in zip(names, values, strict=True)
        if value is not None and number(value) > 1  # paused is 1 until somebody resumes it
    ]


def _escaped(pattern: str) -> str:
    return "".join("\\" + c if c in "*?[]\\^" else c for c in pattern)


def _page(reply: Any) -> tuple[str, set[str]]:
    cursor, names = items(reply)
    return text(cursor), {text(name) for name in items(names)}


# -- the provider ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """An answer. `pause`: seconds before each word. `usage`: prompt and completion tokens."""

    text: str
    pause: float = 0.0
    usage: tuple[int, int] = (10, 5)


@dataclass(frozen=True)
class Failure:
    """A refusal: 429 with `retry_after` seconds, 500, 400."""

    status: int
    message: str = "scripted failure"
    retry_after: float | None = None


@dataclass(frozen=True)
class Cut:
    """The connection ends in the middle of an answer, after these words."""

    text: str


Step = str | Answer | Failure | Cut


class ScriptedProvider:
    """An OpenAI-compatible chat endpoint on loopback that says what its script says.

    ::

        with ScriptedProvider([Failure(429, retry_after=1), "Hello there"]) as provider:
            openai.OpenAI(base_url=provider.url, api_key="any", max_retries=0)

    The n-th request gets the n-th step; when the script is over, each gets back its own last message. Streams if asked
    to. `requests` has the bodies so far, so a test can count what was paid for.
    """

    def __init__(self, script: list[Step] | None = None) -> None:
        self.script: list[Step] = list(script or [])
        self.requests: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        """The base URL: ``http://127.0.0.1:PORT/v1``."""
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _next(self, request: dict[str, Any]) -> Step:
        with self._lock:
            self.requests.append(request)
            if self.script:
                return self.script.pop(0)
        messages: list[dict[str, Any]] = request.get("messages") or [{}]
        return str(messages[-1].get("content", ""))

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        step_of: Callable[[dict[str, Any]], Step] = self._next

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                step = step_of(request)
                with suppress(BrokenPipeError, ConnectionResetError):  # a caller that was cancelled, or killed
                    _tell(self, step, stream=bool(request.get("stream")), model=str(request.get("model")))

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


def _tell(to: BaseHTTPRequestHandler, step: Step, *, stream: bool, model: str) -> None:
    if isinstance(step, Failure):
        headers = {} if step.retry_after is None else {"retry-after": f"{step.retry_after:g}"}
        _send(to, step.status, {"error": {"message": step.message, "type": "scripted"}}, headers)
        return
    answer = Answer(step.text if isinstance(step, Cut) else step) if isinstance(step, str | Cut) else step
    prompt, completion = answer.usage
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    base: dict[str, Any] = {"id": "chatcmpl-scripted", "created": int(time.time()), "model": model}
    words = [word if at == 0 else f" {word}" for at, word in enumerate(answer.text.split(" "))]
    if not stream:
        time.sleep(answer.pause * len(words))
        if isinstance(step, Cut):
            return
        message = {"role": "assistant", "content": answer.text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        _send(to, 200, {**base, "object": "chat.completion", "choices": [choice], "usage": usage})
        return
    to.send_response(200)
    to.send_header("content-type", "text/event-stream")
    to.end_headers()
    base["object"] = "chat.completion.chunk"

    def event(value: object) -> None:
        to.wfile.write(b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n")
        to.wfile.flush()

    for word in words:
        time.sleep(answer.pause)
        event({**base, "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]})
    if isinstance(step, Cut):
        return
    nothing: dict[str, str] = {}
    event({**base, "choices": [{"index": 0, "delta": nothing, "finish_reason": "stop"}]})
    event({**base, "choices": [], "usage": usage})
    event(b"[DONE]")


def _send(to: BaseHTTPRequestHandler, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
    data = json.dumps(body).encode()
    to.send_response(status)
    for name, value in {
        "content-type": "application/json",
        "content-length": str(len(data)),
        **(headers or {}),
    }.items():
        to.send_header(name, value)
    to.end_headers()
    to.wfile.write(data)
