"""Prometheus metrics of a process: ``pip install 'outlast-worker[metrics]'``.

A worker that serves health endpoints has them at /metrics, together with whatever else the process registers with
prometheus-client. A producer counts its enqueues after ``outlast.observe.observe(outlast_worker.metrics.counting())``.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outlast.errors import OutlastError
from outlast.job import Stats
from outlast.observe import Attempt, Enqueuing, Observer, Outcome, Taken, observe
from outlast.protocol import calls
from outlast.records import Enqueued
from outlast.transport import drive

from .tcp import TcpTransport

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Counting", "Metrics", "counting"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FRESH = 10.0
"""Seconds for which the depth of the queues is not asked for again: a scrape costs each queue about 25 commands."""
# Model calls take from a second to many minutes.
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


@cache
def counting() -> Counting:
    """The one observer of this process that counts; each call answers with the same."""
    return Counting()


class Counting(Observer):
    """Counters and histograms, by queue. Ids, owners and error texts are no labels: their number has no bound."""

    def __init__(self) -> None:
        queue = ("queue",)
        self._enqueued = Counter("outlast_enqueued", "Jobs made here, repeats of a key not counted.", queue)
        self._attempts = Counter("outlast_attempts", "Attempts that ended, by outcome.", ("queue", "outcome"))
        self._seconds = Histogram("outlast_attempt_seconds", "How long attempts took.", queue, buckets=SECONDS)
        self._waited = Histogram(
            "outlast_wait_seconds",
            "From a job's enqueue to its first start, its delay included.",
            queue,
            buckets=SECONDS,
        )
        self._running = Gauge("outlast_running", "Attempts that run here now.", queue)
        self._usage = Counter("outlast_usage", "What job.usage reported: tokens, cost.", ("queue", "counter"))

    @contextmanager
    def enqueue(self, queue: str, /) -> Generator[Enqueuing]:
        yield _Enqueuing(self, queue)

    def attempt(self, taken: Taken, /) -> Attempt:
        return _Attempt(self, taken)


class _Enqueuing(Enqueuing):
    def __init__(self, counting: Counting, queue: str) -> None:
        self._counter = counting._enqueued.labels(queue)

    def answered(self, answer: Enqueued) -> None:
        if not answer.deduplicated:
            self._counter.inc()


class _Attempt(Attempt):
    def __init__(self, counting: Counting, taken: Taken) -> None:
        self._counting, self._queue, self._since = counting, taken.queue, time.monotonic()
        counting._running.labels(taken.queue).inc()
        if taken.waited is not None:
            counting._waited.labels(taken.queue).observe(taken.waited)

    def ended(self, outcome: Outcome, error: BaseException | None, usage: Mapping[str, float]) -> None:
        counting, queue = self._counting, self._queue
        counting._running.labels(queue).dec()
        counting._attempts.labels(queue, outcome).inc()
        counting._seconds.labels(queue).observe(time.monotonic() - self._since)
        for counter, amount in usage.items():
            if amount > 0:
                counting._usage.labels(queue, counter).inc(amount)


class Metrics(Collector):
    """What a scrape asks of one worker: its counters, and how deep its queues are."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._transport = TcpTransport(engine.settings.url, timeout=2.0)
        self._lock = Lock()
        self._stats: dict[str, Stats] | None = {}
        self._asked = 0.0
        observe(counting())

    def close(self) -> None:
        self._transport.close()

    def exposition(self) -> tuple[str, bytes]:
        return CONTENT_TYPE, generate_latest(self) + generate_latest(REGISTRY)

    def collect(self) -> Iterable[Metric]:
        stats = self._depths()
        yield GaugeMetricFamily(
            "outlast_database_up",
            "Whether the database answered when it was last asked for its queues, at most 10 s ago.",
            value=0 if stats is None else 1,
        )
        yield GaugeMetricFamily(
            "outlast_stuck", "Attempts that have ended although their code still runs.", value=len(self._engine.stuck)
        )
        yield GaugeMetricFamily(
            "outlast_slots", "Jobs that this worker runs at most.", value=self._engine.settings.concurrency
        )
        jobs = GaugeMetricFamily("outlast_queue_jobs", "Jobs in the queue, by state.", labels=("queue", "state"))
        oldest = GaugeMetricFamily(
            "outlast_queue_oldest_waiting_seconds", "Since when the oldest waiting job is ready.", labels=("queue",)
        )
        for queue, found in (stats or {}).items():
            for state in ("waiting", "scheduled", "active", "dead"):
                jobs.add_metric((queue, state), getattr(found, state))
            oldest.add_metric((queue,), found.oldest_waiting or 0)
        yield jobs
        yield oldest

    def _depths(self) -> dict[str, Stats] | None:
        """None: the database does not answer. Every worker of a queue tells the same, so take the maximum."""
        with self._lock:
            if time.monotonic() - self._asked >= FRESH:
                try:
                    self._stats = {
                        name: drive(self._transport, calls.stats(keys)) for name, keys in self._engine.queues().items()
                    }
                except OutlastError:
                    self._stats = None
                self._asked = time.monotonic()
            return self._stats
