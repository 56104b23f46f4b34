"""Plots as SVG for the documents, from the figures that the tables have.

One file for light and dark pages: its colours are variables of a style sheet inside, which follows the page's scheme.
matplotlib draws them; it is in the dependency group `plots`, and only `--write` needs it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

__all__ = ["IMAGES", "Panel", "bars", "curves"]

IMAGES = Path(__file__).parents[1] / "docs" / "images"

WIDTH = 7.4
"""Inches, as wide as a page's text, so that letters keep their size."""
INK, GRID = "#010101", "#020202"
"""What is drawn with these becomes a variable, as do the colours of the series."""
SERIES = tuple(f"#0{n}0303" for n in range(8))
MARKERS = "os^Dv<>P"
LIGHT = {INK: "#333a45", GRID: "#d5d9e0"}
DARK = {INK: "#d3d8e2", GRID: "#434a58"}
# Okabe and Ito's colours, which the colour-blind can tell apart, once for white and once for dark grey.
for _sentinel, _light, _dark in zip(
    SERIES,
    ("#0072b2", "#d55e00", "#008a63", "#aa4499", "#8a6d00", "#2b9bc9", "#555555", "#cc3311"),
    ("#56b4e9", "#ff9d5c", "#2fd0a0", "#ee99cc", "#f0e442", "#a0d8ff", "#bbbbbb", "#ff8877"),
    strict=True,
):
    LIGHT[_sentinel], DARK[_sentinel] = _light, _dark


@dataclass(frozen=True)
class Panel:
    """One of a plot's diagrams: the measures that it shows, by their keys, with their names."""

    title: str
    unit: str
    series: Mapping[str, str]
    log: bool = False


def _figure(height: float, panels: int = 1) -> tuple[Any, list[Any]]:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise SystemExit("plots need matplotlib: uv run --group plots python -m benchmarks… --write") from None
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), INK),
            **{"grid.color": GRID, "grid.linewidth": 0.8, "axes.grid": True, "axes.axisbelow": True},
            **{"axes.spines.top": False, "axes.spines.right": False, "font.size": 9, "axes.titlesize": 10},
            **{"svg.fonttype": "none", "svg.hashsalt": "outlast", "font.family": "sans-serif", "lines.linewidth": 1.8},
            **{"legend.frameon": False, "lines.markersize": 5},
        }
    )
    columns = min(panels, 2)
    rows = ceil(panels / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(WIDTH, height * rows), layout="constrained", squeeze=False)
    for spare in axes.flat[panels:]:
        spare.set_visible(False)
    return figure, list(axes.flat[:panels])


def _save(figure: Any, name: str) -> Path:
    import matplotlib.pyplot as plt

    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    text = drawn.getvalue()
    for number, sentinel in enumerate(LIGHT):
        text = text.replace(sentinel, f"var(--c{number})")
    text = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font: \1px system-ui, sans-serif", text)

    def scheme(colours: Mapping[str, str]) -> str:
        return "".join(f"--c{number}:{colours[sentinel]};" for number, sentinel in enumerate(LIGHT))

    style = f"<style>svg{{{scheme(LIGHT)}}}@media(prefers-color-scheme:dark){{svg{{{scheme(DARK)}}}}}</style>"
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    head, tag, rest = text[text.index("<svg") :].partition(">")
    path = IMAGES / f"{name}.svg"
    path.write_text("\n".join(line.rstrip() for line in (head + tag + style + rest).splitlines()) + "\n")
    return path


def curves(
    name: str,
    axis: str,
    label: Callable[[float], str],
    points: Mapping[float, Mapping[str, float]],
    panels: Sequence[Panel],
) -> Path:
    """A diagram for each panel, two in a row. The points of the axis stand at equal distances, each a step further."""
    figure, axes = _figure(3.1, len(panels))
    places = range(len(points))
    for ax, panel in zip(axes, panels, strict=True):
        for (key, title), colour, marker in zip(panel.series.items(), SERIES, MARKERS, strict=False):
            values = [figures.get(key) for figures in points.values()]
            ax.plot(
                places, [float("nan") if v is None else v for v in values], color=colour, marker=marker, label=title
            )
        ax.set(title=panel.title, xlabel=axis, ylabel=panel.unit)
        ax.set_xticks(list(places), [label(x) for x in points])
        _scale(ax, panel.log)
        if len(panel.series) > 1:
            many = len(panel.series) > 4
            if many:  # the legend gets a place of its own above the curves
                low, high = ax.get_ylim()
                ax.set_ylim(low, high * (high / low) ** 0.6)
            ax.legend(fontsize=8, ncols=2 if many else 1)
    return _save(figure, name)


def _scale(ax: Any, log: bool) -> None:
    from matplotlib.ticker import LogLocator

    if log:
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        if high < 50 * low:
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    ax.minorticks_off()


def bars(name: str, title: str, rows: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> Path:
    """Ratios as bars from 1, to the right where ours is better."""
    figure, [ax] = _figure(0.8 + 0.42 * len(rows))
    height = 0.8 / len(series)
    every = [value for values in series.values() for value in values if value]
    for number, ((label, values), colour) in enumerate(zip(series.items(), SERIES, strict=False)):
        places = [row + number * height - 0.4 + height / 2 for row, v in enumerate(values) if v]
        ratios = [v for v in values if v]
        ax.barh(places, [v - 1 for v in ratios], left=1, height=height * 0.9, color=colour, label=label)
        for place, ratio in zip(places, ratios, strict=True):
            side = "left" if ratio >= 1 else "right"
            ax.annotate(f" {ratio:.3g}× ", (ratio, place), ha=side, va="center", fontsize=8)
    ax.set_xscale("log")
    ax.set_xlim(min(0.5, min(every) / 3), max(2, max(every) * 2.5))
    ax.axvline(1, color=INK, linewidth=1)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    ax.minorticks_off()
    ax.set_yticks(range(len(rows)), rows)
    ax.grid(axis="y", visible=False)
    ax.invert_yaxis()
    ax.set(title=title)
    ax.legend(loc="best", fontsize=8)
    return _save(figure, name)
