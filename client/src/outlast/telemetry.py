"""OpenTelemetry: ``pip install 'outlast[otel]'``, then ``outlast.telemetry.instrument()`` in producers and workers.

One job is one trace. The enqueue is a span whose W3C context goes onto the record; each attempt, in whatever process
runs it, is its child, and what the handler calls is the attempt's. Names and attributes follow the semantic conventions
for messaging and, for usage, those for generative AI (https://opentelemetry.io/docs/specs/semconv/). Payloads, results
and error texts are in none of them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

from opentelemetry import context, trace
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from . import __version__
from .observe import Attempt, Enqueuing, Observer, Outcome, Taken, observe
from .records import Enqueued

__all__ = ["OpenTelemetry", "instrument"]

_W3C = TraceContextTextMapPropagator()
_COUNTERS = {"input_tokens": "gen_ai.usage.input_tokens", "output_tokens": "gen_ai.usage.output_tokens"}


def instrument(tracer_provider: TracerProvider | None = None) -> OpenTelemetry:
    """Trace every enqueue and every attempt of this process from now on. Without a provider, the global one."""
    observer = OpenTelemetry(tracer_provider)
    observe(observer)
    return observer


class OpenTelemetry(Observer):
    """The spans. `outlast.observe.unobserve` ends it."""

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("outlast", __version__, tracer_provider)

    @contextmanager
    def enqueue(self, queue: str, /) -> Generator[Enqueuing]:
        attributes = {**_of(queue), "messaging.operation.name": "enqueue", "messaging.operation.type": "send"}
        with self._tracer.start_as_current_span(
            f"enqueue {queue}",
            kind=SpanKind.PRODUCER,
            attributes=attributes,
            record_exception=False,  # its text may quote a payload
            set_status_on_exception=False,
        ) as span:
            try:
                yield _Enqueuing(span)
            except Exception as error:
                _failed(span, error)
                raise

    def attempt(self, taken: Taken, /) -> Attempt:
        return _Attempt(self._tracer, taken)


class _Enqueuing(Enqueuing):
    def __init__(self, span: Span) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        _W3C.inject(carrier)
        self.trace = carrier.get("traceparent")

    def answered(self, answer: Enqueued) -> None:
        self._span.set_attribute("messaging.message.id", answer.id)
        self._span.set_attribute("outlast.deduplicated", answer.deduplicated)


class _Attempt(Attempt):
    def __init__(self, tracer: trace.Tracer, taken: Taken) -> None:
        self._tracer = tracer
        self._queue = taken.queue
        # The producer's context and no other: the worker took the job for itself, not for whoever is current here.
        parent = _W3C.extract({"traceparent": taken.trace} if taken.trace else {}, context.Context())
        producer = trace.get_current_span(parent).get_span_context()
        self._span = tracer.start_span(
            f"attempt {taken.queue}",
            context=parent,
            kind=SpanKind.CONSUMER,
            links=[Link(producer)] if producer.is_valid else None,
            attributes={
                **_of(taken.queue),
                "messaging.operation.name": "attempt",
                "messaging.operation.type": "process",
                "messaging.message.id": taken.id,
                "messaging.client.id": taken.worker,
                "outlast.attempt": taken.attempt,
                "outlast.starts": taken.starts,
            },
        )
        self._settling: Span | None = None
        self._token = context.attach(trace.set_span_in_context(self._span, parent))

    def settling(self, outcome: Outcome) -> None:
        self._settling = self._tracer.start_span(
            f"settle {self._queue}",
            kind=SpanKind.CLIENT,
            attributes={
                **_of(self._queue),
                "messaging.operation.name": "settle",
                "messaging.operation.type": "settle",
                "outlast.outcome": outcome,
            },
        )

    def ended(self, outcome: Outcome, error: BaseException | None, usage: Mapping[str, float]) -> None:
        for span in (self._settling, self._span):
            if span is not None:
                span.set_attribute("outlast.outcome", outcome)
                if outcome == "lost":
                    span.set_status(Status(StatusCode.ERROR))
        for counter, amount in usage.items():
            self._span.set_attribute(_COUNTERS.get(counter, f"outlast.usage.{counter}"), amount)
        if outcome in ("failed", "retried"):
            _failed(self._span, error)
        context.detach(self._token)
        if self._settling is not None:
            self._settling.end()
        self._span.end()


def _of(queue: str) -> dict[str, str]:
    return {"messaging.system": "outlast", "messaging.destination.name": queue}


def _failed(span: Span, error: BaseException | None) -> None:
    span.set_status(Status(StatusCode.ERROR))
    if error is not None:
        span.set_attribute("error.type", type(error).__qualname__)
