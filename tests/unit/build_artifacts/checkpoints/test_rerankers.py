"""Modules of cross-encoders: those that the build does not apply are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.tasks import select_tasks
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.manifest import ModelSource
from deployments.artifacts.types import TaskName
from tests.support.tiny_encoders import write_json

CLASSIFIER, DECODER, BODY = "BertForSequenceClassification", "Qwen3ForCausalLM", "BertModel"


def cross_encoder(directory: Path, architecture: str, *kinds: str) -> Checkpoint:
    config = {"architectures": [architecture], "id2label": {"0": "LABEL_0"}}
    write_json(directory / "config.json", config)
    write_json(directory / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})
    modules = [
        {"type": f"sentence_transformers.x.{kind}", "path": f"{i}_{kind}" if i else ""}
        for i, kind in enumerate(kinds)
    ]
    write_json(directory / "modules.json", modules)
    return Checkpoint(directory, ModelSource(ref="here", revision="1"), "local/model")


@pytest.mark.parametrize(
    ("architecture", "kinds"),
    [
        (CLASSIFIER, ["Transformer"]),
        (DECODER, ["Transformer"]),
        (DECODER, ["Transformer", "LogitScore"]),
    ],
)
def test_modules_of_a_score_are_accepted(
    tmp_path: Path, architecture: str, kinds: list[str]
) -> None:
    checkpoint = cross_encoder(tmp_path, architecture, *kinds)
    assert select_tasks(checkpoint, None, None)[0] == TaskName.TEXT_RANKING


@pytest.mark.parametrize(
    ("architecture", "kinds", "named"),
    [
        (CLASSIFIER, ["Transformer", "Dense"], "Dense"),
        (CLASSIFIER, ["Transformer", "LogitScore"], "LogitScore"),
        (BODY, ["Transformer", "Pooling", "Dense"], "Pooling"),
        (DECODER, ["Transformer", "LogitScore", "Dense"], "Dense"),
        (CLASSIFIER, ["Router"], "Router"),
    ],
)
@pytest.mark.parametrize("task", [None, TaskName.TEXT_RANKING])
def test_module_that_changes_the_score_is_refused_by_name(
    tmp_path: Path, architecture: str, kinds: list[str], named: str, task: str | None
) -> None:
    checkpoint = cross_encoder(tmp_path, architecture, *kinds)
    with pytest.raises(UnsupportedModel, match=f"`modules.json` has the module `{named}`, which"):
        select_tasks(checkpoint, None, task)


def test_module_of_a_head_is_named_before_the_number_of_labels(tmp_path: Path) -> None:
    checkpoint = cross_encoder(tmp_path, BODY, "Transformer", "Pooling", "Dense")
    write_json(tmp_path / "config.json", {"architectures": [BODY]})  # two labels by default
    with pytest.raises(UnsupportedModel, match="has the module `Pooling`"):
        select_tasks(checkpoint, None, TaskName.TEXT_RANKING)
