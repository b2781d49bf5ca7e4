from __future__ import annotations

import numpy as np
import pytest

from build_artifacts.evaluation import load_evaluation, run_items, score_engine
from deployments.artifacts.types import TaskName
from deployments.engines.forward_pass import Batch, Outputs
from deployments.errors import EngineFailed
from deployments.messages import TokenizedItem
from tests.support.fakes import ScriptedEngine
from tests.unit.build_artifacts.evaluation.conftest import MakeModel, WriteFile


def token_item(marker: int, length: int) -> TokenizedItem:
    return TokenizedItem(np.full(length, marker, dtype=np.int32), length)


class RecordingForward:
    """Forward pass that returns the first token id of every item. Records shapes and outputs."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.handed_out: list[np.ndarray] = []

    def __call__(self, batch: Batch) -> Outputs:
        items, tokens = batch.input_ids.shape
        self.shapes.append((items, tokens))
        self.handed_out.append(batch.input_ids[:, :1].astype(np.float32))
        return Outputs(self.handed_out[-1])


def test_items_run_by_length_and_outputs_keep_item_order() -> None:
    chance = np.random.default_rng(0)
    lengths = chance.integers(1, 50, size=100).tolist()
    items = [token_item(i, length) for i, length in enumerate(lengths)]
    forward = RecordingForward()
    answers = run_items(ScriptedEngine(forward), items)
    assert [answer.tolist() for answer in answers] == [[float(i)] for i in range(100)]
    longest = sorted(lengths)
    assert forward.shapes == [
        (32, longest[31]), (32, longest[63]), (32, longest[95]), (4, longest[99])
    ]  # fmt: skip


def test_outputs_do_not_reference_their_batches() -> None:
    forward = RecordingForward()
    answers = run_items(ScriptedEngine(forward), [token_item(1, 2), token_item(2, 3)])
    assert not any(np.shares_memory(answer, forward.handed_out[0]) for answer in answers)


def test_long_items_run_in_smaller_batches() -> None:
    forward = RecordingForward()
    run_items(
        ScriptedEngine(forward), [token_item(1, 512) for _ in range(20)] + [token_item(2, 9999)]
    )
    assert forward.shapes == [(16, 512), (4, 512), (1, 9999)]


def test_no_items_run_no_batch() -> None:
    forward = RecordingForward()
    assert run_items(ScriptedEngine(forward), []) == []
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
    assert scores == evaluation.score(run_items(engine, evaluation.items))


def test_nonfinite_output_is_rejected(write: WriteFile, make_model: MakeModel) -> None:
    evaluation = load_evaluation(
        write("a.tsv", "0\ta\n1\tb\n"), TaskName.TEXT_CLASSIFICATION, make_model(labels=("s", "l"))
    )
    corrupted = ScriptedEngine(lambda batch: Outputs(np.full((2, 2), np.nan, dtype=np.float32)))
    with pytest.raises(EngineFailed, match="not a finite number"):
        score_engine(corrupted, evaluation)
