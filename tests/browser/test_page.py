"""The demo page, by hand and by thumb, in Chromium."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .conftest import TEXT, Stack

Drive = Callable[..., dict[str, Any]]


def test_a_refresh_resumes_from_its_cursor(drive: Drive, stack: Stack) -> None:
    seen = drive("refresh")
    assert seen["text"] == TEXT
    assert seen["after"].startswith(seen["before"]), "what was there is there at once"
    assert seen["count"] == "31", "each event was received once"
    assert "refresh" in seen["did"]
    resumed = [query for _, path, query in stack.requests if path.endswith("/events") and "after=" in query]
    assert len(resumed) == 2
    assert len(stack.model.runs) == 1


def test_two_tabs_show_the_same_and_stop_for_both(drive: Drive, stack: Stack) -> None:
    seen = drive("tabs")
    assert seen["texts"] == [TEXT, TEXT]
    assert {"tabs", "stop"} <= set(seen["did"])
    assert stack.model.stopped == ["pace=60 again"]


def test_stop_stops_the_worker_and_keeps_what_was_said(drive: Drive, stack: Stack) -> None:
    seen = drive("stop")
    assert stack.model.stopped == ["pace=100"]
    assert seen["kept"] == seen["after"]
    assert TEXT.startswith(seen["kept"])
    assert 3 <= len(seen["kept"].split()) < 30
    assert seen["label"] == "Stopped"


def test_a_double_click_is_one_job(drive: Drive, stack: Stack) -> None:
    seen = drive("twice")
    assert stack.model.runs == ["pace=5 once"]
    assert seen["recent"] == 1
    assert "twice" in seen["did"]


def test_an_answer_that_was_lost_is_not_paid_for_twice(drive: Drive, stack: Stack) -> None:
    seen = drive("unanswered", tolerate=["net::ERR_FAILED"])
    assert seen["left"] == "pace=5 lost", "the prompt is still there to be sent again"
    assert stack.model.runs == ["pace=5 lost"]
    assert (seen["recent"], stack.asked("POST", "/jobs")) == (1, 2)


def test_a_lost_worker_clears_the_answer_once(drive: Drive, stack: Stack) -> None:
    seen = drive("restart")
    assert seen["clears"] == 1
    assert seen["text"] == TEXT
    assert seen["notice"] == "The worker was lost. Attempt 2 starts over."
    assert "kill" in seen["did"]


def test_offline_for_some_seconds(drive: Drive, stack: Stack) -> None:
    broken = ["net::ERR_INTERNET_DISCONNECTED", "net::ERR_INCOMPLETE_CHUNKED_ENCODING"]
    seen = drive("offline", seconds=2.5, tolerate=broken)
    assert seen["during"] == seen["still"]
    assert seen["text"] == TEXT
    assert seen["clears"] == 0
    assert "offline" in seen["did"]


def test_failures_and_waits_are_visible(drive: Drive) -> None:
    seen = drive("ends")
    assert seen["failed"]["notice"] == "The job failed."
    assert seen["failed"]["text"] == "".join(f"word{n} " for n in range(20))
    assert seen["left"] == []


def test_it_works_by_keyboard(drive: Drive) -> None:
    seen = drive("keyboard")
    assert seen["order"] == ["prompt", "send", "stop", "answer"]
    assert seen["prompt"] == "pace=100 line\ntwo"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_works_on_a_phone(scheme: str, drive: Drive) -> None:
    seen = drive("phone", scheme=scheme)
    assert seen["wide"] <= 0, "nothing sticks out"
    assert seen["small"] == []
    ratio, where = seen["contrast"]
    assert ratio >= 4.5, where
