"""outlast without the extra `fast`: replies are read by our own reader, on asyncio's own loop."""

from __future__ import annotations

import outlast_worker.resp
from benchmarks.contest import main
from benchmarks.ours import MORE, Ours


class Plain(Ours):
    loop = None


if __name__ == "__main__":
    outlast_worker.resp._hiredis = None
    main(Plain, MORE)
