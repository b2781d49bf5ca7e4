"""Reports in the store, beside the cost tables of their host: outside of what is sealed.

<version>/hosts/<fingerprint>/report.json, report.md, report.png, report.svg
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from build_artifacts.console import format_table
from build_artifacts.report.values import (
    BASELINE,
    Report,
    ReportConditions,
    StageLatency,
    StageResult,
)
from deployments.artifacts.store import HOSTS_NAME, write_atomically
from deployments.tuning.host import Host

_NONE = "-"
ASIDE = "†"  # marks what is no part of the journey


def format_stages(report: Report) -> str:
    """All of it in at most 120 columns; speed-ups per length follow in a table of their own."""
    blocks = [_heading(report), format_table(_rows(report), align_right=True)]
    if _is_compared(report):
        ratios = format_table(_ratios(report), align_right=True)
        blocks.append(f"speed-up over `{BASELINE}`, by mean latency\n{ratios}")
    blocks.append("\n".join(_remarks(report)))
    return "\n\n".join(blocks)


def format_markdown(report: Report, *, plot: str | None) -> str:
    """The same as a document of its own; `plot` is the name of the picture beside it."""
    conditions = report.conditions
    versions = ", ".join(f"{name} {version}" for name, version in conditions.versions.items())
    facts = [
        f"# {report.id}: the journey",
        "",
        f"- artifact: version `{report.conditions.version}`, from `{report.source}`",
        f"- host: {_host(conditions.host)}"
        + (f"; {conditions.gpu.name}" if conditions.gpu else ""),
        f"- versions: {versions}",
        f"- measured: {report.measured_at}; {_method(report)}",
        *(f"- {line}" for line in _cut(report)),
        f"- command: `{report.command}`",
        "",
        *_grid(_rows(report)),
    ]
    if _is_compared(report):
        facts += ["", f"Speed-up over `{BASELINE}`, by mean latency:", "", *_grid(_ratios(report))]
    if plot is not None:
        facts += ["", f"![latency by tokens, and speed-up]({plot})"]
    facts += ["", *(f"- {line}" for line in _remarks(report))]
    return "\n".join(facts) + "\n"


def _heading(report: Report) -> str:
    conditions = report.conditions
    gpu = f", {conditions.gpu.name}" if conditions.gpu else ""
    lines = [
        f"{report.id} {conditions.version} on {conditions.host.name}{gpu}",
        f"latency in ms (mean ±std): {_method(report)}",
        *_cut(report),
    ]
    return "\n".join(lines)


def _method(report: Report) -> str:
    options, cores = report.conditions.options, report.conditions.host.cores
    return f"batch 1 on {options.threads} of {cores} cores, {options.runs} sequential runs"


def _cut(report: Report) -> list[str]:
    """How many runs there were, where the time did not suffice for all of them."""
    options = report.conditions.options
    if min(report.runs.values()) >= options.runs:
        return []
    told = ", ".join(f"{count} of {tokens} tokens" for tokens, count in report.runs.items())
    return [f"runs cut to fit {options.seconds:g} s: {told}"]


def _host(host: Host) -> str:
    flags = f" ({' '.join(host.flags)})" if host.flags else ""
    return f"{host.name}, {host.cores} cores{flags}"


def _is_compared(report: Report) -> bool:
    return any(stage.speedup is not None for stage in report.stages)


def _rows(report: Report) -> list[list[str]]:
    metric = [report.metric] if report.metric else []
    lengths = [f"{tokens} tokens" for tokens in report.lengths]
    rows = [["stage", "MB", *metric, _likeness_name(report), *lengths, "items/s", "speed-up"]]
    for stage in report.stages:
        scores = [_score(stage.scores.get(name)) for name in metric]
        found = {one.tokens: one for one in stage.latencies}
        items_per_s = stage.throughput.items_per_s if stage.throughput else None
        rows.append(
            [
                format_name(stage),
                f"{stage.size_bytes / 1e6:.1f}",
                *scores,
                _likeness(stage),
                *(_latency(found.get(tokens)) for tokens in report.lengths),
                _NONE if items_per_s is None else digits(items_per_s),
                _ratio(stage.speedup),
            ]
        )
    return rows


def _ratios(report: Report) -> list[list[str]]:
    lengths = [f"{tokens} tokens" for tokens in report.lengths]
    rows = [["stage", *lengths, "all lengths", "items/s"]]
    for stage in report.stages:
        found = {one.tokens: one.speedup for one in stage.latencies}
        full = stage.throughput.speedup if stage.throughput else None
        ratios = [*(found.get(tokens) for tokens in report.lengths), stage.speedup, full]
        rows.append([format_name(stage), *map(_ratio, ratios)])
    return rows


def _remarks(report: Report) -> list[str]:
    """What the rows are, how throughput was taken, and what is missing."""
    lines = [f"{format_name(stage)}: {stage.what}" for stage in report.stages]
    if any(not stage.is_baseline_path for stage in report.stages):
        lines.append(f"{ASIDE} no part of the journey, measured for comparison")
    pass_modes: dict[str, list[str]] = {}
    for stage in report.stages:
        if (one := stage.throughput) is not None:
            how = f"batches of {one.items} x {one.tokens} tokens, {one.passes} at once"
            pass_modes.setdefault(how, []).append(stage.name)
    lines += [f"items/s: {how} ({', '.join(names)})" for how, names in pass_modes.items()]
    lines += [f"not measured: {name}: {reason}" for name, reason in report.unmeasured.items()]
    return lines


def _likeness_name(report: Report) -> str:
    """Of what a model chooses, the cosine says little (see `deployments.tuning.parity.judge`)."""
    return "cosine" if report.stages[0].agreement is None else "top-1"


def _likeness(stage: StageResult) -> str:
    return f"{stage.cosine:.4f}" if stage.agreement is None else f"{stage.agreement:.1%}"


def format_name(stage: StageResult) -> str:
    """The name of a stage, marked where it is no part of the journey."""
    return stage.name if stage.is_baseline_path else f"{stage.name} {ASIDE}"


def _latency(latency: StageLatency | None) -> str:
    return _NONE if latency is None else f"{digits(latency.mean_ms)} ±{digits(latency.std_ms)}"


def _ratio(ratio: float | None) -> str:
    return _NONE if ratio is None else f"{ratio:.2f}x"


def _score(score: float | None) -> str:
    return _NONE if score is None else f"{score:.4f}"


def digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    places = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{places}f}"


def _grid(rows: Sequence[Sequence[str]]) -> list[str]:
    header, *body = rows
    rule = ["---", *("---:" for _ in header[1:])]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *body)]


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
        conditions = report.conditions
        figure.suptitle(
            f"{report.id} on {conditions.host.name}, "
            f"{conditions.options.threads} of {conditions.host.cores} cores"
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
            label=format_name(stage),
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


def _bars(axes: Any, report: Report, stages: Sequence[StageResult]) -> None:
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
    axes.set_xticks(range(len(stages)), [format_name(stage) for stage in stages])
    if not all(stage.is_baseline_path for stage in stages):
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


STEM = "report"

Tell = Callable[[str], None]  # one line for people


def report_path(artifact: Path, host: Host) -> Path:
    """The report.json of `host`."""
    return artifact / HOSTS_NAME / host.fingerprint / f"{STEM}.json"


def read_report(artifact: Path, conditions: ReportConditions, tell: Tell) -> Report | None:
    """Return the report if it is valid in `conditions`; otherwise report why and return None."""
    path = report_path(artifact, conditions.host)
    try:
        report = Report.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as exc:
        tell(f"measuring again: {path} cannot be used: {str(exc).splitlines()[0]}")
        return None
    if changed := _changed(report.conditions, conditions):
        tell(f"measuring again: not the {', '.join(changed)} of the stored report")
        return None
    if report.unmeasured:
        tell(f"measuring again: the stored report lacks {', '.join(report.unmeasured)}")
        return None
    return report


def _changed(then: ReportConditions, now: ReportConditions) -> list[str]:
    return [
        name for name in ReportConditions.model_fields if getattr(then, name) != getattr(now, name)
    ]


def write_report(artifact: Path, report: Report, tell: Tell) -> Path:
    """Write the report in all its forms; the path of report.json, which is written last.

    Each file is whole or not there. Without matplotlib there are no pictures. Raises OSError.
    """
    path = report_path(artifact, report.conditions.host)
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures = _pictures(report, tell)
    plot = f"{STEM}.svg" if pictures else None
    for form, content in pictures.items():
        write_atomically(path.with_suffix(f".{form}"), content)
    write_atomically(path.with_suffix(".md"), format_markdown(report, plot=plot).encode())
    write_atomically(path, report.to_json())
    return path


def _pictures(report: Report, tell: Tell) -> Mapping[str, bytes]:
    try:
        return draw(report)
    except ModuleNotFoundError as exc:
        if exc.name != "matplotlib":
            raise
        tell("no plot: `matplotlib` is not installed; `pip install 'hundredfold[build]'` adds it")
        return {}
