from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from build_artifacts.evaluation import Evaluation, load_evaluation, score_engine
from build_artifacts.evaluation.base import Output, ReducedOutput
from deployments.artifacts.types import TaskName
from deployments.batching.batch_policy import collate
from deployments.engines.forward_pass import Batch, Outputs
from deployments.errors import EngineFailed
from deployments.messages import TokenizedItem
from tests.support.fakes import ScriptedEngine, item
from tests.unit.build_artifacts.evaluation.conftest import MakeModel, WriteFile


class RecordingForward:
    """Forward pass that returns the first token id of every item. Records the shapes."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, batch: Batch) -> Outputs:
        items, tokens = batch.input_ids.shape
        self.shapes.append((items, tokens))
        return Outputs(batch.input_ids[:, :1].astype(np.float32))


class OutputRecorder(Evaluation):
    """Evaluation whose score is the number of the outputs. Records them."""

    def __init__(self, items: Sequence[TokenizedItem]) -> None:
        super().__init__(items, "outputs")
        self.outputs: list[list[float]] = []

    def score_reduced(self, reduced: Sequence[ReducedOutput]) -> dict[str, float]:
        self.outputs = [output.tolist() for output in reduced]
        return {"outputs": len(reduced)}

    def _reduce(self, index: int, output: Output) -> ReducedOutput:
        return output.copy()


def test_items_run_by_length_and_outputs_keep_item_order() -> None:
    chance = np.random.default_rng(0)
    lengths = chance.integers(1, 50, size=100).tolist()
    evaluation = OutputRecorder([item(i, length) for i, length in enumerate(lengths)])
    forward = RecordingForward()
    score_engine(ScriptedEngine(forward), evaluation)
    assert evaluation.outputs == [[float(i)] for i in range(100)]
    longest = sorted(lengths)
    assert forward.shapes == [
        (32, longest[31]), (32, longest[63]), (32, longest[95]), (4, longest[99])
    ]  # fmt: skip


def test_long_items_run_in_smaller_batches() -> None:
    forward = RecordingForward()
    items = [item(1, 512) for _ in range(20)] + [item(2, 9999)]
    score_engine(ScriptedEngine(forward), OutputRecorder(items))
    assert forward.shapes == [(16, 512), (4, 512), (1, 9999)]


def test_no_items_run_no_batch() -> None:
    forward = RecordingForward()
    assert score_engine(ScriptedEngine(forward), OutputRecorder([])) == {"outputs": 0}
    assert forward.shapes == []


def classify_by_length(batch: Batch) -> Outputs:
    """Return label 1 for items of more than three tokens."""
    return Outputs([np.array([3.5, n], dtype=np.float32) for n in batch.lengths])


def test_scores_cover_all_outputs(write: WriteFile, make_model: MakeModel) -> None:
    lines = [f"{i % 3 % 2}\t{'good ' * (1 + i % 3)}\n" for i in range(90)]
    evaluation = load_evaluation(
        write("a.tsv", "".join(lines)), TaskName.TEXT_CLASSIFICATION, make_model(labels=("s", "l"))
    )
    engine = ScriptedEngine(classify_by_length)
    # Correct: texts of one word (label 0) and two words (label 1). Wrong: three words (label 0).
    scores = score_engine(engine, evaluation)
    assert scores["accuracy"] == pytest.approx(2 / 3)
    assert scores == evaluation.score(engine.run(collate(evaluation.items)).items)


def test_nonfinite_output_is_rejected(write: WriteFile, make_model: MakeModel) -> None:
    evaluation = load_evaluation(
        write("a.tsv", "0\ta\n1\tb\n"), TaskName.TEXT_CLASSIFICATION, make_model(labels=("s", "l"))
    )
    corrupted = ScriptedEngine(lambda batch: Outputs(np.full((2, 2), np.nan, dtype=np.float32)))
    with pytest.raises(EngineFailed, match="not a finite number"):
        score_engine(corrupted, evaluation)


def test_kept_output_does_not_reference_its_batch(write: WriteFile, make_model: MakeModel) -> None:
    """Its memory, and not that of the whole batch, is kept until the last pass."""
    evaluation = load_evaluation(
        write("a.tsv", "0\ta\n1\tb\n"), TaskName.TEXT_CLASSIFICATION, make_model(labels=("s", "l"))
    )
    batch = np.zeros((2, 2), dtype=np.float32)
    assert not np.shares_memory(evaluation.reduce_output(0, batch[0]), batch)
