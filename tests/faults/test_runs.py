"""A short run for each kind of fault: real processes and a real server, and an audit at the end.

It is the soak (`python -m tests.soak`) with few kinds of fault at a time: each has its turn, and a red run says which.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.soak.run import KINDS, Report, Soak

RUNS = [
    *[("cut", "down"), ("drop reply",), ("black hole",), ("delay", "trickle")],
    *[("kill -9",), ("SIGSTOP",), ("SIGTERM", "SIGTERM twice")],
    *[("standstill",), ("restart",), ("full memory",)],
    tuple(kind for kind, (_, whose) in KINDS.items() if whose == "keys"),
    tuple(kind for kind, (_, whose) in KINDS.items() if whose == "gateway"),
]


@pytest.mark.parametrize("kinds", RUNS, ids=" and ".join)
async def test_nothing_is_lost_doubled_or_wrong(kinds: tuple[str, ...], tmp_path: Path) -> None:
    most = 2 if KINDS[kinds[0]][1] == "server" else 4
    run = Soak(2, random.randrange(10**6), tmp_path, workers=2, kinds=kinds, at_least=(40, most))
    report = await run.run()
    print(*report.lines(), sep="\n")  # shown when it fails
    assert report.good
    assert report.jobs["accepted"] >= 40
    assert report.faults.total() >= 2


def test_every_kind_of_fault_has_its_run() -> None:
    assert {kind for kinds in RUNS for kind in kinds} == set(KINDS)


def test_a_report_with_a_finding_is_not_good_and_says_it_last() -> None:
    report = Report(seed=1, workers=3)
    assert report.good
    report.add(["lost: a", "settled twice: b", "run after its end: c", "orphan key: d"])
    assert not report.good
    assert list(report.lines())[-3:] == ["lost 1", "doubled 2", "wrong 1"]
