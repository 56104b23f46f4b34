"""The limits that SECURITY.md names are those of the code; that each is kept is for the tests of its part."""

from __future__ import annotations

from pathlib import Path

from outlast import Queue
from outlast._base import PAGE_LIMIT
from outlast._checks import MAX_COUNTERS, MAX_ID_BYTES
from outlast.errors import MAX_DELAY
from outlast_worker import output
from outlast_worker.gateway import Database, GatewayConfig

PAGE = Path(__file__).parents[2] / "SECURITY.md"
MIB = 1024 * 1024


def test_the_limits_are_those_of_the_code() -> None:
    lines = PAGE.read_text(encoding="utf-8").partition("## Limits")[2].splitlines()
    limits = {cells[0]: cells[1] for cells in (line.strip("| ").split(" | ") for line in lines) if len(cells) == 3}
    queue = Queue("q")
    gateway = GatewayConfig(databases=[Database(redis_url="redis://localhost", token="a-token")])
    for what, limit in {
        "job id": f"{MAX_ID_BYTES} bytes",
        "payload": f"{queue.max_payload // MIB} MiB, {queue.max_result // MIB} MiB,",
        "one step": f"{queue.max_step // MIB} MiB",
        "one event": f"split at {output.PIECE // 1024} Ki characters; JSON has {output.MAX_EVENT // MIB} MiB",
        "output that": f"about {output.FULL_CHARS // MIB} MiB",
        "counters": f"{MAX_COUNTERS} for a job",
        "one command": f"{gateway.max_request_bytes // MIB} MiB",
        "a page": f"{PAGE_LIMIT:,};",
        "delay": "one year" if MAX_DELAY == 365 * 86_400 else "",
    }.items():
        [said] = [text for row, text in limits.items() if row.startswith(what)]
        assert limit, what
        assert limit in said, what
