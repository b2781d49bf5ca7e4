"""Results as pictures, PNG for people and SVG for documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.report import RunMetadata
from benchmarks.common.statistics import PERCENTILES, RoundSummary
from benchmarks.engine.results import EngineResults
from benchmarks.serving.results import ServingResults

FORMATS = ("png", "svg")
COLORS = ("#1b6ca8", "#e07a1f", "#3d8b57", "#8a4f9e")


def plot_serving(out: Path, facts: RunMetadata, figures: ServingResults) -> list[Path]:
    """Requests per second and latency by connections; returns the files."""
    figure, (rates, latencies) = _canvas(facts, f"{figures.model['id']}, one sentence a request")
    names = [str(level.connections) for level in figures.levels]
    _bars(rates, names, [("served", [level.requests_per_s for level in figures.levels])])
    if figures.engine:
        best = max(level.sentences_per_s.median for level in figures.engine)
        rates.axhline(best, color=COLORS[1], linestyle="--", label="raw engine, batches of 32")
    _label(rates, "connections", "requests per second")
    for colour, rank in zip(COLORS, PERCENTILES, strict=True):
        found = [level.latency_ms.get(f"p{rank}") for level in figures.levels]
        medians = [float("nan") if one is None else one.median for one in found]
        latencies.plot(names, medians, marker="o", color=colour, label=f"p{rank}")
    _label(latencies, "connections", "latency, ms", logarithmic=True)
    return _save(figure, out, facts)


def plot_engine(out: Path, facts: RunMetadata, figures: EngineResults) -> list[Path]:
    """Sentences per second by batch and latency by shape; returns the files."""
    figure, (rates, latencies) = _canvas(facts, f"{figures.model_id}, raw engine")
    sizes = list(dict.fromkeys(speed.batch for speed in figures.speeds))
    by_placement = {
        placement: [s.sentences_per_s for s in figures.speeds if s.placement == placement]
        for placement in dict.fromkeys(speed.placement for speed in figures.speeds)
    }
    series = [(placement.name, found) for placement, found in by_placement.items()]
    _bars(rates, [str(size) for size in sizes], series)
    _label(rates, "sentences per batch", "sentences per second")
    contenders = list(dict.fromkeys(cell.contender for cell in figures.latencies))
    shapes = list(dict.fromkeys(cell.shape.name for cell in figures.latencies))
    _bars(
        latencies,
        shapes,
        [(c, [x.ms for x in figures.latencies if x.contender == c]) for c in contenders],
    )
    _label(latencies, "batch x tokens", "latency, ms", logarithmic=True)
    return _save(figure, out, facts)


def _canvas(facts: RunMetadata, title: str) -> tuple[Any, Any]:
    """A figure with two plots side by side."""
    import matplotlib

    matplotlib.use("Agg")
    # Ids that do not change from run to run, so that files differ only where figures do.
    matplotlib.rcParams["svg.hashsalt"] = "hundredfold"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    figure.suptitle(title)
    figure.supxlabel(facts.host.short, fontsize="x-small", color="grey")
    return figure, axes


def _bars(
    axes: Any, names: Sequence[str], series: Sequence[tuple[str, Sequence[RoundSummary]]]
) -> None:
    """Medians as bars, the extreme rounds as whiskers."""
    width = 0.8 / len(series)
    for number, (label, summaries) in enumerate(series):
        left = [i - 0.4 + width * (number + 0.5) for i in range(len(summaries))]
        medians = [s.median for s in summaries]
        whiskers = [[s.median - s.low for s in summaries], [s.high - s.median for s in summaries]]
        axes.bar(left, medians, width, yerr=whiskers, capsize=3, label=label, color=COLORS[number])
    axes.set_xticks(range(len(names)), names)


def _label(axes: Any, x: str, y: str, *, logarithmic: bool = False) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize="small")


def _save(figure: Any, out: Path, facts: RunMetadata) -> list[Path]:
    from matplotlib import pyplot

    paths = [out / f"{facts.stem}.{kind}" for kind in FORMATS]
    for path in paths:
        figure.savefig(path, dpi=144, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return paths
