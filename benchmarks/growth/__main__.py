"""How cost grows, and where its curves bend: ``python -m benchmarks.growth [--only NAME] [--rounds N] [--write]``.

Rounds go from point to point and start over, so that whatever else the machine does falls on all of them; what counts
are the medians, and their ratios to the first point or to a bare command. `--write` puts tables and plots into
docs/growth.md, between the marks of each part; what the page says about them is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

from benchmarks.__main__ import machine
from benchmarks.growth import active, latency, payload, waiting, workers
from benchmarks.growth.common import Part
from benchmarks.plots import curves

DOCUMENT = Path(__file__).parents[2] / "docs" / "growth.md"
PARTS = {module.PART.name: module.PART for module in (waiting, active, payload, workers, latency)}
ROUNDS = 3


def section(part: Part, text: str, lines: list[str]) -> str:
    """The page with this part's table and plot in place of those that it has."""
    mark = re.compile(rf"(<!-- {part.name}: written .*? -->\n).*?(<!-- end -->)", re.DOTALL)
    found, count = mark.subn(lambda match: match[1] + "\n".join(["", *lines, ""]) + match[2], text)
    if count != 1:
        raise SystemExit(f"{DOCUMENT.name} has {count} places for {part.name!r}; it needs one")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help=f"of {', '.join(PARTS)}; with commas between")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--write", action="store_true", help="put tables and plots into docs/growth.md")
    options = parser.parse_args()
    for name in options.only.split(",") if options.only else PARTS:
        part, began = PARTS[name], time.monotonic()
        print(name, file=sys.stderr)
        points = part.measure(options.rounds)
        said = f"Medians of {options.rounds} rounds, {machine()}, {time.monotonic() - began:.0f} s."
        lines = [*part.lines(points), f"In brackets: to the first row. {said}", ""]
        print("\n".join(lines))
        if options.write:
            image = curves(f"growth-{name}", part.axis, part.label, points, part.panels)
            shown = [f"![Curves of {name}: the figures of the table below](images/{image.name})", "", *lines]
            DOCUMENT.write_text(section(part, DOCUMENT.read_text(), shown))


if __name__ == "__main__":
    main()
