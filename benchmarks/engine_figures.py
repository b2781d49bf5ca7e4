"""What the engine benchmark found out, as values and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from benchmarks.agreement import Agreement
from benchmarks.measures import Summary
from benchmarks.raw_engine import Placement
from benchmarks.report import number
from build_artifacts.columns import columns
from deployments.tuning import costs

ENGINE = "engine"
TORCH = "torch eager fp32"


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of one forward pass, without padding."""

    batch: int
    tokens: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.batch}x{self.tokens}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The shape of that name. Raises ValueError."""
        batch, by, tokens = text.partition("x")
        if not (by and batch.isdigit() and tokens.isdigit() and int(batch) and int(tokens)):
            raise ValueError(f"`{text}` is no shape such as 8x128")
        return cls(int(batch), int(tokens))

    @property
    def padded(self) -> costs.Shape:
        """The same in the words of tuning."""
        return costs.Shape(items=self.batch, tokens=self.tokens)


# One short and one usual text alone, a batch, and the longest text many encoders read.
SHAPES = (Shape(1, 16), Shape(1, 128), Shape(8, 128), Shape(1, 512))
COMPARED_SHAPE = Shape(8, 128)


def shapes_up_to(max_tokens: int, shapes: Sequence[Shape] = SHAPES) -> tuple[Shape, ...]:
    """`shapes`, with no more tokens than the model reads."""
    capped = (Shape(shape.batch, min(shape.tokens, max_tokens)) for shape in shapes)
    return tuple(dict.fromkeys(capped))


@dataclass(frozen=True, slots=True)
class Speed:
    """All sentences through one placement in batches of one size."""

    placement: Placement
    batch: int
    sentences_per_s: Summary


@dataclass(frozen=True, slots=True)
class Latency:
    """One contender at one shape; milliseconds, the median of the passes of each round."""

    contender: str
    shape: Shape
    ms: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """Everything the result file says beside the run's facts."""

    model_id: str
    version: str
    compute_type: str
    sentences: str
    sentence_count: int
    mean_tokens: float  # special tokens included
    threads: int  # of the latency table
    speeds: tuple[Speed, ...]
    latencies: tuple[Latency, ...]
    torch_over_engine: float | None  # at COMPARED_SHAPE, or what it is capped to
    agreements: tuple[Agreement, ...]


def torch_over_engine(latencies: Sequence[Latency], max_tokens: int) -> float | None:
    """How many times longer torch takes than the engine for a batch; None when not measured."""
    shape = Shape(COMPARED_SHAPE.batch, min(COMPARED_SHAPE.tokens, max_tokens))
    found = {cell.contender: cell.ms.median for cell in latencies if cell.shape == shape}
    return found[TORCH] / found[ENGINE] if TORCH in found else None


def describe(figures: EngineFigures) -> str:
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


def _spread(summary: Summary) -> str:
    return f"{summary.spread:.0%}"
