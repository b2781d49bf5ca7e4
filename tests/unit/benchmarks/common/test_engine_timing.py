from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.common import engine_timing
from benchmarks.common.engine_timing import (
    MIN_BATCHES_PER_PASS,
    CoreSplit,
    RawEngine,
    SortedBatches,
    build_timings,
    cap_shapes,
    count_repetitions,
    list_core_splits,
)
from benchmarks.common.errors import BenchmarkError
from benchmarks.common.local_model import LocalModel
from benchmarks.common.sentences import generate_sentences
from deployments.artifacts.types import TaskName
from deployments.engines import EncoderEngine
from deployments.engines.forward_pass import Batch, Outputs
from deployments.tuning.costs import Shape
from tests.support.artifacts import EMBEDDER, MAX_TOKENS, seal_tiny
from tests.support.fakes import FakeClock, item

TEXTS = generate_sentences(40, seed=1).texts


@pytest.fixture
def model(tiny_store: Path) -> LocalModel:
    return LocalModel.open(tiny_store, EMBEDDER)


@pytest.fixture
def engine(model: LocalModel) -> Iterator[RawEngine]:
    opened = RawEngine(model, TEXTS, cores=2)
    yield opened
    opened.close()


def test_list_core_splits() -> None:
    assert list_core_splits(2) == (CoreSplit(1, 2), CoreSplit(2, 1))
    assert list_core_splits(1) == (CoreSplit(1, 1),)


def test_sorted_batches_contain_all_items() -> None:
    items = [item(i, length) for i, length in enumerate((3, 9, 1, 5, 5))]
    batches = SortedBatches.build(items, 2)
    assert batches.order == (1, 3, 4, 0, 2)
    assert [batch.input_ids.shape for batch in batches.batches] == [(2, 9), (2, 5), (1, 1)]
    rows = np.concatenate([batch.input_ids[:, 0] for batch in batches.batches])
    assert tuple(rows) == batches.order


@pytest.mark.parametrize(("batches", "passes"), [(6, 2), (6, 64), (87, 64), (1, 1)])
def test_every_pass_gets_several_batches(batches: int, passes: int) -> None:
    assert count_repetitions(batches, passes) * batches / passes >= MIN_BATCHES_PER_PASS


def test_enough_batches_are_not_repeated() -> None:
    assert count_repetitions(87, 2) == 1


def test_rate_of_a_few_sentences_counts_their_repetitions(model: LocalModel) -> None:
    counting = CountingModel(model.manifest, model.directory, model.candidate)
    engine = RawEngine(counting, TEXTS, cores=4)
    try:
        assert engine.sentences_per_s(CoreSplit(1, 4), 8) > 0
        runs = engine.engine(CoreSplit(1, 4)).runs
    finally:
        engine.close()
    assert runs == MIN_BATCHES_PER_PASS * 4 + 3, "7 times 5 batches"


def test_tokenize_long_text_is_truncated(engine: RawEngine) -> None:
    assert max(len(item.ids) for item in engine.items) == MAX_TOKENS


def test_raw_engine_is_batch_invariant_on_every_core_split(engine: RawEngine) -> None:
    engine.warm_up(8)
    assert all(engine.sentences_per_s(placement, 8) > 0 for placement in engine.splits)
    check = engine.check_batch_invariance(8, seed=0)
    assert check.compared == len(TEXTS) * len(engine.splits)
    assert check.is_met


class RowSwapping(LocalModel):
    """A model whose engine swaps the first two rows of every batch."""

    def open_engine(self, *, threads: int) -> EncoderEngine:
        return RowSwappingEngine(LocalModel.open_engine(self, threads=threads))


class RowSwappingEngine:
    def __init__(self, inner: EncoderEngine) -> None:
        self.info = inner.info
        self.close = inner.close
        self._inner = inner

    def run(self, batch: Batch) -> Outputs:
        rows = np.asarray(self._inner.run(batch).items)
        return Outputs(rows[[1, 0, *range(2, len(rows))]] if len(rows) > 1 else rows)


class CountingModel(LocalModel):
    """A model whose engine counts its passes."""

    def open_engine(self, *, threads: int) -> EncoderEngine:
        return CountingEngine(LocalModel.open_engine(self, threads=threads))


class CountingEngine:
    def __init__(self, inner: EncoderEngine) -> None:
        self.info = inner.info
        self.close = inner.close
        self.runs = 0
        self._inner = inner
        self._lock = threading.Lock()

    def run(self, batch: Batch) -> Outputs:
        with self._lock:
            self.runs += 1
        return self._inner.run(batch)


def test_check_batch_invariance_detects_swapped_rows(model: LocalModel) -> None:
    swapping = RowSwapping(model.manifest, model.directory, model.candidate)
    engine = RawEngine(swapping, TEXTS, cores=2)
    assert not engine.check_batch_invariance(8, seed=0).is_met
    engine.close()


def test_unbatched_values_decode_the_task(model: LocalModel) -> None:
    (value,) = model.unbatched_values(["good movie"], threads=1)
    assert value.shape == (1, model.manifest.output_width)
    assert np.linalg.norm(value) == pytest.approx(1.0)


def test_tokenize_rejects_a_task_without_plain_texts(tmp_path: Path) -> None:
    seal_tiny(tmp_path, "tiny/reader", tasks=(TaskName.QUESTION_ANSWERING,))
    reader = LocalModel.open(tmp_path, "tiny/reader")
    with pytest.raises(BenchmarkError, match="a model for `question-answering`") as caught:
        reader.tokenize(["a"])
    assert "--model" in caught.value.hint


def test_open_rejects_a_missing_model(tiny_store: Path) -> None:
    with pytest.raises(BenchmarkError, match="not built") as caught:
        LocalModel.open(tiny_store, "no/such")
    assert "--store" in caught.value.hint


def test_cap_shapes_limits_tokens_and_drops_duplicates() -> None:
    assert [str(shape) for shape in cap_shapes(512)] == ["1x16", "1x128", "8x128", "1x512"]
    assert [str(shape) for shape in cap_shapes(256)][-1] == "1x256"
    assert [str(shape) for shape in cap_shapes(64)] == ["1x16", "1x64", "8x64"]


def test_build_timings_batch_has_no_padding_and_depends_on_seed() -> None:
    def ids(seed: int) -> NDArray[np.int64]:
        items = [item(i, length) for i, length in ((5, 3), (7, 4), (9, 2))]
        (timing,) = build_timings(
            {"only": lambda batch: None}, [Shape(items=3, tokens=4)], items, seed
        )
        assert timing.batch.attention_mask.tolist() == [[1] * 4] * 3
        return timing.batch.input_ids

    assert set(ids(2).ravel().tolist()) <= {5, 7, 9}
    assert (ids(2) == ids(2)).all()
    assert (ids(2) != ids(3)).any()


def test_build_timings_shares_the_batch_of_a_shape() -> None:
    systems = {"a": lambda batch: batch.input_ids, "b": lambda batch: batch.input_ids}
    timings = build_timings(
        systems, [Shape(items=1, tokens=2), Shape(items=2, tokens=2)], [item(3), item(4)], seed=0
    )
    assert [(timing.system, str(timing.shape)) for timing in timings] == [
        ("a", "1x2"),
        ("b", "1x2"),
        ("a", "2x2"),
        ("b", "2x2"),
    ]
    assert timings[0].batch is timings[1].batch


def test_run_round_appends_the_median_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(engine_timing, "time", SimpleNamespace(perf_counter=clock))

    def take_20_ms(_batch: Batch) -> None:
        clock.now_s += 0.02

    (timing,) = build_timings({"slow": take_20_ms}, [Shape(items=1, tokens=1)], [item(1)], 0)
    timing.run_round()
    timing.run_round()
    assert len(timing.medians_ms) == 2
    assert timing.latency().ms.median == pytest.approx(20)
