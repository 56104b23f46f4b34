"""How watch, events and wait bear faults, time and large pages; over a transport of the test's own, or the gateway."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import redis

import outlast
from outlast.protocol import Call, Keys, calls
from outlast_worker.gateway import Database, GatewayConfig, GatewayServer

TOKEN = "the-token-of-followers"


class Script:
    """A transport that answers as it is told: a reply, or an error to raise. The last one is for ever."""

    blocking = False
    sync_token = None

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.sent: list[tuple[str, ...]] = []

    def send(self, call: Call[Any], *, block: float | None = None) -> Any:
        self.sent.append(call.args)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return call.decode(answer)

    def send_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        return [self.send(call) for call in calls]

    def close(self) -> None:
        pass


def jobs_over(transport: Any) -> outlast.Jobs[Any, Any]:
    return outlast.Client(transport=transport).queue(outlast.Queue("q"))


def entry(n: int, kind: str = "chunk", text: str = "x") -> list[Any]:
    return [b"1000-%d" % n, [b"t", kind.encode(), b"d", text.encode(), b"a", b"1"]]


def page(*entries: Any) -> Any:
    return [[b"{q}:events:id", list(entries)]]


FAULT = outlast.TransportError("cut")
END = page([b"1001-0", [b"t", b"completed", b"d", b"1", b"a", b"1", b"n", b"2"]])


def test_faults_in_mid_watch_are_survived_and_reading_goes_on_behind_the_last_event(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = Script(
        page(entry(1)), FAULT, outlast.ServerError("LOADING", code="LOADING"), page(entry(2)), FAULT, END
    )
    events = list(jobs_over(transport).watch("id", poll=0.01))
    assert [event.type for event in events] == ["chunk", "chunk", "completed"]
    assert len(caplog.records) == 2, "each outage is told once"
    assert [args[-1] for args in transport.sent] == ["0-0", "1000-1", "1000-1", "1000-1", "1000-2", "1000-2"]


def test_a_fault_before_the_first_answer_is_raised_at_once() -> None:
    for call in (lambda jobs: list(jobs.watch("id")), lambda jobs: jobs.wait("id"), lambda jobs: jobs.events("id")):
        transport = Script(FAULT)
        with pytest.raises(outlast.TransportError):
            call(jobs_over(transport))
        assert len(transport.sent) == 1


def test_an_outage_is_given_up_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outlast._base.OUTAGE", 0.5)
    begin = time.monotonic()
    events = jobs_over(Script(page(entry(1)), FAULT)).watch("id", poll=0.01)
    assert next(events).type == "chunk"
    with pytest.raises(outlast.TransportError):
        next(events)
    assert 0.4 < time.monotonic() - begin < 5


def test_a_long_pause_of_the_reader_is_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outlast._base.OUTAGE", 0.2)
    events = jobs_over(Script(page(entry(1)), FAULT, END)).watch("id", poll=0.01)
    assert next(events).type == "chunk"
    time.sleep(0.4)
    assert [event.type for event in events] == ["gap", "completed"]


def test_what_does_not_pass_is_raised_in_mid_watch() -> None:
    for error in (
        outlast.AuthError("WRONGPASS", code="WRONGPASS"),
        outlast.QuotaExceededError("ERR max requests limit exceeded"),
        outlast.ServerError("WRONGTYPE", code="WRONGTYPE"),
    ):
        with pytest.raises(type(error)):
            list(jobs_over(Script(page(entry(1)), error)).watch("id", poll=0.01))


def test_a_fault_at_the_timeout_ends_a_watch_quietly_and_is_the_cause_of_waits_timeout() -> None:
    alive = [b"id", b"active", None, None, b"1", None, None, None]
    assert [e.type for e in jobs_over(Script(page(entry(1)), FAULT)).watch("id", poll=0.01, timeout=0.3)] == ["chunk"]
    with pytest.raises(TimeoutError) as caught:
        jobs_over(Script(alive, FAULT)).wait("id", poll=0.01, timeout=0.3)
    assert caught.value.__cause__ is FAULT


def test_retry_after_sets_the_pace_of_a_watch_in_trouble() -> None:
    busy = outlast.TransportError("429", maybe_applied=False, retry_after=0.6)
    begin = time.monotonic()
    list(jobs_over(Script(page(entry(1)), busy, END)).watch("id", poll=0.01))
    assert time.monotonic() - begin >= 0.6


def test_time_that_the_reader_spends_counts_as_pause() -> None:
    events = jobs_over(Script(page(entry(1)), END)).watch("id", poll=0.5)
    next(events)
    time.sleep(0.6)
    begin = time.monotonic()
    next(events)
    assert time.monotonic() - begin < 0.4


@pytest.fixture
def small_gateway(valkey_url: str) -> Iterator[GatewayServer]:
    database = Database(redis_url=valkey_url, token=TOKEN)
    with GatewayServer(GatewayConfig(databases=[database], max_request_bytes=100_000)) as server:
        yield server


def test_a_page_larger_than_the_server_sends_is_read_in_parts(
    small_gateway: GatewayServer, queue_name: str, raw: redis.Redis
) -> None:
    """Upstash refuses an answer above its limit, whoever asked for so much."""
    keys = Keys(queue_name)
    with outlast.Client(small_gateway.url, TOKEN) as client:
        jobs = client.queue(outlast.Queue(queue_name))
        id = jobs.enqueue("x").id
        texts = [f"{n}" * 9000 for n in range(10, 70)]
        for n, text in enumerate(texts, 1):
            raw.xadd(keys.events(id), {"t": "chunk", "d": text, "a": "1"}, id=f"99999-{n}")
        events = [event for event in jobs.watch(id, timeout=0) if isinstance(event, outlast.Chunk)]
        assert [event.data for event in events] == texts
        assert jobs.events(id).events
        raw.xadd(keys.events(id), {"t": "chunk", "d": "x" * 200_000, "a": "1"}, id="99999-61")
        with pytest.raises(outlast.ServerError, match="max request size"):
            list(jobs.watch(id, after="99999-60"))


def test_h49_a_cancel_that_was_refused_for_lack_of_memory_is_repeated_with_relief() -> None:
    full = outlast.StoreFullError("OOM", code="OOM")
    transport = Script(full, "requested")
    jobs = jobs_over(transport)
    assert jobs.cancel("id") is True
    limit = jobs.queue.result_ttl_ms
    assert transport.sent == [
        calls.cancel(Keys("q"), "id", result_ttl_ms=limit, relief=relief).args for relief in (False, True)
    ]
    with pytest.raises(outlast.StoreFullError):
        jobs_over(Script(full)).cancel("id")
