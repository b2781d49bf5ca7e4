"""Results of the engine benchmark as values, tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.agreement import CosineCheck
from benchmarks.common.engine_timing import (
    COMPARED_SHAPE,
    SentenceThroughput,
    ShapeLatency,
    cap_shapes,
)
from benchmarks.common.plots import create_figure, draw_bars, label_axes, save_figure
from benchmarks.common.report import RunMetadata, Table, format_number

ENGINE = "engine"
TORCH = "torch eager fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResults:
    """Results of the engine benchmark, as written to the result file."""

    model_id: str
    version: str
    compute_type: str
    sentences: str
    sentence_count: int
    mean_tokens: float  # tokens per sentence, including special tokens
    threads: int  # usable cores
    throughput: tuple[SentenceThroughput, ...]
    latencies: tuple[ShapeLatency, ...]
    torch_over_engine: float | None  # latency of torch / latency of the engine, at COMPARED_SHAPE
    checks: tuple[CosineCheck, ...]


def name_system(system: str, threads: int) -> str:
    """Return the name of a system in `latencies`, with the threads of each of its passes."""
    return f"{system}, {threads} thread{'s' if threads > 1 else ''} per pass"


def torch_over_engine(latencies: Sequence[ShapeLatency], max_tokens: int) -> float | None:
    """Return the median latency of torch divided by that of the engine, at COMPARED_SHAPE.

    The engine's is that of its faster core split, which a replica's tuning chooses. The tokens of
    the shape are limited to `max_tokens`. Return None if torch was not measured.
    """
    (shape,) = cap_shapes(max_tokens, [COMPARED_SHAPE])
    compared = [timing for timing in latencies if timing.shape == shape]
    torch, engine = (
        [timing.ms.median for timing in compared if timing.system.startswith(f"{system}, ")]
        for system in (TORCH, ENGINE)
    )
    return min(torch) / min(engine) if torch else None


def build_tables(results: EngineResults) -> tuple[Table, Table]:
    throughput = [
        (
            entry.split.name,
            str(entry.batch_size),
            format_number(entry.sentences_per_s.median),
            f"{entry.sentences_per_s.spread:.0%}",
        )
        for entry in results.throughput
    ]
    latencies = [
        (
            timing.system,
            str(timing.shape),
            format_number(timing.ms.median, 2),
            f"{timing.ms.spread:.0%}",
        )
        for timing in results.latencies
    ]
    return (
        Table("throughput", ("core split", "batch", "sentences/s", "spread"), throughput),
        Table("latency", ("system", "items x tokens", "ms", "spread"), latencies),
    )


def describe(results: EngineResults) -> str:
    """Return the console text: tables, ratio of torch to the engine, and output checks."""
    lines = [
        f"{results.model_id} {results.version} {results.compute_type}, "
        f"{results.sentence_count} sentences, {results.mean_tokens:.1f} tokens on average, "
        f"{results.threads} cores",
        "",
    ]
    for table in build_tables(results):
        lines += [table.text, ""]
    if results.torch_over_engine is not None:
        lines.append(f"{TORCH} / {ENGINE} at {COMPARED_SHAPE}: {results.torch_over_engine:.2f}")
    lines += [check.sentence for check in results.checks]
    return "\n".join(lines)


def plot_engine(out: Path, run: RunMetadata, results: EngineResults) -> list[Path]:
    """Plot throughput by batch size and latency by shape. Return the paths."""
    figure, (rates, latencies) = create_figure(run, f"{results.model_id}, raw engine")
    sizes = list(dict.fromkeys(entry.batch_size for entry in results.throughput))
    splits = dict.fromkeys(entry.split for entry in results.throughput)
    by_split = [
        (split.name, [e.sentences_per_s for e in results.throughput if e.split == split])
        for split in splits
    ]
    draw_bars(rates, [str(size) for size in sizes], by_split)
    label_axes(rates, "sentences per batch", "sentences per second")
    systems = dict.fromkeys(timing.system for timing in results.latencies)
    shapes = dict.fromkeys(str(timing.shape) for timing in results.latencies)
    by_system = [
        (system, [timing.ms for timing in results.latencies if timing.system == system])
        for system in systems
    ]
    draw_bars(latencies, list(shapes), by_system)
    label_axes(latencies, "items x tokens", "latency, ms", logarithmic=True)
    return save_figure(figure, out, run)
