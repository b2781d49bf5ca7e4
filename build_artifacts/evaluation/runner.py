"""Every item of an evaluation through an engine, in company, as it would be served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from build_artifacts.evaluation.base import Evaluation, Output, ReducedOutput
from deployments.batching.batches import collate
from deployments.engines.base import EncoderEngine
from deployments.messages import TokenizedItem

MAX_BATCH_ITEMS = 32
# Memory of a pass grows with its padded tokens: a BERT-large of 32 x 512 takes gigabytes.
MAX_BATCH_TOKENS = 8_192


def run_items(engine: EncoderEngine, items: Sequence[TokenizedItem]) -> list[Output]:
    """The whole answer to each item, in their order. Raises EngineFailed."""
    # Copies, because an answer may be a view that would keep its whole batch alive.
    answers = {i: np.array(answer) for i, answer in _run(engine, items)}
    return [answers[i] for i in range(len(items))]


def score_engine(engine: EncoderEngine, evaluation: Evaluation) -> dict[str, float]:
    """Every metric by name, holding of each answer only what the score needs.

    Raises EngineFailed, also when an answer is not made of finite numbers.
    """
    reduced: dict[int, ReducedOutput] = {
        i: evaluation.reduce_output(i, answer) for i, answer in _run(engine, evaluation.items)
    }
    return evaluation.score_reduced([reduced[i] for i in range(len(reduced))])


def _run(engine: EncoderEngine, items: Sequence[TokenizedItem]) -> Iterator[tuple[int, Output]]:
    """Index and answer of every item, batches of similar length, the shortest first."""
    for batch in _batches([len(item.ids) for item in items]):
        outputs = engine.run(collate([items[i] for i in batch]))
        yield from zip(batch, outputs.items, strict=True)


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        full = len(batch) == MAX_BATCH_ITEMS or (len(batch) + 1) * lengths[i] > MAX_BATCH_TOKENS
        if batch and full:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
