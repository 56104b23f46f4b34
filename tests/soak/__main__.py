"""``python -m tests.soak --minutes N``: random faults for that long, then an audit. Exit code 1 for any finding."""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import tempfile
from pathlib import Path

from tests.soak.run import Soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="how long to break things (default 1; a fraction is fine)")
    length.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int, help="repeats the faults of an earlier run, though not their timing")
    parser.add_argument("--keep", type=Path, help="a folder for the logs of provider and workers")
    options = parser.parse_args()
    seconds = options.seconds or 60 * (options.minutes or 1)
    seed = options.seed if options.seed is not None else random.randrange(10**6)
    print(f"seed {seed}", flush=True)
    logging.getLogger("outlast").setLevel(logging.ERROR)  # that faults are survived is told by the thousand
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(Soak(seconds, seed, options.keep or Path(folder)).run())
    print(*report.lines(), sep="\n", flush=True)
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
