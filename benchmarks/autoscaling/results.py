"""Results of a simulated day: summary, table, plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.autoscaling.day import Day, DaySettings
from benchmarks.autoscaling.policies import ScalingMethod
from benchmarks.autoscaling.simulation import ServerSettings, Trace
from benchmarks.common.plots import COLORS, create_figure, label_axes, save_figure
from benchmarks.common.report import RunMetadata, Table, format_number

BIN_S = 300  # length of a bin in s; a bin is a point of the plot
SLOW_S = 1.0


@dataclass(frozen=True, slots=True)
class ScalingResults:
    """Results of one policy over the whole day. Latencies cover the served requests only."""

    name: str
    replica_hours: float  # hours of running and starting replicas
    max_replicas: int
    starts: int  # number of started replicas
    p50_s: float
    p99_s: float
    slow_share: float  # share of the served requests with a latency above SLOW_S
    max_queued_s: float  # longest queue, in s of work for one replica
    rejected_share: float
    # One value per bin of BIN_S s: most replicas, longest queue, p99 latency, rejected requests.
    replicas: Sequence[float]
    queued_s: Sequence[float]
    latency_s: Sequence[float]
    rejected: Sequence[float]


@dataclass(frozen=True, slots=True)
class AutoscalingResults:
    deployment: str
    day: DaySettings
    server: ServerSettings
    work: Sequence[float]  # number of replicas that the arriving work keeps busy; one mean per bin
    policies: Sequence[ScalingResults]


def summarize_trace(method: ScalingMethod, trace: Trace) -> ScalingResults:
    seconds, latencies, weights = (
        np.array(column) for column in zip(*trace.latencies, strict=True)
    )
    paid = np.array(trace.paid)
    starts = np.maximum(np.diff(paid), 0).sum()
    bins = seconds.astype(np.int64) // BIN_S
    return ScalingResults(
        name=method.name,
        replica_hours=float(paid.sum()) / 3600,
        max_replicas=int(paid.max()),
        starts=int(starts),
        p50_s=weighted_percentile(latencies, weights, 50),
        p99_s=weighted_percentile(latencies, weights, 99),
        slow_share=float(weights[latencies > SLOW_S].sum() / weights.sum()),
        max_queued_s=max(trace.queued_s),
        rejected_share=sum(trace.rejected) / sum(trace.requests),
        replicas=split_bins(trace.replicas).max(axis=1).tolist(),
        queued_s=split_bins(trace.queued_s).max(axis=1).tolist(),
        latency_s=[
            weighted_percentile(latencies[bins == index], weights[bins == index], 99)
            for index in range(len(trace.paid) // BIN_S)
        ],
        rejected=split_bins(trace.rejected).sum(axis=1).tolist(),
    )


def average_work(day: Day) -> Sequence[float]:
    means: list[float] = split_bins(day.work).mean(axis=1).tolist()
    return means


def split_bins(values: Any) -> NDArray[np.float64]:
    """Reshape one value per second to [bins, BIN_S]. Drop an incomplete last bin."""
    array = np.asarray(values, dtype=np.float64)
    whole = len(array) // BIN_S * BIN_S
    return array[:whole].reshape(-1, BIN_S)


def weighted_percentile(
    values: NDArray[np.float64], weights: NDArray[np.float64], rank: float
) -> float:
    """Return the smallest value whose cumulative weight reaches `rank` %; 0 if there is none."""
    if not len(values):
        return 0.0
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    index = int(np.searchsorted(reached, rank / 100 * reached[-1]))
    return float(values[order][min(index, len(values) - 1)])


def build_table(results: AutoscalingResults) -> Table:
    columns = (
        *("policy", "replica-hours", "replicas at most", "starts", "p50 s", "p99 s"),
        *(f"slower than {SLOW_S:g} s", "longest queue s", "rejected"),
    )
    rows = [
        (
            one.name,
            format_number(one.replica_hours, 1),
            str(one.max_replicas),
            str(one.starts),
            format_number(one.p50_s, 2),
            format_number(one.p99_s, 2),
            f"{one.slow_share:.2%}",
            format_number(one.max_queued_s, 1),
            f"{one.rejected_share:.2%}",
        )
        for one in results.policies
    ]
    return Table("policies", columns, rows)


def plot_day(out: Path, run: RunMetadata, results: AutoscalingResults) -> list[Path]:
    """Draw replicas, queue, latency and rejections over the day. Return the paths."""
    title = f"Autoscaling of {results.deployment}: a replayed day (seed {run.seed})"
    figure, axes = create_figure(run, title, (13, 8), rows=2)
    panels = ("replicas", "queued_s", "latency_s", "rejected")
    labels = ("replicas", "queue, s of one replica", "latency p99, s", "rejected in 5 minutes")
    hours = np.arange(len(results.work)) * BIN_S / 3600
    for panel, label, ax in zip(panels, labels, np.ravel(axes), strict=True):
        # Draw the first policy last, so that its line is on top.
        for one, color in reversed(list(zip(results.policies, COLORS, strict=False))):
            ax.plot(hours, getattr(one, panel), label=one.name, color=color, linewidth=1)
        if panel == "replicas":
            ax.fill_between(hours, results.work, alpha=0.2, color="grey", label="work")
        label_axes(ax, "hour", label, legend=panel == "rejected")
    return save_figure(figure, out, run)
