"""One job, one trace: from the enqueue in one process to the settle in another."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tests.faults.processes import until

from outlast import AsyncClient, Client, InvalidArgumentError, JobFailedError, Queue, RateLimitedError, TerminalJobError
from outlast.observe import Attempt, Enqueuing, Observer, Outcome, Taken, observe, unobserve
from outlast.telemetry import OpenTelemetry
from outlast_worker import JobContext, SyncJobContext, Worker
from outlast_worker.logs import JsonFormatter


class Traces:
    """What was exported, and a tracer for the code around it."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("tests")

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        [span] = self.named(name)
        return span


@pytest.fixture
def traces() -> Iterator[Traces]:
    found = Traces()
    observer = OpenTelemetry(found.provider)
    observe(observer)
    yield found
    unobserve(observer)


def context_of(span: ReadableSpan) -> trace.SpanContext:
    assert span.context is not None
    return span.context


async def drain(url: str, queue: Queue[Any, Any], handler: Any, **options: Any) -> None:
    worker = Worker(url, **options)
    worker.handles(queue)(handler)
    await worker.serve(burst=True)


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_the_enqueue_the_attempt_and_what_the_handler_calls_are_one_trace(
    valkey_url: str, queue_name: str, traces: Traces, kind: str
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)

    async def run(job: JobContext[Any]) -> None:
        with traces.tracer.start_as_current_span("provider call"):
            job.usage(input_tokens=12, output_tokens=34, cost=0.5)

    def plain(job: SyncJobContext[Any]) -> None:
        with traces.tracer.start_as_current_span("provider call"):
            job.usage(input_tokens=12, output_tokens=34, cost=0.5)

    with Client(redis_url=valkey_url) as client, traces.tracer.start_as_current_span("request") as request:
        job = client.queue(queue).enqueue("a secret prompt")
    await drain(valkey_url, queue, run if kind == "async" else plain)

    enqueue, attempt = traces.one(f"enqueue {queue_name}"), traces.one(f"attempt {queue_name}")
    settle, call = traces.one(f"settle {queue_name}"), traces.one("provider call")
    assert {context_of(span).trace_id for span in (enqueue, attempt, settle, call)} == {
        request.get_span_context().trace_id
    }
    for child, parent in ((attempt, enqueue), (settle, attempt), (call, attempt)):
        assert child.parent is not None
        assert child.parent.span_id == context_of(parent).span_id
    assert [link.context.span_id for link in attempt.links] == [context_of(enqueue).span_id]
    assert (enqueue.kind, attempt.kind, settle.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER, SpanKind.CLIENT)
    assert dict(attempt.attributes or {}) | {"messaging.client.id": "*"} == {
        "messaging.system": "outlast",
        "messaging.destination.name": queue_name,
        "messaging.operation.name": "attempt",
        "messaging.operation.type": "process",
        "messaging.message.id": job.id,
        "messaging.client.id": "*",
        "outlast.attempt": 1,
        "outlast.starts": 1,
        "outlast.outcome": "completed",
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 34,
        "outlast.usage.cost": 0.5,
    }
    assert (enqueue.attributes or {})["messaging.message.id"] == job.id
    assert not any("secret prompt" in span.to_json() for span in (enqueue, attempt, settle, call))


async def test_every_attempt_is_a_child_of_the_one_enqueue_and_says_how_it_ended(
    valkey_url: str, queue_name: str, traces: Traces
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name, backoff=0.01, max_attempts=3)

    async def run(job: JobContext[Any]) -> None:
        job.usage(calls=1)
        if job.starts == 1:
            raise RateLimitedError("slow down", retry_after=0.05)
        if job.starts == 2:
            raise ConnectionError("the prompt was: secret")
        raise TerminalJobError("no such model")

    async with AsyncClient(redis_url=valkey_url) as client:
        jobs = client.queue(queue)
        job = await jobs.enqueue(None)
        worker = Worker(valkey_url)
        worker.handles(queue)(run)
        async with worker:
            with pytest.raises(JobFailedError):
                await jobs.wait(job.id, timeout=10)
    attempts = traces.named(f"attempt {queue_name}")
    assert [(span.attributes or {})["outlast.outcome"] for span in attempts] == ["rate_limited", "retried", "failed"]
    assert [(span.attributes or {}).get("error.type") for span in attempts] == [
        None,
        "ConnectionError",
        "TerminalJobError",
    ]
    assert [(span.attributes or {})["outlast.usage.calls"] for span in attempts] == [1, 1, 1]
    assert [span.status.status_code for span in attempts] == [StatusCode.UNSET, StatusCode.ERROR, StatusCode.ERROR]
    enqueue = context_of(traces.one(f"enqueue {queue_name}"))
    assert {span.parent.span_id if span.parent else 0 for span in attempts} == {enqueue.span_id}
    assert not any("secret" in span.to_json() for span in attempts)


async def test_a_job_without_a_trace_starts_its_own(valkey_url: str, queue_name: str, traces: Traces) -> None:
    """As one of a producer that is not instrumented; and the worker's own surroundings are no parent either."""
    queue: Queue[Any, Any] = Queue(queue_name)

    async def run(job: JobContext[Any]) -> None: ...

    client = [
        sys.executable,
        "-c",
        f"from outlast import *; Client(redis_url={valkey_url!r}).queue(Queue({queue_name!r})).enqueue(1)",
    ]
    process = await asyncio.create_subprocess_exec(*client)
    assert await process.wait() == 0
    with traces.tracer.start_as_current_span("around the worker"):
        await drain(valkey_url, queue, run)
    attempt = traces.one(f"attempt {queue_name}")
    assert attempt.parent is None
    assert not attempt.links


async def test_a_run_of_a_schedule_is_one_trace_from_the_worker_that_made_it(
    valkey_url: str, queue_name: str, traces: Traces
) -> None:
    worker = Worker(valkey_url)

    @worker.handles(Queue(queue_name))
    async def run(job: JobContext[Any]) -> None: ...

    worker.schedule(Queue(queue_name), None, name="once", at=datetime.now(UTC) + timedelta(seconds=1))
    async with worker:
        await until(lambda: traces.named(f"attempt {queue_name}"), "it ran")
    enqueue, attempt = traces.one(f"enqueue {queue_name}"), traces.one(f"attempt {queue_name}")
    assert attempt.parent is not None
    assert attempt.parent.span_id == context_of(enqueue).span_id
    assert (enqueue.attributes or {})["messaging.message.id"] == (attempt.attributes or {})["messaging.message.id"]


async def test_an_enqueue_that_is_refused_is_an_error_without_its_text(
    valkey_url: str, queue_name: str, traces: Traces
) -> None:
    with Client(redis_url=valkey_url) as client, pytest.raises(InvalidArgumentError):
        client.queue(Queue(queue_name)).enqueue({"prompt": {1, 2}})
    span = traces.one(f"enqueue {queue_name}")
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description is None
    assert (span.attributes or {})["error.type"] == "InvalidArgumentError"
    assert not span.events


class Broken(Observer):
    """Raises wherever it can."""

    def enqueue(self, queue: str, /) -> AbstractContextManager[Enqueuing]:
        raise RuntimeError("telemetry is broken")

    def attempt(self, taken: Taken, /) -> Attempt:
        class Ends(Attempt):
            def settling(self, outcome: Outcome) -> None:
                raise RuntimeError("telemetry is broken")

            def ended(self, outcome: Outcome, error: BaseException | None, usage: Mapping[str, float]) -> None:
                raise RuntimeError("telemetry is broken")

        return Ends()


async def test_broken_telemetry_disturbs_no_job(
    valkey_url: str, queue_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue: Queue[Any, Any] = Queue(queue_name)

    async def run(job: JobContext[Any]) -> str:
        return "done"

    observer = Broken()
    observe(observer)
    try:
        async with AsyncClient(redis_url=valkey_url) as client:
            job = await client.queue(queue).enqueue(None)
            await drain(valkey_url, queue, run)
            assert await client.queue(queue).wait(job.id, timeout=5) == "done"
    finally:
        unobserve(observer)
    assert caplog.text.count("an observer raised") == 3


async def test_log_lines_of_a_handler_name_their_job_and_quote_no_payload(valkey_url: str, queue_name: str) -> None:
    lines: list[str] = []

    class Sink(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    sink = Sink()
    sink.setFormatter(JsonFormatter())
    logger = logging.getLogger("tests.handler")
    queue: Queue[Any, Any] = Queue(queue_name, max_attempts=1)

    async def run(job: JobContext[Any]) -> None:
        logger.warning("in the handler")
        await job.step("a thread", lambda: logger.warning("in a step"))
        raise ConnectionError("provider gone")

    for name in ("outlast.worker", "tests.handler"):
        logging.getLogger(name).addHandler(sink)
    try:
        async with AsyncClient(redis_url=valkey_url) as client:
            job = await client.queue(queue).enqueue({"prompt": "very secret"})
        await drain(valkey_url, queue, run)
    finally:
        for name in ("outlast.worker", "tests.handler"):
            logging.getLogger(name).removeHandler(sink)
    found = {line["message"].split(":")[0]: line for line in map(json.loads, lines)}
    for message in ("in the handler", "in a step", f"job {job.id!r} of queue {queue_name!r}, attempt 1, failed"):
        assert (found[message]["queue"], found[message]["job"], found[message]["attempt"]) == (queue_name, job.id, 1)
    assert "provider gone" in found[f"job {job.id!r} of queue {queue_name!r}, attempt 1, failed"]["error"]
    assert "very secret" not in "".join(lines)


def test_the_core_works_without_telemetry_installed() -> None:
    code = """
import sys
for name in ("opentelemetry", "prometheus_client"):
    sys.modules[name] = None  # an import raises
import outlast.client, outlast.aio, outlast_edge
from outlast import Queue
from outlast_worker import Worker
Worker("redis://localhost").handles(Queue("q"))(lambda job: None)
print([name for name in sys.modules if name in ("outlast.telemetry", "outlast_worker.metrics")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
