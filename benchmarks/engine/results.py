"""What the engine benchmark found out, as values and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.agreement import CosineCheck
from benchmarks.common.engine_timing import (
    COMPARED_SHAPE,
    SentenceThroughput,
    Shape,
    ShapeLatency,
)
from benchmarks.common.report import number
from benchmarks.common.statistics import RoundSummary
from build_artifacts.console import columns

ENGINE = "engine"
TORCH = "torch eager fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineResults:
    """Everything the result file says beside the run's facts."""

    model_id: str
    version: str
    compute_type: str
    sentences: str
    sentence_count: int
    mean_tokens: float  # special tokens included
    threads: int  # of the latency table
    speeds: tuple[SentenceThroughput, ...]
    latencies: tuple[ShapeLatency, ...]
    torch_over_engine: float | None  # at COMPARED_SHAPE, or what it is capped to
    agreements: tuple[CosineCheck, ...]


def torch_over_engine(latencies: Sequence[ShapeLatency], max_tokens: int) -> float | None:
    """How many times longer torch takes than the engine for a batch; None when not measured."""
    shape = Shape(COMPARED_SHAPE.batch, min(COMPARED_SHAPE.tokens, max_tokens))
    found = {cell.contender: cell.ms.median for cell in latencies if cell.shape == shape}
    return found[TORCH] / found[ENGINE] if TORCH in found else None


def describe(figures: EngineResults) -> str:
    """The result for people."""
    speeds = [["placement", "batch", "sentences/s", "spread"]]
    for s in figures.speeds:
        per_s = s.sentences_per_s
        speeds.append([s.placement.name, str(s.batch), number(per_s.median), _spread(per_s)])
    latencies = [[f"{figures.threads} threads", "batch x tokens", "ms", "spread"]]
    latencies += [
        [c.contender, c.shape.name, number(c.ms.median, 2), _spread(c.ms)]
        for c in figures.latencies
    ]
    lines = [
        f"{figures.model_id} {figures.version} {figures.compute_type}, "
        f"{figures.sentence_count} sentences, {figures.mean_tokens:.1f} tokens on average",
        "",
        columns(speeds, right=True),
        "",
        columns(latencies, right=True),
        "",
    ]
    if figures.torch_over_engine is not None:
        lines.append(
            f"engine at {COMPARED_SHAPE.name}: {figures.torch_over_engine:.2f} times {TORCH}"
        )
    lines += [agreement.sentence for agreement in figures.agreements]
    return "\n".join(lines)


def _spread(summary: RoundSummary) -> str:
    return f"{summary.spread:.0%}"
