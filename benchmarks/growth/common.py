"""What the parts of `benchmarks.growth` share: points, how they are shown, and whose CPU time it was."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import redis
from tests.servers import start_valkey

from benchmarks.plots import Panel

Points = dict[float, dict[str, float]]
"""At each point of the axis the median of each measure."""

CONCURRENCY = 50


@dataclass(frozen=True)
class Column:
    """One column of a part's tables. With `base` it is divided by that measure; else the cell also has, in brackets,
    what it is to the first row's.
    """

    key: str
    title: str
    unit: str = ""
    base: str = ""

    def cell(self, points: Points, x: float) -> str:
        value = points[x].get(self.key)
        if value is None:
            return "–"
        if self.base:
            return f"{value / points[x][self.base]:.2f}"
        text = f"{_number(value)} {self.unit}".strip()
        first = next(of[self.key] for of in points.values() if self.key in of)
        alone = x == next(iter(points)) or min(first, value) < 0.005
        return text if alone else f"{text} ({_number(value / first)})"


def _number(value: float) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}" if abs(value) >= 0.1 else f"{value:.2g}"


@dataclass(frozen=True)
class Part:
    """One thing that grows. `measure` is given how many rounds to do."""

    name: str
    axis: str
    label: Callable[[float], str]
    measure: Callable[[int], Points]
    tables: Sequence[Sequence[Column]]
    panels: Sequence[Panel]

    def lines(self, points: Points) -> list[str]:
        lines: list[str] = []
        for columns in self.tables:
            lines += ["| " + " | ".join([self.axis, *(column.title for column in columns)]) + " |"]
            lines += ["|---" * (len(columns) + 1) + "|"]
            lines += [
                "| " + " | ".join([self.label(x), *(column.cell(points, x) for column in columns)]) + " |"
                for x in points
            ]
            lines.append("")
        return lines


class Found:
    """Figures as the rounds bring them in."""

    def __init__(self, axis: Iterable[float]) -> None:
        self._of: dict[float, dict[str, list[float]]] = {x: {} for x in axis}

    def add(self, x: float, figures: dict[str, float]) -> None:
        for key, value in figures.items():
            self._of[x].setdefault(key, []).append(value)
        if len(figures) > 1:
            print(f"  {x:<10g}", {key: round(value, 2) for key, value in figures.items()}, file=sys.stderr)

    def medians(self) -> Points:
        return {x: {key: statistics.median(values) for key, values in of.items()} for x, of in self._of.items()}


def thousands(x: float) -> str:
    return f"{x / 1e6:g} M" if x >= 1e6 else f"{x / 1e3:g} k" if x >= 1e3 else f"{x:g}"


@contextmanager
def server() -> Iterator[tuple[str, Any]]:
    """A database that writes nothing to the disk, and a connection to ask it how it is."""
    with start_valkey(config={"save": "", "appendonly": "no"}) as valkey, redis.Redis(port=valkey.port) as raw:
        yield f"redis://127.0.0.1:{valkey.port}", raw


def server_cpu(raw: Any) -> float:
    """CPU seconds of the database since it started."""
    info: dict[str, float] = raw.info("cpu")
    return info["used_cpu_user"] + info["used_cpu_sys"]


def count_of(raw: Any, *names: str) -> int:
    """How often these commands ran."""
    stats: dict[str, dict[str, int]] = raw.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in names)


def process_cpu(pid: int) -> float:
    """CPU seconds of a process, to the microsecond where the kernel keeps them so."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        return sum(int(_read(f"/proc/{pid}/task/{task}/schedstat").split()[0]) for task in tasks) / 1e9
    except OSError:
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def child(module: str, *words: object) -> subprocess.Popen[str]:
    """A process of a part; what it prints can be read from `stdout`."""
    command = [sys.executable, "-m", f"benchmarks.growth.{module}", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def at_a_time(count: int, one: Callable[[], Awaitable[Any]], width: int = CONCURRENCY) -> float:
    """Seconds for `count` calls, `width` of them awaited at a time."""
    left = iter(range(count))

    async def some() -> None:
        for _ in left:
            await one()

    began = time.perf_counter()
    await asyncio.gather(*(some() for _ in range(width)))
    return time.perf_counter() - began


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[max(0, -int(-len(values) * part // 1) - 1)]
