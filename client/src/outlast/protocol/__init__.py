"""What client, worker, edge and gateway agree on: keys, scripts, calls. Standard library only, no I/O.

::

    enqueue ──▶ waiting ──reserve──▶ active ──settle──▶ completed | failed | cancelled
       │           ▲  ▲                 │
       └▶ scheduled┘  └──release────────┤ retry ──▶ scheduled
                   ▲                    │
    failed ─retry_dead                  └ lease lapsed: the next reserve takes it back

Each transition is one file in `lua/`, one function in `calls.py` (those of workers: `holding.py`) that returns a
`Call`, one script on the server and one round trip. A transport only sends Calls, so every rule stands once.

To change a script: edit the file, run ``scripts/digests`` (the list of digests makes every edit visible in
review), keep KEYS, ARGV and REPLY in its header true (a test reads them), and remember that EVALSHA is
addressed by content: old and new scripts run side by side during a deploy, so the data must suit both.
"""

from typing import TYPE_CHECKING, Any

from .calls import Call
from .keys import Keys

if TYPE_CHECKING:
    from .tail import Tail

__all__ = ["Call", "Keys", "Tail"]


def __getattr__(name: str) -> Any:
    if name != "Tail":  # whoever only enqueues need not load it
        raise AttributeError(f"module 'outlast.protocol' has no attribute {name!r}")
    from .tail import Tail

    globals()[name] = Tail
    return Tail
