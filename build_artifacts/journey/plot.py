"""A report as a picture, PNG for people and SVG for documents; readable in black and white."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from build_artifacts.journey.figures import BASELINE, Report, StageFigures
from build_artifacts.journey.rendering import ASIDE, digits, shown_name

FORMATS = ("png", "svg")
# A stage is told apart by its marker, its line and its hatching, so that colour is a luxury.
_COLOURS = ("#1b1b1b", "#7a7a7a", "#1b6ca8", "#3d8b57", "#e07a1f", "#8a4f9e", "#b03a48")
_MARKERS = ("o", "v", "s", "D", "^", "P", "X")
_LINES = ("-", (0, (1, 1)), "--", "-.", "-", (0, (3, 1, 1, 1)), ":")
_HATCHES = ("", "..", "//", "\\\\", "xx", "++", "oo")
_SIZE_INCHES = (11.0, 4.8)
_DPI = 144


def draw(report: Report) -> Mapping[str, bytes]:
    """The picture by format: latency by tokens, and speed-up where there is a baseline.

    Equal reports give equal bytes. Raises ModuleNotFoundError without matplotlib.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # Ids that do not change from run to run, so that files differ only where figures do.
    with matplotlib.rc_context({"svg.hashsalt": "hundredfold"}):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        setting = report.setting
        figure.suptitle(
            f"{report.id} on {setting.host.name}, "
            f"{setting.options.threads} of {setting.host.cores} cores"
        )
        gained = [stage for stage in report.stages if stage.speedup is not None]
        left, *others = figure.subplots(1, 2 if gained else 1, squeeze=False)[0]
        _curves(left, report)
        for right in others:
            _bars(right, report, gained)
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=7)
        return {form: _saved(figure, form) for form in FORMATS}


def _curves(axes: Any, report: Report) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    for number, stage in enumerate(report.stages):
        axes.errorbar(
            [one.tokens for one in stage.latencies],
            [one.mean_ms for one in stage.latencies],
            # A spread as wide as the mean has no lower end on a logarithmic axis.
            yerr=[min(one.std_ms, 0.9 * one.mean_ms) for one in stage.latencies],
            label=shown_name(stage),
            capsize=3,
            color=_of(_COLOURS, number),
            marker=_of(_MARKERS, number),
            linestyle=_of(_LINES, number),
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(report.lengths, [str(tokens) for tokens in report.lengths], minor=False)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(lambda ms, _place: f"{ms:g}")
    axes.set_xlabel("tokens of one item")
    axes.set_ylabel("latency, ms (mean ± standard deviation)")
    axes.grid(which="both", axis="y", alpha=0.3)


def _bars(axes: Any, report: Report, stages: Sequence[StageFigures]) -> None:
    numbers = {stage.name: number for number, stage in enumerate(report.stages)}
    for place, stage in enumerate(stages):
        height = stage.speedup or 0.0
        axes.bar(
            place,
            height,
            color="white",
            edgecolor=_of(_COLOURS, numbers[stage.name]),
            hatch=_of(_HATCHES, numbers[stage.name]),
        )
        axes.annotate(f"{digits(height)}x", (place, height), ha="center", va="bottom")
    axes.set_xticks(range(len(stages)), [shown_name(stage) for stage in stages])
    if not all(stage.in_journey for stage in stages):
        axes.set_xlabel(f"{ASIDE} for comparison")
    axes.set_ylabel(f"speed-up over {BASELINE}, all lengths")
    axes.margins(y=0.12)
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)


def _of(choices: Sequence[Any], number: int) -> Any:
    return choices[number % len(choices)]


def _saved(figure: Any, form: str) -> bytes:
    target = io.BytesIO()
    figure.savefig(target, format=form, dpi=_DPI, metadata={"Date": None} if form == "svg" else {})
    return target.getvalue()
