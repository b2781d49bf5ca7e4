"""Plots of results as PNG and SVG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.report import RunMetadata
from benchmarks.common.statistics import RoundSummary

FORMATS = ("png", "svg")
COLORS = ("#1b6ca8", "#e07a1f", "#3d8b57", "#8a4f9e", "#b8860b", "#c0395b", "#5b6770")


def create_figure(
    run: RunMetadata, title: str, size: tuple[float, float] = (11, 4.2), *, rows: int = 1
) -> tuple[Any, Any]:
    """Return a figure of `size` inches and its axes, two per row."""
    import matplotlib

    matplotlib.use("Agg")
    # A fixed salt gives equal element ids in all runs, so SVG files differ only if results do.
    matplotlib.rcParams["svg.hashsalt"] = "hundredfold"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, 2, figsize=size, layout="constrained")
    figure.suptitle(title)
    figure.supxlabel(run.host.short, fontsize="x-small", color="grey")
    return figure, axes


def draw_bars(
    axes: Any, names: Sequence[str], series: Sequence[tuple[str, Sequence[RoundSummary]]]
) -> None:
    """Draw medians as bars. Error bars span the lowest to the highest round."""
    width = 0.8 / len(series)
    for index, (label, summaries) in enumerate(series):
        left = [i - 0.4 + width * (index + 0.5) for i in range(len(summaries))]
        medians = [s.median for s in summaries]
        errors = [[s.median - s.low for s in summaries], [s.high - s.median for s in summaries]]
        axes.bar(left, medians, width, yerr=errors, capsize=3, label=label, color=COLORS[index])
    axes.set_xticks(range(len(names)), names)


def label_axes(
    axes: Any, x: str, y: str, *, logarithmic: bool = False, legend: bool = True
) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    if legend and axes.get_legend_handles_labels()[1]:  # matplotlib warns of an empty legend
        axes.legend(fontsize="small")


def save_figure(figure: Any, out: Path, run: RunMetadata) -> list[Path]:
    """Write the figure in every format. Return the paths."""
    from matplotlib import pyplot

    paths = [out / f"{run.stem}.{suffix}" for suffix in FORMATS]
    for path in paths:
        figure.savefig(path, dpi=144, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return paths
