"""Sentences per second of the engine itself, without HTTP, tokenizer and hops: the ceiling."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.agreement import COSINE_SLACK, CosineCheck
from benchmarks.common.local_model import LocalModel, unbatched_outputs
from benchmarks.common.statistics import RoundSummary, summarize
from deployments.batching.batches import collate
from deployments.engines import EncoderEngine
from deployments.messages import Batch, Outputs, TokenizedItem
from deployments.tuning import costs
from deployments.tuning.measure import build_batch, wait_until_idle


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


def cap_shapes(max_tokens: int, shapes: Sequence[Shape] = SHAPES) -> tuple[Shape, ...]:
    """`shapes`, with no more tokens than the model reads."""
    capped = (Shape(shape.batch, min(shape.tokens, max_tokens)) for shape in shapes)
    return tuple(dict.fromkeys(capped))


@dataclass(frozen=True, slots=True)
class SentenceThroughput:
    """All sentences through one placement in batches of one size."""

    placement: CoreSplit
    batch: int
    sentences_per_s: RoundSummary


@dataclass(frozen=True, slots=True)
class ShapeLatency:
    """One contender at one shape; milliseconds, the median of the passes of each round."""

    contender: str
    shape: Shape
    ms: RoundSummary


# Passes per cell and round: enough for this much time, within these bounds.
TIMING_S = 0.4
MIN_PASSES, MAX_PASSES = 3, 200

Forward = Callable[[Batch], object]  # one batch, whatever comes out of it


@dataclass(frozen=True, slots=True)
class ShapeTiming:
    """One contender at one shape, and the median of each round so far."""

    contender: str
    forward: Forward
    shape: Shape
    batch: Batch
    medians_ms: list[float] = field(default_factory=list)

    def run_round(self) -> None:
        """Passes for about TIMING_S seconds, after one that does not count.

        Before that the threads of whoever ran last come to rest: idle ones spin for a while.
        """
        wait_until_idle()
        passes = min(max(round(TIMING_S / self._pass_s()), MIN_PASSES), MAX_PASSES)
        self.medians_ms.append(float(np.median([self._pass_s() for _ in range(passes)])) * 1e3)

    def latency(self) -> ShapeLatency:
        """The summary of all rounds."""
        return ShapeLatency(self.contender, self.shape, summarize(self.medians_ms))

    def _pass_s(self) -> float:
        started_s = time.perf_counter()
        self.forward(self.batch)
        return time.perf_counter() - started_s


def build_timings(
    contenders: Mapping[str, Forward],
    shapes: Sequence[Shape],
    items: Sequence[TokenizedItem],
    seed: int,
) -> list[ShapeTiming]:
    """Every contender at every shape, contenders next to each other.

    One batch per shape, without padding, of the tokens of `items`.
    """
    batches = {shape: build_batch(items, shape.padded, seed) for shape in shapes}
    return [
        ShapeTiming(name, forward, shape, batch)
        for shape, batch in batches.items()
        for name, forward in contenders.items()
    ]


SENTENCES_PER_BATCH = 32
CHECKED_SENTENCES = 64


@dataclass(frozen=True, slots=True)
class CoreSplit:
    """How the cores are shared out."""

    threads: int  # per forward pass
    runs: int  # forward passes at once

    @property
    def name(self) -> str:
        """For tables."""
        return f"runs={self.runs} threads={self.threads}"


def list_core_splits(cores: int) -> tuple[CoreSplit, ...]:
    """Every core a pass of its own, and all cores for one pass."""
    return tuple(dict.fromkeys((CoreSplit(1, cores), CoreSplit(cores, 1))))


@dataclass(frozen=True, slots=True)
class SortedBatches:
    """Items sorted by length, the longest first, so that no long batch runs alone at the end."""

    batches: tuple[Batch, ...]
    order: tuple[int, ...]  # row r of all batches end to end answers item order[r]

    @classmethod
    def of(cls, items: Sequence[TokenizedItem], size: int) -> SortedBatches:
        """Batches of `size` items."""
        order = sorted(range(len(items)), key=lambda i: len(items[i].ids), reverse=True)
        starts = range(0, len(order), size)
        batches = tuple(collate([items[i] for i in order[s : s + size]]) for s in starts)
        return cls(batches, tuple(order))


class RawEngine:
    """One graph opened once per placement, and its items. Close it after use."""

    def __init__(self, model: LocalModel, texts: Sequence[str], cores: int) -> None:
        self.list_core_splits = list_core_splits(cores)
        self._model = model
        self.items = model.items(texts)
        self._batches: dict[int, SortedBatches] = {}
        self._engines = {p: model.engine(threads=p.threads) for p in self.list_core_splits}
        self._pools = {p: ThreadPoolExecutor(p.runs) for p in self.list_core_splits}

    def engine(self, placement: CoreSplit) -> EncoderEngine:
        """The engine opened for a placement."""
        return self._engines[placement]

    def warm_up(self, size: int) -> None:
        """Run the longest and the shortest batch of `size` everywhere."""
        batches = self._sorted(size).batches
        for placement, engine in self._engines.items():
            ends = [batches[0], batches[-1]] * placement.runs
            list(self._pools[placement].map(engine.run, ends))

    def sentences_per_s(self, placement: CoreSplit, size: int) -> float:
        """All sentences once, in batches of `size`; collating is not part of it."""
        batches = self._sorted(size).batches
        started_s = time.perf_counter()
        list(self._pools[placement].map(self._engines[placement].run, batches))
        return len(self.items) / (time.perf_counter() - started_s)

    def run_split_batch(self, batch: Batch) -> NDArray[np.float32]:
        """The batch's rows, computed as an idle encoder would: shared out over passes at once."""
        placement = self.list_core_splits[0]
        outputs = run_split(self._engines[placement], self._pools[placement], placement.runs, batch)
        return np.concatenate([output.items for output in outputs])

    def agreement(self, size: int, seed: int) -> CosineCheck:
        """Some sentences in batches of `size` against the same ones alone, on every placement."""
        count = min(CHECKED_SENTENCES, len(self.items))
        chosen = np.random.default_rng(seed).choice(len(self.items), count, replace=False).tolist()
        engines = list(self._engines.values())
        together = [self._rows_in_company(engine, size, chosen) for engine in engines]
        alone = [unbatched_outputs(engine, [self.items[i] for i in chosen]) for engine in engines]
        parity = self._model.candidate.parity
        return CosineCheck.of(
            f"the engine in batches of {size} and alone",
            np.concatenate(together),
            np.concatenate(alone),
            parity.batched_cosine_worst - COSINE_SLACK,
        )

    def close(self) -> None:
        """Stop the threads and give the memory back."""
        for pool in self._pools.values():
            pool.shutdown()
        for engine in self._engines.values():
            engine.close()

    def _rows_in_company(
        self, engine: EncoderEngine, size: int, chosen: Sequence[int]
    ) -> NDArray[np.float32]:
        batches = self._sorted(size)
        place = {item: divmod(row, size) for row, item in enumerate(batches.order)}
        needed = {place[item][0] for item in chosen}
        rows = {batch: engine.run(batches.batches[batch]).items for batch in needed}
        return np.stack([rows[place[item][0]][place[item][1]] for item in chosen])

    def _sorted(self, size: int) -> SortedBatches:
        if size not in self._batches:
            self._batches[size] = SortedBatches.of(self.items, size)
        return self._batches[size]


def run_split(engine: EncoderEngine, pool: Executor, runs: int, batch: Batch) -> list[Outputs]:
    """A batch as `runs` passes at once, each of nearly as many of its items; all their outputs."""
    return list(pool.map(engine.run, split_batch(batch, min(runs, len(batch.lengths)))))


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """The items of `batch` shared out over `parts` batches, as evenly as they go."""
    shares = np.array_split(np.arange(len(batch.lengths)), parts)
    return [
        Batch(
            batch.input_ids[share],
            batch.attention_mask[share],
            batch.token_type_ids[share],
            tuple(batch.lengths[i] for i in share),
        )
        for share in shares
    ]
