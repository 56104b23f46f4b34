"""Break a rule in a copy of the tree, and see the test that is there for it go red; then the next rule.

    python -m tests.mutations               every mutation; four to five minutes on two quiet cores
    python -m tests.mutations NAME ...      those whose names begin so
    python -m tests.mutations --sample 10   ten at random, other ones each time
    python -m tests.mutations --list        their names, and what each breaks

The tree itself is never touched. It ends with 1 if one survives, or no longer applies because its text is not in the
file any more (or is there more than once), or if its tests do not pass to begin with.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from .rules import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120.0
"""Seconds for the tests of one mutation: what hangs because of it is caught, too, but should be caught sooner."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description="Do the tests notice?")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only mutations whose names begin with one of these")
    parser.add_argument("--sample", type=int, metavar="N", help="only N of them, at random")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="how many at a time (default: 2)")
    parser.add_argument("--list", action="store_true", help="list them and end")
    options = parser.parse_args(argv)
    named = [m for m in MUTATIONS if not options.names or m.name.startswith(tuple(options.names))]
    chosen = named
    if options.sample is not None and options.sample < len(chosen):
        chosen = random.sample(chosen, options.sample)
    if options.list:
        for mutation in chosen:
            print(f"{mutation.name:28} {mutation.breaks}")
        return 0
    if not chosen:
        parser.error(f"no mutation's name begins with {' or '.join(options.names)}")

    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for n in range(options.jobs):
            copies.put(copy := Path(folder, str(n)))
            copy_tree(copy)
        stale = [m for m in named if not m.applies(copy)]  # also those that are not in the sample: it costs nothing
        chosen = [m for m in chosen if m not in stale]
        for mutation in stale:
            print(f"{'STALE':9} {mutation.name}: the text to change is not there exactly once in {mutation.file}")
        if red := red_tests(copy, sorted({test for m in chosen for test in m.tests}), stop_early=False, spread=True):
            print("These do not pass without any mutation:", *red, sep="\n  ")
            return 1

        def attempt(mutation: Mutation) -> bool:
            copy = copies.get()
            try:
                with mutation.applied(copy):
                    red = red_tests(copy, mutation.tests)
            finally:
                copies.put(copy)
            # One print a line: they come from several threads.
            print(
                f"{'caught' if red else 'SURVIVED':9} {mutation.name:28} {red[0] if red else mutation.breaks}",
                flush=True,
            )
            return bool(red)

        with ThreadPoolExecutor(options.jobs) as pool:
            caught = list(pool.map(attempt, chosen))
    print(
        f"{len(caught)} mutations in {time.monotonic() - begin:.0f} s: {sum(caught)} caught, "
        f"{len(caught) - sum(caught)} survived, {len(stale)} no longer apply"
    )
    return 0 if all(caught) and not stale else 1


def copy_tree(to: Path) -> None:
    """What git knows or would add, as it is now: also what is not committed yet."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    for name in names:
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def red_tests(copy: Path, tests: Sequence[str], *, stop_early: bool = True, spread: bool = False) -> list[str]:
    """The tests that fail in the copy. Raises RuntimeError if they cannot even be run there."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "60", "--tb", "no"]
    command += ["-x"] * stop_early + ["-n2"] * spread + [f"tests/{test}" for test in tests]
    sources = [str(copy / part / "src") for part in ("client", "worker", "edge")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(copy), *sources]), "PYTHONDONTWRITEBYTECODE": "1"}
    env.pop("PYTEST_CURRENT_TEST", None)
    try:
        run = subprocess.run(
            command, cwd=copy, env=env, capture_output=True, text=True, timeout=LIMIT * (3 if spread else 1)
        )
    except subprocess.TimeoutExpired:
        return [f"{tests[0]} (or one after it: given up after {LIMIT:g} s)"]
    red = re.findall(r"^FAILED tests/(.+?)(?: - .*)?$", run.stdout, re.MULTILINE)
    if run.returncode == 0 or (run.returncode == 1 and red):
        return red
    raise RuntimeError(f"pytest cannot run {tests}: exit {run.returncode}\n{run.stdout[-3000:]}{run.stderr[-3000:]}")


if __name__ == "__main__":
    sys.exit(main())
