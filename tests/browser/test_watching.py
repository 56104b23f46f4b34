"""Watching from a browser: its own EventSource, and the helper that the package serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from .conftest import TEXT, Stack

Drive = Callable[..., dict[str, Any]]


def check(results: list[dict[str, Any]], kinds: list[str]) -> None:
    assert Counter(result["kind"] for result in results) == dict.fromkeys(kinds, 30)
    for result in results:
        assert result["text"] == TEXT == result["result"], (result["kind"], result["n"])
        assert result["restarts"] >= 1, (result["kind"], result["n"])
        assert result["repeated"] == 0, (result["kind"], result["n"])


def test_cut_after_every_nth_event_in_the_browser(drive: Drive, stack: Stack) -> None:
    """Every n of a 30-event job with a restart in the middle: EventSource, the helper, the helper over pages."""
    torn = ["net::ERR_INCOMPLETE_CHUNKED_ENCODING", "net::ERR_CONNECTION"]
    seen = drive("cuts", most=30, tolerate=torn)
    check(seen["results"], ["EventSource", "watchJob", "pages"])
    assert len(stack.model.runs) == 90 * 2


def test_cut_after_every_nth_event_with_npms_eventsource(drive: Drive) -> None:
    check(drive("nodeCuts", most=30)["results"], ["EventSource"])


def test_the_helper_ends_when_it_should_and_not_before(drive: Drive) -> None:
    refused = ["404 (Not Found)", "400 (Bad Request)"]
    seen = drive("helper", tolerate=refused)
    assert seen["end"] == "completed"
    assert seen["again"] is None, "resumed at the end there is nothing more"
    assert (seen["unknown"], seen["bad"]) == (404, 400)
    assert (seen["closed"], seen["aborted"]) == (None, None)
    assert seen["states"] == ["open", "closed"]
    assert seen["after"] == 0, "a closed watch is silent"
    assert seen["types"][0] == "state"
    assert seen["asked"] == 1
    assert (seen["recovered"], seen["tries"]) == ("completed", 3)
    assert seen["revived"] == "completed"
