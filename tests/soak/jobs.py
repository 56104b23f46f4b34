"""What the soak's processes agree on."""

from __future__ import annotations

from typing import Any

LEASE = 1.0
QUEUE: dict[str, Any] = {
    **{"name": "soak", "lease": LEASE, "max_attempts": 1000, "backoff": 0.02, "max_backoff": 0.2},
    # Everything must still be there when the auditor comes.
    **{"result_ttl": 86_400, "dead_ttl": 86_400},
}


def text_of(start: int, words: int) -> str:
    """What the `start`-th start of a job writes: each start another text, so that none can pass for another's."""
    return "".join(f"{start}.{n} " for n in range(words))
