"""Throughput and latency of engines in this process, without HTTP, tokenizer and transport."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.agreement import BATCHED_COSINE_SLACK, CosineCheck
from benchmarks.common.local_model import LocalModel, unbatched_outputs
from benchmarks.common.statistics import RoundSummary, summarize
from deployments.batching.batch_policy import collate
from deployments.engines import EncoderEngine
from deployments.engines.forward_pass import Batch, Outputs
from deployments.messages import TokenizedItem
from deployments.tuning.costs import Shape
from deployments.tuning.measure import build_batch, wait_until_idle

# A short text, a typical text, a batch of typical texts, and the longest input of many encoders.
SHAPES = (
    Shape(items=1, tokens=16),
    Shape(items=1, tokens=128),
    Shape(items=8, tokens=128),
    Shape(items=1, tokens=512),
)
COMPARED_SHAPE = Shape(items=8, tokens=128)


def cap_shapes(max_tokens: int, shapes: Sequence[Shape] = SHAPES) -> tuple[Shape, ...]:
    """Limit the tokens of `shapes` to `max_tokens` and drop duplicates."""
    capped = (Shape(items=s.items, tokens=min(s.tokens, max_tokens)) for s in shapes)
    return tuple(dict.fromkeys(capped))


@dataclass(frozen=True, slots=True)
class SentenceThroughput:
    """Throughput of one core split with batches of one size."""

    split: CoreSplit
    batch_size: int
    sentences_per_s: RoundSummary


@dataclass(frozen=True, slots=True)
class ShapeLatency:
    """Latency of one system at one shape. Each round contributes the median of its passes."""

    system: str
    shape: Shape
    ms: RoundSummary


TIMING_S = 0.4  # seconds of timed passes per system, shape and round
MIN_PASSES, MAX_PASSES = 3, 200

Forward = Callable[[Batch], object]  # runs one batch; the output is ignored


@dataclass(frozen=True, slots=True)
class ShapeTiming:
    """Timing of one system at one shape, with one median per finished round."""

    system: str
    forward: Forward
    shape: Shape
    batch: Batch
    medians_ms: list[float] = field(default_factory=list)

    def run_round(self) -> None:
        """Measure passes for about TIMING_S seconds after a warm-up pass. Append their median.

        Threads of the previous system spin for some milliseconds after its last pass. The method
        therefore first waits until the process is idle.
        """
        wait_until_idle()
        passes = min(max(round(TIMING_S / self._pass_s()), MIN_PASSES), MAX_PASSES)
        self.medians_ms.append(float(np.median([self._pass_s() for _ in range(passes)])) * 1e3)

    def latency(self) -> ShapeLatency:
        return ShapeLatency(self.system, self.shape, summarize(self.medians_ms))

    def _pass_s(self) -> float:
        started_s = time.perf_counter()
        self.forward(self.batch)
        return time.perf_counter() - started_s


def build_timings(
    systems: Mapping[str, Forward],
    shapes: Sequence[Shape],
    items: Sequence[TokenizedItem],
    seed: int,
) -> list[ShapeTiming]:
    """Build a timing per shape and system, grouped by shape.

    All systems share one batch per shape. The batch has no padding and holds tokens of `items`.
    """
    batches = {shape: build_batch(items, shape, seed) for shape in shapes}
    return [
        ShapeTiming(name, forward, shape, batch)
        for shape, batch in batches.items()
        for name, forward in systems.items()
    ]


SENTENCES_PER_BATCH = 32
CHECKED_SENTENCES = 64
MIN_BATCHES_PER_PASS = 8


@dataclass(frozen=True, slots=True)
class CoreSplit:
    """Distribution of the cores over concurrent forward passes."""

    threads: int  # threads per forward pass
    passes: int  # number of concurrent forward passes

    @property
    def name(self) -> str:
        return f"passes={self.passes} threads={self.threads}"


def list_core_splits(cores: int) -> tuple[CoreSplit, ...]:
    """Return two splits: one pass per core, and one pass on all cores. One core has one split."""
    return tuple(dict.fromkeys((CoreSplit(1, cores), CoreSplit(cores, 1))))


@dataclass(frozen=True, slots=True)
class SortedBatches:
    """Items in batches by descending length, so that no long batch runs alone at the end."""

    batches: tuple[Batch, ...]
    order: tuple[int, ...]  # row r of the concatenated batches is item order[r]

    @classmethod
    def build(cls, items: Sequence[TokenizedItem], size: int) -> SortedBatches:
        """Sort `items` and split them into batches of `size`. The last batch may be smaller."""
        order = sorted(range(len(items)), key=lambda i: len(items[i].ids), reverse=True)
        starts = range(0, len(order), size)
        batches = tuple(collate([items[i] for i in order[s : s + size]]) for s in starts)
        return cls(batches, tuple(order))


def count_repetitions(batches: int, passes: int) -> int:
    """Return how often to run `batches`, so that each pass gets MIN_BATCHES_PER_PASS on average.

    With fewer batches most passes would wait for the last ones, and the rate would be too low.
    """
    return math.ceil(MIN_BATCHES_PER_PASS * passes / batches)


class RawEngine:
    """Engine of a model without a server, and the tokenized sentences that it runs.

    The engine is opened once per core split. The caller must call `close`.
    """

    def __init__(self, model: LocalModel, texts: Sequence[str], cores: int) -> None:
        self.splits = list_core_splits(cores)
        self._model = model
        self.items = model.tokenize(texts)
        self._batches: dict[int, SortedBatches] = {}
        self._engines = {s: model.open_engine(threads=s.threads) for s in self.splits}
        self._pools = {s: ThreadPoolExecutor(s.passes) for s in self.splits}

    def engine(self, split: CoreSplit) -> EncoderEngine:
        return self._engines[split]

    def warm_up(self, size: int) -> None:
        """Run the longest and the shortest batch of `size` items on every core split."""
        batches = self._sorted(size).batches
        for split, engine in self._engines.items():
            ends = [batches[0], batches[-1]] * split.passes
            list(self._pools[split].map(engine.run, ends))

    def sentences_per_s(self, split: CoreSplit, size: int) -> float:
        """Run all sentences once or several times in batches of `size`. Return the rate.

        Collation is not timed.
        """
        batches = self._sorted(size).batches
        times = count_repetitions(len(batches), split.passes)
        started_s = time.perf_counter()
        list(self._pools[split].map(self._engines[split].run, batches * times))
        return times * len(self.items) / (time.perf_counter() - started_s)

    def run_batch(self, split: CoreSplit, batch: Batch) -> list[Outputs]:
        """Run `batch` as up to `split.passes` concurrent passes of `split.threads` threads."""
        return run_split(self._engines[split], self._pools[split], split.passes, batch)

    def check_batch_invariance(self, size: int, seed: int) -> CosineCheck:
        """Compare sampled sentences in batches of `size` with the same sentences unbatched."""
        count = min(CHECKED_SENTENCES, len(self.items))
        sample = np.random.default_rng(seed).choice(len(self.items), count, replace=False).tolist()
        items = [self.items[i] for i in sample]
        engines = list(self._engines.values())
        batched = [self._batched_outputs(engine, size, sample) for engine in engines]
        unbatched = [unbatched_outputs(engine, items) for engine in engines]
        parity = self._model.candidate.parity
        return CosineCheck.compare(
            f"the engine in batches of {size} and unbatched",
            np.concatenate(batched),
            np.concatenate(unbatched),
            parity.batched_cosine_worst - BATCHED_COSINE_SLACK,
        )

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown()
        for engine in self._engines.values():
            engine.close()

    def _batched_outputs(
        self, engine: EncoderEngine, size: int, sample: Sequence[int]
    ) -> NDArray[np.float32]:
        batches = self._sorted(size)
        position = {item: divmod(row, size) for row, item in enumerate(batches.order)}
        needed = {position[item][0] for item in sample}
        rows = {batch: engine.run(batches.batches[batch]).items for batch in needed}
        return np.stack([rows[position[item][0]][position[item][1]] for item in sample])

    def _sorted(self, size: int) -> SortedBatches:
        if size not in self._batches:
            self._batches[size] = SortedBatches.build(self.items, size)
        return self._batches[size]


def run_split(engine: EncoderEngine, pool: Executor, passes: int, batch: Batch) -> list[Outputs]:
    """Run `batch` as up to `passes` concurrent passes of similar size."""
    return list(pool.map(engine.run, split_batch(batch, min(passes, len(batch.lengths)))))


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """Split `batch` into `parts` batches whose sizes differ by at most one item."""
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
