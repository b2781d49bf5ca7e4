"""Run of all items of an evaluation through an engine, in batches as in serving."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from build_artifacts.evaluation.base import Evaluation, ReducedOutput
from deployments.batching.batch_policy import collate
from deployments.engines.base import EncoderEngine

MAX_BATCH_ITEMS = 32
# Maximum padded tokens per batch, because memory grows with them. BERT-large takes gigabytes for
# 32 x 512 tokens.
MAX_BATCH_TOKENS = 8_192


def score_engine(engine: EncoderEngine, evaluation: Evaluation) -> dict[str, float]:
    """Return every metric by name; only reduced outputs stay in memory.

    Raises EngineFailed if a forward pass fails, or if an output is NaN or infinite.
    """
    items = evaluation.items
    reduced: dict[int, ReducedOutput] = {}
    for batch in _plan_batches([len(item.ids) for item in items]):
        outputs = engine.run(collate([items[i] for i in batch])).items
        for i, output in zip(batch, outputs, strict=True):
            reduced[i] = evaluation.reduce_output(i, output)
    return evaluation.score_reduced([reduced[i] for i in range(len(items))])


def _plan_batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of each batch; batches hold similar lengths, shortest first."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        full = len(batch) == MAX_BATCH_ITEMS or (len(batch) + 1) * lengths[i] > MAX_BATCH_TOKENS
        if batch and full:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
