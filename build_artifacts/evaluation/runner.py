"""Run of all items of an evaluation through an engine, in batches as in serving."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from build_artifacts.evaluation.base import Evaluation, Output, ReducedOutput
from deployments.batching.batch_policy import collate
from deployments.engines.base import EncoderEngine
from deployments.messages import TokenizedItem

MAX_BATCH_ITEMS = 32
# Maximum padded tokens per batch, because memory grows with them. BERT-large takes gigabytes for
# 32 x 512 tokens.
MAX_BATCH_TOKENS = 8_192


def run_items(engine: EncoderEngine, items: Sequence[TokenizedItem]) -> list[Output]:
    """Return the outputs in the order of `items`. Raises EngineFailed if a forward pass fails."""
    # Copy each output: it may be a view, which would keep the memory of its whole batch allocated.
    outputs = {i: np.array(output) for i, output in _run(engine, items)}
    return [outputs[i] for i in range(len(items))]


def score_engine(engine: EncoderEngine, evaluation: Evaluation) -> dict[str, float]:
    """Return every metric by name; only reduced outputs stay in memory.

    Raises EngineFailed if a forward pass fails, or if an output is NaN or infinite.
    """
    reduced: dict[int, ReducedOutput] = {
        i: evaluation.reduce_output(i, output) for i, output in _run(engine, evaluation.items)
    }
    return evaluation.score_reduced([reduced[i] for i in range(len(reduced))])


def _run(engine: EncoderEngine, items: Sequence[TokenizedItem]) -> Iterator[tuple[int, Output]]:
    """Yield index and output of every item; batches hold similar lengths, shortest first."""
    for batch in _plan_batches([len(item.ids) for item in items]):
        outputs = engine.run(collate([items[i] for i in batch]))
        yield from zip(batch, outputs.items, strict=True)


def _plan_batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        full = len(batch) == MAX_BATCH_ITEMS or (len(batch) + 1) * lengths[i] > MAX_BATCH_TOKENS
        if batch and full:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
