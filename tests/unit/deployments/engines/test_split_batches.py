from __future__ import annotations

import numpy as np
import pytest

from deployments.artifacts.types import Device, ModelHead
from deployments.batching.batch_policy import collate
from deployments.engines.base import EngineInfo, limit_pass_tokens
from deployments.engines.forward_pass import Batch, Outputs
from deployments.engines.split_batches import SplittingEngine
from deployments.messages import TokenizedItem


class RecordingEngine:
    """An EncoderEngine whose output for an item is its first token id."""

    def __init__(self) -> None:
        self.info = EngineInfo("cpu-fake")
        self.shapes: list[tuple[int, ...]] = []
        self.is_closed = False

    def run(self, batch: Batch) -> Outputs:
        self.shapes.append(batch.input_ids.shape)
        return Outputs(batch.input_ids[:, :1].astype(np.float32))

    def close(self) -> None:
        self.is_closed = True


def batch_of(*lengths: int) -> Batch:
    return collate([TokenizedItem(np.full(n, i, np.int32), n) for i, n in enumerate(lengths)])


@pytest.mark.parametrize(
    ("lengths", "shapes"),
    [
        ((4, 3), [(2, 4)]),
        ((4, 4, 4), [(1, 4), (2, 4)]),
        ((2, 2, 8), [(1, 8), (1, 8), (1, 8)]),
        ((9,), [(1, 9)]),  # one item is not split
    ],
)
def test_batches_above_the_limit_run_in_parts(
    lengths: tuple[int, ...], shapes: list[tuple[int, int]]
) -> None:
    inner = RecordingEngine()
    outputs = SplittingEngine(inner, max_tokens=8).run(batch_of(*lengths))
    assert inner.shapes == shapes
    assert [float(item[0]) for item in outputs.items] == list(range(len(lengths)))


def test_the_engine_inside_is_described_and_closed() -> None:
    inner = RecordingEngine()
    engine = SplittingEngine(inner, max_tokens=8)
    assert engine.info is inner.info
    engine.close()
    assert inner.is_closed


def test_passes_of_sparse_encoders_are_limited_by_the_vocabulary() -> None:
    for head in set(ModelHead) - {ModelHead.SPARSE}:
        assert limit_pass_tokens(head, 30_522, Device.CPU) is None
    small, large = (limit_pass_tokens(ModelHead.SPARSE, w, Device.CPU) for w in (30_522, 250_002))
    assert small is not None
    assert large is not None
    assert small > large > 0
