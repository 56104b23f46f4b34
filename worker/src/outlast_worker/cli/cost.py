"""``outlast cost``: billed commands and dollars of a workload, on a database that bills every command."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from . import show
from .app import AsJson, command

__all__: list[str] = []


def cost(
    jobs: Annotated[int, Option(min=1, help="Jobs a month.")] = 100_000,
    tokens: Annotated[int, Option(min=0, help="Emits of one job; 0 for jobs that only return a result.")] = 500,
    seconds: Annotated[float, Option(min=0.01, max=31_536_000, help="How long one job streams.")] = 15.0,
    viewers: Annotated[float, Option(min=0, max=1_000_000, help="Viewers of each job over HTTP, while it runs.")] = 1.0,
    workers: Annotated[int, Option(min=0, help="Worker processes.")] = 1,
    keys: Annotated[bool, Option("--keys/--no-keys", help="Whether jobs have an idempotency key.")] = True,
    economy: Annotated[
        bool, Option("--economy/--no-economy", help="Worker(economy=…); on by itself for Upstash hosts.")
    ] = True,
    emit_interval: Annotated[
        float | None, Option(min=0.001, help="Worker(emit_interval=…); by default 0.3 in economy mode, else 0.05.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """What a workload costs a month, in billed commands and dollars.

    From the counts that the tests check.

    The price is Upstash's, pay as you go, one region ($0.20 for 100,000 commands); each read region about doubles the
    writes' share. A server of your own bills nothing.
    """
    from outlast_worker.costs import DOLLARS, Workload, estimate

    work = Workload(jobs, tokens, seconds, keys, viewers, workers, economy, emit_interval)
    parts = estimate(work)
    total = sum(parts.values())
    if as_json:
        show.dump({"commands": {**parts, "total": total}, "dollars": round(total * DOLLARS, 2)})
        return 0
    rows = [(name, f"{count:,.0f}", f"{count * DOLLARS:,.2f}") for name, count in (*parts.items(), ("total", total))]
    show.table(("a month", "commands", "dollars"), rows)
    per = (total - parts["idle workers"]) / jobs
    show.put(f"\n{per:,.0f} commands a job, {per * DOLLARS * 1000:,.2f} dollars for 1,000")
    return 0


command(cost)
