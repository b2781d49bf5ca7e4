"""A report as columns for a terminal, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from build_artifacts.columns import columns
from build_artifacts.journey.figures import BASELINE, Latency, Report, StageFigures
from deployments.tuning.host import Host

_NONE = "-"
ASIDE = "†"  # marks what is no part of the journey


def table(report: Report) -> str:
    """All of it in at most 120 columns; speed-ups per length follow in a table of their own."""
    blocks = [_heading(report), columns(_rows(report), right=True)]
    if _is_compared(report):
        ratios = columns(_ratios(report), right=True)
        blocks.append(f"speed-up over `{BASELINE}`, by mean latency\n{ratios}")
    blocks.append("\n".join(_remarks(report)))
    return "\n\n".join(blocks)


def markdown(report: Report, *, plot: str | None) -> str:
    """The same as a document of its own; `plot` is the name of the picture beside it."""
    setting = report.setting
    versions = ", ".join(f"{name} {version}" for name, version in setting.versions.items())
    facts = [
        f"# {report.id}: the journey",
        "",
        f"- artifact: version `{report.setting.version}`, from `{report.source}`",
        f"- host: {_host(setting.host)}" + (f"; {setting.gpu.name}" if setting.gpu else ""),
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
    setting = report.setting
    gpu = f", {setting.gpu.name}" if setting.gpu else ""
    lines = [
        f"{report.id} {setting.version} on {setting.host.name}{gpu}",
        f"latency in ms (mean ±std): {_method(report)}",
        *_cut(report),
    ]
    return "\n".join(lines)


def _method(report: Report) -> str:
    options, cores = report.setting.options, report.setting.host.cores
    return f"batch 1 on {options.threads} of {cores} cores, {options.runs} sequential runs"


def _cut(report: Report) -> list[str]:
    """How many runs there were, where the time did not suffice for all of them."""
    options = report.setting.options
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
                shown_name(stage),
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
        rows.append([shown_name(stage), *map(_ratio, ratios)])
    return rows


def _remarks(report: Report) -> list[str]:
    """What the rows are, how throughput was taken, and what is missing."""
    lines = [f"{shown_name(stage)}: {stage.what}" for stage in report.stages]
    if any(not stage.in_journey for stage in report.stages):
        lines.append(f"{ASIDE} no part of the journey, measured for comparison")
    placed: dict[str, list[str]] = {}
    for stage in report.stages:
        if (one := stage.throughput) is not None:
            how = f"batches of {one.items} x {one.tokens} tokens, {one.passes} at once"
            placed.setdefault(how, []).append(stage.name)
    lines += [f"items/s: {how} ({', '.join(names)})" for how, names in placed.items()]
    lines += [f"not measured: {name}: {reason}" for name, reason in report.unmeasured.items()]
    return lines


def _likeness_name(report: Report) -> str:
    """Of what a model chooses, the cosine says little (see `deployments.tuning.parity.judge`)."""
    return "cosine" if report.stages[0].agreement is None else "top-1"


def _likeness(stage: StageFigures) -> str:
    return f"{stage.cosine:.4f}" if stage.agreement is None else f"{stage.agreement:.1%}"


def shown_name(stage: StageFigures) -> str:
    """The name of a stage, marked where it is no part of the journey."""
    return stage.name if stage.in_journey else f"{stage.name} {ASIDE}"


def _latency(latency: Latency | None) -> str:
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
