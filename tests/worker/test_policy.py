"""Pure rules: texts of errors, delays, progress, surrogate halves."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from outlast import InvalidArgumentError, Queue, RateLimitedError, RetryJobError, TerminalJobError
from outlast_worker.output import event_of, progress_text
from outlast_worker.policy import backoff_ms, error_text, is_retryable, mend, mend_deep, quotes_input, retry_after_ms

QUEUE = Queue("q", backoff=1, max_backoff=60)


class Prompt(BaseModel):
    number: int


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


class Needy(Exception):
    def __init__(self, *, code: int) -> None:
        self.code = code


def test_h24_any_exception_has_a_text() -> None:
    assert error_text(ValueError("bad")) == "ValueError: bad"
    assert error_text(ValueError()) == "ValueError"
    assert error_text(Rude()) == "Rude: (its message cannot be read)"
    assert error_text(Needy(code=3)).startswith("Needy")
    assert error_text(ValueError("\udc00x\ud83d\ude00")) == "ValueError: \ufffdx😀"
    long = error_text(ValueError("é" * 10_000))
    assert len(long) == 2000
    assert long.endswith("…")


def test_an_error_of_validation_is_told_without_the_input() -> None:
    with pytest.raises(ValidationError) as caught:
        Prompt.model_validate({"number": "my secret prompt"})
    assert "secret" in str(caught.value)
    assert "secret" not in error_text(caught.value)
    assert "number" in error_text(caught.value)
    outer = RuntimeError("x")
    outer.__cause__ = caught.value
    assert quotes_input(outer)
    assert not quotes_input(RuntimeError("y"))


def test_backoff_is_drawn_evenly_up_to_its_ceiling() -> None:
    for attempt, ceiling in ((1, 1000), (2, 2000), (3, 4000), (7, 60_000), (1000, 60_000)):
        draws = [backoff_ms(QUEUE, attempt) for _ in range(300)]
        assert 0 <= min(draws) < ceiling * 0.1
        assert ceiling * 0.9 < max(draws) <= ceiling


@pytest.mark.parametrize("value", [0, 0.5, 3, 864_000, timedelta(seconds=30)])
def test_h21_a_finite_retry_after_is_obeyed(value: Any) -> None:
    expected = value.total_seconds() if isinstance(value, timedelta) else value
    assert retry_after_ms(QUEUE, 1, RetryJobError("later", retry_after=value)) == expected * 1000


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, -math.inf, "3", True, b"3"])
def test_h21_a_strange_retry_after_is_refused_where_it_is_made(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="retry_after"):
        RetryJobError("later", retry_after=value)
    with pytest.raises(InvalidArgumentError, match="retry_after"):
        RateLimitedError("later", retry_after=value)


def test_h21_without_a_delay_the_backoff_counts() -> None:
    assert 0 <= retry_after_ms(QUEUE, 1, RetryJobError("later")) <= 1000


def test_default_classification() -> None:
    assert is_retryable(ValueError())
    assert is_retryable(RetryJobError())
    assert not is_retryable(TerminalJobError())


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1, "1"), (1.0, "1"), (1 / 3, "0.3333333333333333"), (0.1 + 0.2, "0.30000000000000004")],
)
def test_h42_progress_is_written_exactly(value: float, text: str) -> None:
    assert progress_text(value) == text
    assert float(text) == value


@pytest.mark.parametrize("value", [-0.1, 1.5, "half", True, None, math.nan, math.inf, [0.5]])
def test_h42_other_progress_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="progress="):
        progress_text(value)


def test_h31_halves_are_joined_and_lone_ones_replaced() -> None:
    assert mend("\ud83d\ude00") == "😀"
    assert mend("a\udc00b") == "a\ufffdb"
    assert mend("\ud83da") == "\ufffda"
    assert mend("plain") == "plain"
    assert mend_deep({"a\ud83d\ude00": ["\udc00", ("x", 1)]}) == {"a😀": ["\ufffd", ["x", 1]]}


def test_emitted_values_become_text_or_json() -> None:
    assert event_of("x") == ("chunk", "x")
    assert event_of({"a": [1, "é"]}) == ("data", '{"a":[1,"é"]}')
    assert event_of(None) == ("data", "null")
    assert event_of(Prompt(number=3)) == ("data", '{"number":3}')
    assert event_of([Prompt(number=3)]) == ("data", '[{"number":3}]')
    assert event_of({"a": "\ud83d\ude00"}) == ("data", '{"a":"😀"}')
    assert event_of("x" * 2_000_000)[0] == "chunk", "text is split later"
    with pytest.raises(InvalidArgumentError, match="1048577 bytes of JSON, and one event at most 1048576"):
        event_of(["é" * 524_286 + "x"])
    deep: Any = []
    for _ in range(2000):
        deep = [deep]
    endless: dict[str, Any] = {}
    endless["itself"] = endless
    for wrong in (b"bytes", object(), math.nan, {1: 2}, {"a": math.inf}, deep, endless):
        with pytest.raises(InvalidArgumentError, match=r"^emit(: float: contains NaN|: \w+: | takes text)"):
            event_of(wrong)
