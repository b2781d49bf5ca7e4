from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.common.engine_timing import (
    CoreSplit,
    RawEngine,
    Shape,
    SortedBatches,
    build_timings,
    cap_shapes,
    list_core_splits,
)
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.local_model import LocalModel
from benchmarks.common.sentences import generated
from deployments.artifacts.store import LATEST_NAME
from deployments.artifacts.types import TaskName
from deployments.engines import EncoderEngine
from deployments.messages import Batch, Outputs
from tests.support.artifacts import EMBEDDER, MAX_TOKENS, seal_tiny
from tests.support.fakes import item

TEXTS = generated(40, seed=1).texts


@pytest.fixture
def model(tiny_store: Path) -> LocalModel:
    return LocalModel.open(tiny_store, EMBEDDER, LATEST_NAME)


@pytest.fixture
def engine(model: LocalModel) -> Iterator[RawEngine]:
    opened = RawEngine(model, TEXTS, cores=2)
    yield opened
    opened.close()


def test_cores_are_shared_out_both_ways() -> None:
    assert list_core_splits(2) == (CoreSplit(1, 2), CoreSplit(2, 1))
    assert list_core_splits(1) == (CoreSplit(1, 1),)


def test_batches_are_sorted_by_length_and_lose_nothing() -> None:
    items = [item(i, length) for i, length in enumerate((3, 9, 1, 5, 5))]
    batches = SortedBatches.of(items, 2)
    assert batches.order == (1, 3, 4, 0, 2)
    assert [batch.input_ids.shape for batch in batches.batches] == [(2, 9), (2, 5), (1, 1)]
    rows = np.concatenate([batch.input_ids[:, 0] for batch in batches.batches])
    assert tuple(rows) == batches.order


def test_texts_longer_than_the_model_reads_are_cut(engine: RawEngine) -> None:
    assert max(len(item.ids) for item in engine.items) == MAX_TOKENS


def test_all_placements_answer_alike(engine: RawEngine) -> None:
    engine.warm_up(8)
    assert all(engine.sentences_per_s(placement, 8) > 0 for placement in engine.list_core_splits)
    agreement = engine.agreement(8, seed=0)
    assert agreement.compared == len(TEXTS) * len(engine.list_core_splits)
    assert agreement.holds


class Muddled(LocalModel):
    """A model whose engine swaps the first two rows of every batch that has them."""

    def engine(self, *, threads: int) -> EncoderEngine:
        return MuddledEngine(LocalModel.engine(self, threads=threads))


class MuddledEngine:
    def __init__(self, inner: EncoderEngine) -> None:
        self.info = inner.info
        self.close = inner.close
        self._inner = inner

    def run(self, batch: Batch) -> Outputs:
        rows = np.asarray(self._inner.run(batch).items)
        return Outputs(rows[[1, 0, *range(2, len(rows))]] if len(rows) > 1 else rows)


def test_an_engine_that_mixes_up_rows_is_found_out(model: LocalModel) -> None:
    muddled = Muddled(model.manifest, model.directory, model.candidate)
    engine = RawEngine(muddled, TEXTS, cores=2)
    assert not engine.agreement(8, seed=0).holds
    engine.close()


def test_a_model_answers_as_the_server_would(model: LocalModel) -> None:
    (value,) = model.unbatched_values(["good movie"], threads=1)
    assert value.shape == (1, model.manifest.output_width)
    assert np.linalg.norm(value) == pytest.approx(1.0)


def test_a_model_that_takes_no_plain_texts_is_an_error(tmp_path: Path) -> None:
    seal_tiny(tmp_path, "tiny/reader", tasks=(TaskName.QUESTION_ANSWERING,))
    reader = LocalModel.open(tmp_path, "tiny/reader", LATEST_NAME)
    with pytest.raises(BenchmarkError, match="built for `question-answering`") as caught:
        reader.items(["a"])
    assert "--model" in caught.value.hint


def test_a_model_that_is_not_built_is_an_error(tiny_store: Path) -> None:
    with pytest.raises(BenchmarkError, match="not built") as caught:
        LocalModel.open(tiny_store, "no/such", LATEST_NAME)
    assert "--store" in caught.value.hint


def test_shapes_are_capped_to_what_the_model_reads() -> None:
    assert [shape.name for shape in cap_shapes(512)] == ["1x16", "1x128", "8x128", "1x512"]
    assert [shape.name for shape in cap_shapes(256)][-1] == "1x256"
    assert [shape.name for shape in cap_shapes(64)] == ["1x16", "1x64", "8x64"]


def test_a_latency_batch_is_full_and_seeded() -> None:
    def ids(seed: int) -> NDArray[np.int64]:
        items = [item(i, length) for i, length in ((5, 3), (7, 4), (9, 2))]
        (cell,) = build_timings({"only": len}, [Shape(3, 4)], items, seed)
        assert cell.batch.attention_mask.tolist() == [[1] * 4] * 3
        return cell.batch.input_ids

    assert set(ids(2).ravel().tolist()) <= {5, 7, 9}
    assert (ids(2) == ids(2)).all()
    assert (ids(2) != ids(3)).any()


def test_contenders_get_the_same_batch_in_turn() -> None:
    contenders = {"a": lambda batch: batch.input_ids, "b": lambda batch: batch.input_ids}
    cells = build_timings(contenders, [Shape(1, 2), Shape(2, 2)], [item(3), item(4)], seed=0)
    assert [(cell.contender, cell.shape.name) for cell in cells] == [
        ("a", "1x2"),
        ("b", "1x2"),
        ("a", "2x2"),
        ("b", "2x2"),
    ]
    assert cells[0].batch is cells[1].batch


def test_a_cell_keeps_the_median_of_every_round_in_milliseconds() -> None:
    (cell,) = build_timings({"slow": lambda batch: time.sleep(0.02)}, [Shape(1, 1)], [item(1)], 0)
    cell.run_round()
    cell.run_round()
    assert len(cell.medians_ms) == 2
    assert 20 <= cell.latency().ms.median < 200
