"""Every figure of outlast beside those of its peers, in one interleaved run: ``uv run python -m benchmarks``.

Each figure comes from a process of its own, against a server that is emptied before; contestants take turns, so that
whatever else the machine does falls on all of them. What counts are the ratios. `--only`, `--rounds` and `--peers`
narrow it down; `--write` puts the result into docs/benchmarks.md, with a plot of the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import redis
from tests.servers import start_valkey

from benchmarks import bills, plots
from benchmarks.peers import PEERS

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
Figures = dict[str, float]
Found = dict[tuple[str, str], list[Figures]]
"""By measure and contestant."""


@dataclass(frozen=True)
class Row:
    """One line of the table. `reach(ours, floor)`: what ours has to be, and whether more or less is better."""

    measure: str
    title: str
    unit: str
    peers: Sequence[str]
    reach: Callable[[float], float]
    more_is_better: bool = False
    field: str = "value"
    quoted: str = ""
    floor: bool = True
    counts: tuple[tuple[str, int], ...] = ()


ALL = tuple(PEERS)
SLOW = (("arq", 25),)
"""arq polls every half second: fewer jobs say as much about it."""
ROWS = (
    Row(
        *("drain", "no-op jobs a second, concurrency 50", "/s", ALL),
        reach=lambda floor: floor,
        more_is_better=True,
        counts=(("arq", 2000),),
    ),
    Row("drain", "worker CPU a job", "µs", ALL, lambda floor: 70, field="cpu_us"),
    Row("enqueue", "enqueue over TCP, 50 awaits", "/s", ALL, lambda floor: floor, more_is_better=True),
    Row("latency", "enqueue to start, idle worker, p50", "ms", ALL, lambda floor: floor, counts=SLOW),
    Row("latency", "enqueue to start, idle worker, p99", "ms", ALL, lambda floor: 3, field="p99", counts=SLOW),
    Row(
        "cancel",
        "cancel to interruption, silent handler, p50",
        "ms",
        ("saq", "streaq", "arq"),
        lambda _: 1,
        floor=False,
    ),
    Row(
        "cancel",
        "cancel to interruption, silent handler, p99",
        "ms",
        ("saq", "streaq", "arq"),
        lambda _: 5,
        field="p99",
        floor=False,
    ),
    Row(
        "late", "delayed job on an idle worker, lateness p99", "ms", (), lambda _: 6, quoted="benni 4,749", floor=False
    ),
    Row(
        "killed",
        "kill -9 to next start, beyond the lease",
        "s",
        (),
        lambda _: 1,
        quoted="streaq 57 in all",
        floor=False,
    ),
    Row("trips", "writes to the database a job, at load", "", (), lambda _: 2.1, quoted="bullmq 3.1", floor=False),
    Row("memory", "memory a waiting job, 100-byte payload", "B", ALL, lambda _: 950),
    Row("flushes", "flushes a second through one worker", "/s", (), lambda _: 20_000, more_is_better=True, floor=False),
    Row("stream", "emit to viewer, 200 jobs at 100 tokens/s, p99", "ms", (), lambda _: 120, floor=False),
    Row("viewers", "emit to SSE, 5,000 viewers, p95", "ms", (), lambda _: 150, field="p95_ms", floor=False),
    Row(
        "viewers",
        "database connections of 5,000 viewers",
        "",
        (),
        lambda _: 4,
        field="connections",
        quoted="benni: one each",
        floor=False,
    ),
)
ROUNDS = {"cancel": 1, "late": 1, "killed": 1, "trips": 1, "memory": 1, "flushes": 2, "stream": 1, "viewers": 1}
BEST_OF = 3


def command_of(contestant: str) -> list[str]:
    uv = shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")
    match contestant:
        case "ours" | "plain":
            return [sys.executable, "-m", f"benchmarks.{contestant}"]
        case "floor":
            return [uv, "run", "--quiet", "--with", "hiredis", "python", "-m", "benchmarks.floor"]
        case _:
            packages = [part for package in PEERS[contestant] for part in ("--with", package)]
            return [uv, "run", "--quiet", "--no-project", *packages, "python", "-m", f"benchmarks.peers.{contestant}"]


def measure(contestant: str, what: str, url: str, count: int | None) -> Figures | None:
    """One figure, or None and a line on stderr: a peer that fails is left out and said to be."""
    if what == "viewers":
        command = [sys.executable, "-m", "benchmarks.viewers", "--json"]
    else:
        command = [*command_of(contestant), what, url, *([] if count is None else [str(count)])]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=40, check=True)
        found: Figures = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        said = (getattr(error, "stderr", None) or "").strip().splitlines()[-1:]
        print(f"{contestant} {what}: {type(error).__name__} {said}", file=sys.stderr)
        return None
    return found


def run(names: Sequence[str], peers: Sequence[str], rounds: int) -> Found:
    """All figures, by measure and contestant."""
    found: Found = {}
    with start_valkey(config={"save": "", "appendonly": "no"}) as server:
        url = f"redis://127.0.0.1:{server.port}"
        raw = redis.Redis.from_url(url)
        for name in names:
            rows = [row for row in ROWS if row.measure == name]
            contestants = ["ours", *(["plain", "floor"] if rows[0].floor else [])]
            contestants += [peer for peer in rows[0].peers if peer in peers]
            for _ in range(min(rounds, ROUNDS.get(name, rounds))):
                random.shuffle(contestants)
                for contestant in contestants:
                    raw.flushall()
                    figures = measure(contestant, name, url, dict(rows[0].counts).get(contestant))
                    if figures is not None:
                        found.setdefault((name, contestant), []).append(figures)
                        print(f"{name:9} {contestant:8} {figures}", file=sys.stderr)
        raw.close()
    return found


def number(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    text = f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
    return f"{text} {unit}".strip()


def median(found: Found, row: Row, contestant: str) -> float | None:
    figures = found.get((row.measure, contestant))
    return None if figures is None else statistics.median(figure[row.field] for figure in figures)


def best(found: Found, row: Row) -> tuple[float | None, str]:
    """The best peer's figure, and which peer that is."""
    return (max if row.more_is_better else min)(
        ((value, peer) for peer in row.peers if (value := median(found, row, peer)) is not None), default=(None, "")
    )


def table(found: Found) -> list[str]:
    lines = [
        "| measure | outlast | reach | reached | floor | outlast / floor | best peer | outlast / best peer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        ours, floor, peer = median(found, row, "ours"), median(found, row, "floor"), best(found, row)
        if ours is None:
            continue
        reach = row.reach(floor or 0)
        good = ours >= reach if row.more_is_better else ours <= reach
        sign = "≥" if row.more_is_better else "≤"
        lines.append(
            f"| {row.title} | {number(ours, row.unit)} | {sign} {number(reach, row.unit)} | "
            f"{'yes' if good else '**no**'} | {number(floor, row.unit)} | {f'{ours / floor:.2f}' if floor else '–'} | "
            f"{f'{peer[1]} {number(peer[0], row.unit)}' if peer[0] else row.quoted or '–'} | "
            f"{f'{ours / peer[0]:.2f}' if peer[0] else '–'} |"
        )
    return lines


def plot(found: Found) -> list[str]:
    """Bars of how much better than floor and best peer, drawn into docs/images; the lines that show them."""
    names: list[str] = []
    bars: dict[str, list[float | None]] = {"than the floor": [], "than the best peer": []}
    for row in ROWS:
        ours, others = median(found, row, "ours"), (median(found, row, "floor"), best(found, row)[0])
        if not ours or not any(others):
            continue
        names.append(row.title)
        for ratios, other in zip(bars.values(), others, strict=True):
            ratios.append((ours / other if row.more_is_better else other / ours) if other else None)
    if not names:
        return []
    image = plots.bars("benchmarks", "how many times better: to the right of 1× is outlast", names, bars)
    return [f"![outlast to the floor and to the best peer, as in the table below](images/{image.name})", ""]


def everybody(found: Found) -> list[str]:
    """All contestants of the measures that peers share."""
    names = ["ours", "plain", "floor", *ALL]
    lines = ["| | " + " | ".join(["outlast", "without `fast`", *names[2:]]) + " |", "|---" * (len(names) + 1) + "|"]
    for row in ROWS:
        if row.peers:
            cells = [number(median(found, row, name), "") for name in names]
            lines.append(f"| {row.title}, {row.unit} | " + " | ".join(cells) + " |")
    return lines


def machine() -> str:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    python = platform.python_version()
    return f"{os.cpu_count()} cores of {model}, {platform.system()}, CPython {python}, Valkey from its wheel"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    measures = list(dict.fromkeys(row.measure for row in ROWS))
    parser.add_argument("--only", help=f"of {', '.join(measures)}, bills; with commas between")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--rounds", type=int, default=BEST_OF)
    parser.add_argument("--write", action="store_true", help="put tables and plot into docs/benchmarks.md")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [*measures, "bills"]
    began = time.monotonic()
    billed = asyncio.run(bills.table()) if "bills" in names else []
    found = run([name for name in measures if name in names], options.peers.split(","), options.rounds)
    sections = [
        *(["## Speed", "", *(plot(found) if options.write else []), *table(found), ""] if found else []),
        *(["## Everybody", "", *everybody(found), ""] if len(found) > 1 else []),
        *(["## Billed commands", "", *billed, ""] if billed else []),
        f"Medians of up to {options.rounds} rounds, {machine()}. The run took {time.monotonic() - began:.0f} s.",
    ]
    text = "\n".join(sections)
    print(text)
    if options.write:
        head, mark, _ = DOCUMENT.read_text().partition("<!-- below: written by python -m benchmarks --write -->\n")
        DOCUMENT.write_text(f"{head}{mark}\n{text}\n")


if __name__ == "__main__":
    main()
