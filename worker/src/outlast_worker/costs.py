"""What a workload costs where every command is billed, as on Upstash: the EVALSHA and each call inside the script.

`COMMANDS` are counts of the real scripts; a test compares each with what a server counts, and `estimate` with a run.
"""

from __future__ import annotations

from dataclasses import dataclass

from .registration import PROMPT, THRIFTY, Pace

__all__ = ["COMMANDS", "DOLLARS", "Workload", "estimate", "idle_month"]

COMMANDS = {
    "enqueue plain": 7,
    "enqueue with a key": 9,
    "reserve of 1": 10,
    "reserve empty": 6,
    "flush of 1": 3,
    "flush of 1, renewing": 6,
    "renewal of 1": 4,
    "settle": 8,
    "settle with a key": 10,
    "cancel waiting": 8,
    "cancel active": 6,
    "get": 1,
}
PER_BLOCK = 4.3
"""Of an idle worker: it waits and looks at what is due; one look in ten is a reserve."""
DOLLARS = 0.20 / 100_000
"""Upstash, pay as you go, one region, November 2026."""
MONTH = 30 * 86_400


@dataclass(frozen=True)
class Workload:
    """`jobs` a month, each of `tokens` over `seconds`; `viewers` of each, over HTTP, for as long as it runs."""

    jobs: int
    tokens: int = 500
    seconds: float = 15.0
    keys: bool = True
    viewers: float = 1.0
    workers: int = 1
    economy: bool = True
    """As a worker chooses by itself where commands are billed."""
    emit_interval: float | None = None
    """None: as the pace has it."""
    lease: float = 60.0

    @property
    def pace(self) -> Pace:
        return THRIFTY if self.economy else PROMPT


def idle_month(pace: Pace, block: float, per_block: float = PER_BLOCK) -> float:
    """What a worker without work is billed for in 30 days: it waits, looks, and says that it is there."""
    return MONTH / block * per_block + MONTH / pace.seen


def estimate(work: Workload) -> dict[str, float]:
    """Billed commands a month, by what causes them."""
    kind = " with a key" if work.keys else ""
    pace = work.pace
    interval = pace.emit_interval if work.emit_interval is None else work.emit_interval
    flushes = max(1.0, min(work.tokens, work.seconds / interval)) if work.tokens else 0.0
    renewals = work.seconds // min(pace.beat, work.lease / pace.beats)
    # A reader over HTTP asks again 0.15 s after data came, for as long as it comes.
    polls = work.seconds / 0.2 if flushes else work.seconds / 2
    return {
        "enqueue": work.jobs * COMMANDS[f"enqueue{kind or ' plain'}"],
        "take": work.jobs * (1 + COMMANDS["reserve of 1"]),
        "stream": work.jobs * (flushes * COMMANDS["flush of 1"] + renewals * COMMANDS["renewal of 1"]),
        "end": work.jobs * COMMANDS[f"settle{kind}"],
        "viewers": work.jobs * work.viewers * polls,
        "idle workers": work.workers * idle_month(pace, min(pace.block, work.lease * pace.share)),
    }
