"""The models of `hundredfold demo --variants`: several builds of a model in several sizes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from build_artifacts import demo_variants
from build_artifacts.checkpoints.checkpoint import content_digest
from build_artifacts.demo import DemoModel
from build_artifacts.demo_variants import SIZES, VARIANTS, build_demo_variants, plan_variant
from build_artifacts.progress import BuildProgress
from deployments.artifacts.store import LATEST_NAME, resolve_version
from deployments.artifacts.types import ModelHead, TaskName
from deployments.plan.plan_file import read_plan
from tests.support.tiny_encoders import tiny_checkpoint


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DemoModel:
    """Replace the demo models of all sizes by one question-answering model with random weights."""
    source = tiny_checkpoint(tmp_path / "checkpoint", head=ModelHead.SPAN, layers=1)
    tiny = DemoModel(
        id="tiny/reader",
        ref=str(source),
        revision=content_digest(source),
        task=TaskName.QUESTION_ANSWERING,
    )
    monkeypatch.setattr(demo_variants, "SIZES", (tiny,))
    monkeypatch.setattr("build_artifacts.demo._TUNE_SECONDS", 0.0)
    return tiny


def test_every_variant_is_sealed_and_int8_answers(model: DemoModel, tmp_path: Path) -> None:
    store, progress = tmp_path / "store", BuildProgress(io.StringIO())
    first, second = (list(build_demo_variants(store, progress, with_gpu=False)) for _ in range(2))
    names = [built.manifest.candidates[0].name for built in first]
    assert names == ["cpu-int8", "cpu-torch", "onnx", "cpu-fp32"]
    assert all(len(built.manifest.candidates) == 1 for built in first[1:])
    default, *others = (built.manifest.version for built in first)
    assert resolve_version(store, model.id, LATEST_NAME) == default
    assert read_plan(store).find(model.id).aliases == dict(zip(VARIANTS, others, strict=True))
    assert all(built.already_built for built in second)


def test_sizes_say_how_much_was_pruned_and_what_it_may_cost(tmp_path: Path) -> None:
    full, *pruned = SIZES
    assert full.pruning is None
    for model in pruned:
        assert model.pruning is not None
        assert model.id == f"{full.id}-pruned-{round(100 * model.pruning.fraction)}"
        assert model.pruning.data == model.evaluation
        assert full.gate.metric_drop < model.gate.metric_drop
    versions = [plan_variant(model, alias, tmp_path) for model in SIZES for alias in VARIANTS]
    assert len({(request.id, request.recipe.digest()) for request in versions}) == len(versions)
    assert not any(request.is_latest for request in versions)
