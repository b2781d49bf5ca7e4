"""Text, Markdown and plots of a report, and its files next to the cost tables of the host.

<version>/hosts/<fingerprint>/report.json, report.md, report.png, report.svg
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from build_artifacts.report.values import (
    BASELINE,
    Report,
    ReportConditions,
    StageLatency,
    StageResult,
)
from deployments.artifacts.store import host_directory
from deployments.files import write_atomically
from deployments.host.machine import advise_install
from deployments.terminal.console import format_table
from deployments.tuning.host import Host

_NONE = "-"
COMPARISON_MARK = "†"  # marks stages measured only for comparison


def format_stages(report: Report) -> str:
    """Format the report for the console, in 120 columns if names and reasons are short.

    If there is a baseline, a second table has the speed-ups by length.
    """
    blocks = [_format_heading(report), format_table(_build_rows(report), align_right=True)]
    if _has_speedups(report):
        ratios = format_table(_build_ratios(report), align_right=True)
        blocks.append(f"speed-up over `{BASELINE}`, by mean latency\n{ratios}")
    blocks.append("\n".join(_list_remarks(report)))
    return "\n\n".join(blocks)


def format_markdown(report: Report, *, plot: str | None) -> str:
    """Format the report as a Markdown document. `plot` is the file name of its plot."""
    conditions = report.conditions
    versions = ", ".join(f"{name} {version}" for name, version in conditions.versions.items())
    lines = [
        f"# {report.id}: report of all stages",
        "",
        f"- artifact: version `{report.conditions.version}`, from `{report.source}`",
        f"- host: {_format_host(conditions.host)}"
        + (f"; {conditions.gpu.name}" if conditions.gpu else ""),
        f"- versions: {versions}",
        f"- measured: {report.measured_at}; {_format_method(report)}",
        *(f"- {line}" for line in _format_cut_runs(report)),
        f"- command: `{report.command}`",
        "",
        *_format_grid(_build_rows(report)),
    ]
    if _has_speedups(report):
        lines += [
            "",
            f"Speed-up over `{BASELINE}`, by mean latency:",
            "",
            *_format_grid(_build_ratios(report)),
        ]
    if plot is not None:
        lines += ["", f"![latency by tokens, and speed-up]({plot})"]
    lines += ["", *(f"- {line}" for line in _list_remarks(report))]
    return "\n".join(lines) + "\n"


def _format_heading(report: Report) -> str:
    conditions = report.conditions
    gpu = f", {conditions.gpu.name}" if conditions.gpu else ""
    lines = [
        f"{report.id} {conditions.version} on {conditions.host.name}{gpu}",
        f"latency in ms (mean ±std): {_format_method(report)}",
        *_format_cut_runs(report),
    ]
    return "\n".join(lines)


def _format_method(report: Report) -> str:
    options, cores = report.conditions.options, report.conditions.host.cores
    return f"batch 1 on {options.threads} of {cores} cores, {options.runs} sequential runs"


def _format_cut_runs(report: Report) -> list[str]:
    """Return a line with the runs by length if the time budget reduced them, else no line."""
    options = report.conditions.options
    if min(report.runs.values()) >= options.runs:
        return []
    counts = ", ".join(f"{count} of {tokens} tokens" for tokens, count in report.runs.items())
    return [f"runs cut to fit {options.seconds:g} s: {counts}"]


def _format_host(host: Host) -> str:
    flags = f" ({' '.join(host.flags)})" if host.flags else ""
    return f"{host.name}, {host.cores} cores{flags}"


def _has_speedups(report: Report) -> bool:
    return any(stage.speedup is not None for stage in report.stages)


def _build_rows(report: Report) -> list[list[str]]:
    metric = [report.metric] if report.metric else []
    lengths = [f"{tokens} tokens" for tokens in report.lengths]
    rows = [["stage", "MB", *metric, _similarity_name(report), *lengths, "items/s", "speed-up"]]
    for stage in report.stages:
        scores = [_format_score(stage.scores.get(name)) for name in metric]
        latencies = {latency.tokens: latency for latency in stage.latencies}
        items_per_s = stage.throughput.items_per_s if stage.throughput else None
        rows.append(
            [
                format_name(stage),
                f"{stage.size_bytes / 1e6:.1f}",
                *scores,
                _format_similarity(stage),
                *(_format_latency(latencies.get(tokens)) for tokens in report.lengths),
                _NONE if items_per_s is None else format_number(items_per_s),
                _format_ratio(stage.speedup),
            ]
        )
    return rows


def _build_ratios(report: Report) -> list[list[str]]:
    lengths = [f"{tokens} tokens" for tokens in report.lengths]
    rows = [["stage", *lengths, "all lengths", "items/s"]]
    for stage in report.stages:
        speedups = {latency.tokens: latency.speedup for latency in stage.latencies}
        full_batch = stage.throughput.speedup if stage.throughput else None
        ratios = [*(speedups.get(tokens) for tokens in report.lengths), stage.speedup, full_batch]
        rows.append([format_name(stage), *map(_format_ratio, ratios)])
    return rows


def _list_remarks(report: Report) -> list[str]:
    """List the remarks below the tables.

    Remarks describe each stage, its accuracy in batches, and the batches of the throughput
    measurement. The last remarks name what was not measured.
    """
    lines = [f"{format_name(stage)}: {stage.what}" for stage in report.stages]
    if any(not stage.is_baseline_path for stage in report.stages):
        lines.append(f"{COMPARISON_MARK} measured for comparison only")
    lines += [
        f"{format_name(stage)}: worst of a text in a batch to the same text alone: {values}"
        for stage in report.stages
        if (values := _format_batched(stage))
    ]
    pass_modes: dict[str, list[str]] = {}
    for stage in report.stages:
        if (throughput := stage.throughput) is not None:
            batches = f"batches of {throughput.items} x {throughput.tokens} tokens"
            mode = f"{batches}, {throughput.passes} at once"
            pass_modes.setdefault(mode, []).append(stage.name)
    lines += [f"items/s: {mode} ({', '.join(names)})" for mode, names in pass_modes.items()]
    lines += [f"not measured: {name}: {reason}" for name, reason in report.unmeasured.items()]
    return lines


def _similarity_name(report: Report) -> str:
    # Models with labels have an agreement, which shows whether a stage changes their answers.
    return "cosine" if report.stages[0].agreement is None else "top-1"


def _format_similarity(stage: StageResult) -> str:
    return f"{stage.cosine:.4f}" if stage.agreement is None else f"{stage.agreement:.1%}"


def _format_batched(stage: StageResult) -> str:
    cosine, agreement = stage.batched_cosine_worst, stage.batched_top1_agreement
    values = [] if cosine is None else [f"cosine {cosine:.4f}"]
    return ", ".join(values if agreement is None else [*values, f"top-1 {agreement:.1%}"])


def format_name(stage: StageResult) -> str:
    """Return the name of a stage, with a mark if it was measured only for comparison."""
    return stage.name if stage.is_baseline_path else f"{stage.name} {COMPARISON_MARK}"


def _format_latency(latency: StageLatency | None) -> str:
    return (
        _NONE
        if latency is None
        else f"{format_number(latency.mean_ms)} ±{format_number(latency.std_ms)}"
    )


def _format_ratio(ratio: float | None) -> str:
    return _NONE if ratio is None else f"{ratio:.2f}x"


def _format_score(score: float | None) -> str:
    return _NONE if score is None else f"{score:.4f}"


def format_number(value: float) -> str:
    """Format with at most two decimals: three significant digits for values from 1 to 999."""
    places = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{places}f}"


def _format_grid(rows: Sequence[Sequence[str]]) -> list[str]:
    header, *body = rows
    rule = ["---", *("---:" for _ in header[1:])]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *body)]


FORMATS = ("png", "svg")
# Stages differ in marker, line style and hatching, so the plot is readable without color.
_COLORS = ("#1b1b1b", "#7a7a7a", "#1b6ca8", "#3d8b57", "#e07a1f", "#8a4f9e", "#b03a48")
_MARKERS = ("o", "v", "s", "D", "^", "P", "X")
_LINES = ("-", (0, (1, 1)), "--", "-.", "-", (0, (3, 1, 1, 1)), ":")
_HATCHES = ("", "..", "//", "\\\\", "xx", "++", "oo")
_SIZE_INCHES = (11.0, 4.8)
_DPI = 144


def draw_plots(report: Report) -> Mapping[str, bytes]:
    """Draw latency by tokens, and speed-up if there is a baseline. Return the bytes by format.

    Equal reports give equal bytes. Raises ModuleNotFoundError without matplotlib.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # A fixed salt gives equal element ids, and so equal files for equal reports.
    with matplotlib.rc_context({"svg.hashsalt": "hundredfold"}):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        conditions = report.conditions
        figure.suptitle(
            f"{report.id} on {conditions.host.name}, "
            f"{conditions.options.threads} of {conditions.host.cores} cores"
        )
        compared = [stage for stage in report.stages if stage.speedup is not None]
        left, *others = figure.subplots(1, 2 if compared else 1, squeeze=False)[0]
        _draw_latencies(left, report)
        for right in others:
            _draw_speedups(right, report, compared)
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=7)
        return {form: _render(figure, form) for form in FORMATS}


def _draw_latencies(axes: Any, report: Report) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    for number, stage in enumerate(report.stages):
        axes.errorbar(
            [latency.tokens for latency in stage.latencies],
            [latency.mean_ms for latency in stage.latencies],
            # A logarithmic axis has no zero, so an error bar must be shorter than the mean.
            yerr=[min(latency.std_ms, 0.9 * latency.mean_ms) for latency in stage.latencies],
            label=format_name(stage),
            capsize=3,
            color=_cycle(_COLORS, number),
            marker=_cycle(_MARKERS, number),
            linestyle=_cycle(_LINES, number),
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(report.lengths, [str(tokens) for tokens in report.lengths], minor=False)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(lambda ms, _position: f"{ms:g}")
    axes.set_xlabel("tokens of one item")
    axes.set_ylabel("latency, ms (mean ± standard deviation)")
    axes.grid(which="both", axis="y", alpha=0.3)


def _draw_speedups(axes: Any, report: Report, stages: Sequence[StageResult]) -> None:
    numbers = {stage.name: number for number, stage in enumerate(report.stages)}
    for position, stage in enumerate(stages):
        height = stage.speedup or 0.0
        axes.bar(
            position,
            height,
            color="white",
            edgecolor=_cycle(_COLORS, numbers[stage.name]),
            hatch=_cycle(_HATCHES, numbers[stage.name]),
        )
        axes.annotate(f"{format_number(height)}x", (position, height), ha="center", va="bottom")
    axes.set_xticks(range(len(stages)), [format_name(stage) for stage in stages])
    if not all(stage.is_baseline_path for stage in stages):
        axes.set_xlabel(f"{COMPARISON_MARK} for comparison")
    axes.set_ylabel(f"speed-up over {BASELINE}, all lengths")
    axes.margins(y=0.12)
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)


def _cycle(choices: Sequence[Any], number: int) -> Any:
    return choices[number % len(choices)]


def _render(figure: Any, form: str) -> bytes:
    target = io.BytesIO()
    figure.savefig(target, format=form, dpi=_DPI, metadata={"Date": None} if form == "svg" else {})
    return target.getvalue()


STEM = "report"

LogFunction = Callable[[str], None]  # logs one line


def report_path(artifact: Path, host: Host) -> Path:
    return host_directory(artifact, host.fingerprint) / f"{STEM}.json"


def read_report(artifact: Path, conditions: ReportConditions, log: LogFunction) -> Report | None:
    """Return the stored report, or None if the stages must be measured.

    They must be measured if the report is missing or unreadable, if its conditions are not
    `conditions`, or if it lacks a measurement. Log the reason, except for a missing report.
    """
    path = report_path(artifact, conditions.host)
    try:
        report = Report.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as exc:
        log(f"measuring again: {path} cannot be used: {str(exc).splitlines()[0]}")
        return None
    if changes := _list_changes(report.conditions, conditions):
        log(f"measuring again: not the {', '.join(changes)} of the stored report")
        return None
    if report.unmeasured:
        log(f"measuring again: the stored report lacks {', '.join(report.unmeasured)}")
        return None
    return report


def _list_changes(stored: ReportConditions, current: ReportConditions) -> list[str]:
    return [
        name
        for name in ReportConditions.model_fields
        if getattr(stored, name) != getattr(current, name)
    ]


def write_report(artifact: Path, report: Report, log: LogFunction) -> Path:
    """Write the report in all formats. Return the path of report.json, which is written last.

    Each file is written atomically. Without matplotlib there are no plots. Raises OSError if the
    store cannot be written.
    """
    path = report_path(artifact, report.conditions.host)
    path.parent.mkdir(parents=True, exist_ok=True)
    plots = _draw_optional_plots(report, log)
    plot = f"{STEM}.svg" if plots else None
    for extension, content in plots.items():
        write_atomically(path.with_suffix(f".{extension}"), content)
    write_atomically(path.with_suffix(".md"), format_markdown(report, plot=plot).encode())
    write_atomically(path, report.to_json())
    return path


def _draw_optional_plots(report: Report, log: LogFunction) -> Mapping[str, bytes]:
    try:
        return draw_plots(report)
    except ModuleNotFoundError as exc:
        if exc.name != "matplotlib":
            raise
        log(f"no plot: `matplotlib` is not installed; {advise_install('plots')}")
        return {}
