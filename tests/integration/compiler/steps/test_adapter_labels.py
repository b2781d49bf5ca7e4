"""Labels of adapters: their number fits the head, and labels.json states their problem type."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest

from build_artifacts.checkpoints.adapter import read_adapter
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.tasks import select_tasks
from build_artifacts.errors import UnsupportedModel
from build_artifacts.families import read_metadata
from build_artifacts.progress import BuildProgress
from build_artifacts.steps.convert_weights import merge_adapter
from build_artifacts.workspaces.step_runner import StepRunner
from build_artifacts.workspaces.workspace import Workspace
from deployments.artifacts.manifest import ModelSource
from deployments.artifacts.types import ModelHead
from tests.support.adapters import tiny_adapter
from tests.support.tiny_encoders import tiny_checkpoint, write_json

MULTI_LABEL = "multi_label_classification"
LABELS = ("A", "B", "C")


def merge_with_progress(base: Path, adapter: Path, work: Path) -> tuple[Checkpoint, str]:
    """Return the merged checkpoint and the lines of its progress."""
    output = io.StringIO()
    progress = BuildProgress(output)
    progress.begin()
    work.mkdir()
    checkpoint = Checkpoint(base, ModelSource(ref="here", revision="1"), "local/model")
    steps = StepRunner(Workspace(work), progress)
    merged = merge_adapter(steps, checkpoint, read_adapter(adapter))
    progress.end()
    return merged, output.getvalue()


def read_problem_type(checkpoint: Checkpoint) -> str | None:
    return read_metadata(checkpoint, select_tasks(checkpoint, None, None)).problem_type


@pytest.mark.parametrize(
    ("stated", "problem_type", "shown"),
    [
        (None, "single_label", "single_label_classification"),
        (MULTI_LABEL, "multi_label", MULTI_LABEL),
        ("regression", "regression", "regression"),
    ],
)
def test_problem_type_of_the_labels_is_that_of_the_model(
    tmp_path: Path, embedding_source: Path, stated: str | None, problem_type: str, shown: str
) -> None:
    adapter = tiny_adapter(tmp_path / "adapter", embedding_source, labels=LABELS)
    if stated is not None:
        write_json(adapter / "labels.json", {"labels": LABELS, "problem_type": stated})
    merged, lines = merge_with_progress(embedding_source, adapter, tmp_path / "work")
    assert read_problem_type(merged) == problem_type
    assert f", for {shown}" in lines


def test_adapter_without_a_problem_type_keeps_that_of_its_base(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", labels=LABELS, layers=1)
    config = (base / "config.json").read_text(encoding="utf-8")
    (base / "config.json").write_text(config.replace("{", f'{{"problem_type": "{MULTI_LABEL}",', 1))
    adapter = tiny_adapter(tmp_path / "adapter", base, labels=LABELS)
    merged, lines = merge_with_progress(base, adapter, tmp_path / "work")
    assert read_problem_type(merged) == "multi_label"
    assert f", for {MULTI_LABEL}" in lines


@pytest.mark.parametrize("head", [ModelHead.LABELS, ModelHead.TOKENS])
@pytest.mark.parametrize("labels", [LABELS[:2], ("A", "B", "C", "D")])
def test_wrong_number_of_labels_names_their_file(
    tmp_path: Path, embedding_source: Path, head: ModelHead, labels: Sequence[str]
) -> None:
    adapter = tiny_adapter(tmp_path / "adapter", embedding_source, head=head, labels=LABELS)
    write_json(adapter / "labels.json", labels)
    reason = f"head of the adapter `adapter` has 3 labels, and `labels.json` names {len(labels)}$"
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        merge_with_progress(embedding_source, adapter, tmp_path / "work")
    assert "`labels.json`" in caught.value.hint


def test_other_labels_than_those_of_the_base_need_their_file(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", labels=("A", "B"), layers=1)
    trained = tiny_checkpoint(tmp_path / "trained", labels=LABELS, layers=1)
    adapter = tiny_adapter(tmp_path / "adapter", trained)
    with pytest.raises(UnsupportedModel, match=r"has 3 labels, and the model has 2$") as caught:
        merge_with_progress(base, adapter, tmp_path / "work")
    assert "`labels.json`" in caught.value.hint
