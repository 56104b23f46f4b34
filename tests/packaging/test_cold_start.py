"""What a cold function pays: what its first call loads, and the CPU that it uses beside a program that does without us.

CPU is a ratio of two programs of benchmarks/cold_start.py that take turns on the same interpreter and database. Other
work on the machine only adds, so the least of all rounds counts, and more rounds are run before a budget is exceeded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import distribution
from pathlib import Path

import pytest
from benchmarks import cold_start
from benchmarks.cold_start import BARE, BARE_ASYNC, BARE_EDGE, END, OURS, OURS_ASYNC, OURS_EDGE
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, "-S"]

TYPED = {"pydantic", "typing_extensions", "annotated_types"}
OTHERS = {"redis", "upstash_redis", "uvicorn", "opentelemetry", "outlast_worker"}
READERS = {"outlast.events", "outlast.job", "outlast.listing", "outlast.protocol.tail", "outlast.rules"}
"""What only those need who look at jobs."""
REST = {"httpx", "httpcore", "certifi"}
"""What the first request needs."""


def link_dependencies(folder: Path) -> None:
    """Put what our packages install into `folder`. httpx loads more where it finds more: a developer has rich."""
    todo = ["outlast", "outlast-edge"]
    for name in todo:
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(found.locate_file(top))))
        wanted = [Requirement(text) for text in found.requires or ()]
        todo += [r.name for r in wanted if r.name not in todo and (not r.marker or r.marker.evaluate({"extra": ""}))]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    packages = tmp_path_factory.mktemp("packages")
    link_dependencies(packages)
    path = os.pathsep.join(map(str, [ROOT / "client" / "src", ROOT / "edge" / "src", packages]))
    with cold_start.database(tmp_path_factory.mktemp("tls")) as environment:
        yield {**environment, "PYTHONPATH": path}


@pytest.mark.parametrize(
    ("program", "unneeded"),
    [
        ("import outlast", {*REST, *TYPED, *OTHERS, *READERS, "asyncio", "ssl", "socket", "outlast.client"}),
        (OURS.imports, {*REST, *TYPED, *OTHERS, *READERS, "asyncio", "ssl", "socket", "outlast.aio"}),
        (OURS.imports + OURS.work, {*TYPED, *OTHERS, *READERS, "asyncio", "starlette", "outlast.aio"}),
        (OURS_ASYNC.imports, {*REST, *TYPED, *OTHERS, *READERS, "anyio", "outlast.client"}),
        (OURS_ASYNC.imports + OURS_ASYNC.work, {"pydantic", *OTHERS, *READERS, "starlette", "outlast.client"}),
        (OURS_EDGE.imports, {*REST, "pydantic", *OTHERS, "outlast.client", "outlast.job", "importlib.resources"}),
        (OURS_EDGE.imports + OURS_EDGE.work, {"pydantic", *OTHERS, "outlast.client", "outlast.job"}),
    ],
    ids=["import", "client", "enqueue", "async client", "async enqueue", "edge", "edge's first answer"],
)
def test_what_is_not_needed_is_not_loaded(program: str, unneeded: set[str], environment: Mapping[str, str]) -> None:
    code = f"{program}\nimport sys\nprint(sorted(set(sys.modules) & {unneeded!r}))"
    done = subprocess.run([*PYTHON, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("ours", "bare", "budget"),
    [
        ("import outlast" + END, "import httpx" + END, 0.5),
        (OURS.importing, BARE.importing, 0.75),
        (OURS_EDGE.importing, BARE_EDGE.importing, 1.15),
        (OURS.program, BARE.program, 1.15),
        (OURS_ASYNC.program, BARE_ASYNC.program, 1.15),
        (OURS_EDGE.program, BARE_EDGE.program, 1.2),
    ],
    ids=["import", "client", "edge", "enqueue", "async enqueue", "edge's first answer"],
)
def test_cpu_beside_a_program_that_does_without_us(
    ours: str, bare: str, budget: float, environment: Mapping[str, str]
) -> None:
    least = [float("inf"), float("inf")]
    for _ in range(8):
        times = cold_start.compare((ours, bare), PYTHON, environment, rounds=5)
        least = [min(pair) for pair in zip(least, times, strict=True)]
        if least[0] <= budget * least[1]:
            return
    pytest.fail(f"{least[0] * 1e3:.0f} ms of CPU beside {least[1] * 1e3:.0f} ms: {least[0] / least[1]:.2f} times")
