"""Whole builds: evaluation data, fallbacks and rejection."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from build_artifacts.errors import GateFailed, UnsupportedModel
from build_artifacts.evaluation import BadEvaluationData
from build_artifacts.families.base import BuildBudget
from build_artifacts.pipeline import BuildRequest, BuildResult, build
from build_artifacts.presets import CPU_INT8
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import BuildRecipe
from deployments.artifacts.manifest import ArtifactManifest, Gate
from deployments.artifacts.store import BUILDING_NAME
from deployments.artifacts.types import Device, TaskName
from deployments.config import EncoderSettings
from deployments.tuning.costs import TuningTarget, read_costs
from tests.integration.compiler.conftest import LABELS
from tests.support.prepared_build import LITTLE, SMALL
from tests.support.tiny_encoders import tiny_checkpoint, write_json

UNTUNED = BuildBudget(tune_seconds=0)
# Rejects int8 and accepts fp32.
FP32_GATE = Gate(cosine_mean=0.9999999, cosine_worst=0.9999999)


def leftovers(store: Path) -> list[str]:
    """Return the work files of a build, without its log."""
    names = (path.name for path in (store / BUILDING_NAME).iterdir())
    return [name for name in names if not name.endswith(".log")]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("classifier") / "moods"
    return tiny_checkpoint(directory, labels=LABELS, layers=1)


@pytest.fixture(scope="module")
def build_with_data(
    tmp_path_factory: pytest.TempPathFactory, classifier: Path, sentiment_data: Path
) -> tuple[BuildResult, str]:
    """A classifier built with labeled data, and the progress output."""
    output = io.StringIO()
    request = BuildRequest(
        ref=str(classifier),
        store=tmp_path_factory.mktemp("store"),
        recipe=replace(SMALL, gate=Gate(top1_agreement=0.9, metric_drop=50)),
        budget=replace(LITTLE, evaluation=sentiment_data),
    )
    return build(request, BuildProgress(output)), output.getvalue()


def test_build_with_data_seals_task_scores(
    build_with_data: tuple[BuildResult, str],
) -> None:
    result, output = build_with_data
    manifest = ArtifactManifest.read(result.directory)
    assert manifest.tasks == (TaskName.TEXT_CLASSIFICATION,)
    assert (manifest.labels, manifest.problem_type) == (LABELS, "single_label")
    assert set(manifest.scores) == {"accuracy", "macro_f1"}
    for candidate in manifest.candidates:
        assert set(candidate.scores) == set(manifest.scores)
        assert candidate.parity.top1_agreement is not None
        assert candidate.parity.top1_agreement >= manifest.gate.top1_agreement
        assert manifest.scores["accuracy"] - candidate.scores["accuracy"] <= 0.5
    accuracy = f"accuracy {manifest.scores['accuracy']:.4f}"
    assert "fp32 torch on the probes, and on the data: BertForSequence" in output
    assert accuracy in output


def test_every_build_step_is_reported_once(build_with_data: tuple[BuildResult, str]) -> None:
    _, output = build_with_data
    steps = [line.split()[0] for line in output.splitlines()]
    assert steps[:3] == ["resolve", "reference", "export"]
    assert steps.count("export") == 1
    assert steps.index("screen") < steps.index("gate") < steps.index("tune")
    assert steps[-1] == "seal"
    assert len(output.splitlines()) == len(set(output.splitlines()))


def test_fastest_candidate_on_this_host_is_first(
    build_with_data: tuple[BuildResult, str],
) -> None:
    result, _ = build_with_data
    manifest = result.manifest
    for threads in {1, 2}:
        encoder = EncoderSettings(intra_op_threads=threads)
        placement = TuningTarget(result.directory, manifest, Device.CPU, encoder)
        table = read_costs(placement)
        if table is None:
            assert threads == 2, "one thread is always measured"
            continue
        assert table.version == manifest.version
        assert {v.candidate for v in table.selected_variants()} <= {
            c.name for c in placement.candidates
        }
        if threads == 1:
            assert manifest.candidates[0].name == table.selected_variants()[0].candidate


def test_build_falls_back_to_fp32(tmp_path: Path, embedding_source: Path) -> None:
    output = io.StringIO()
    request = BuildRequest(
        ref=str(embedding_source),
        store=tmp_path,
        recipe=replace(SMALL, gate=FP32_GATE),
        budget=UNTUNED,
    )
    result = build(request, BuildProgress(output))
    assert [c.name for c in result.manifest.candidates] == ["cpu-fp32"]
    assert result.manifest.candidates[0].parity.cosine_worst > 0.9999999
    lines = output.getvalue().splitlines()
    assert "no candidate for the CPU passed the gate: trying cpu-fp32" in lines
    assert any("cpu-int8 against fp32 torch: rejected, mean cosine" in line for line in lines)
    assert not (result.directory / "hosts").exists(), "tuning is disabled"
    assert leftovers(tmp_path) == []


def test_build_rejected_in_fp32_raises_gate_failed(
    tmp_path: Path, embedding_source: Path, progress: BuildProgress
) -> None:
    impossible = BuildRecipe(candidates=(CPU_INT8,), gate=Gate(cosine_mean=1.1))
    request = BuildRequest(
        ref=str(embedding_source), store=tmp_path, recipe=impossible, budget=UNTUNED
    )
    with pytest.raises(GateFailed, match="no graph of `BertModel` for the CPU passed"):
        build(request, progress)
    assert [path.name for path in tmp_path.iterdir()] == [BUILDING_NAME]
    assert leftovers(tmp_path) == [], "the next run would fail the same way"


def test_nonfinite_checkpoint_is_rejected_before_export(
    tmp_path: Path,
) -> None:
    source = tiny_checkpoint(tmp_path / "model", layers=1)
    weights = load_file(source / "model.safetensors")
    weights["encoder.layer.0.output.dense.bias"][3] = float("inf")
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    output = io.StringIO()
    request = BuildRequest(ref=str(source), store=tmp_path / "store", recipe=SMALL, budget=UNTUNED)
    with pytest.raises(UnsupportedModel, match="returns NaN or infinity in fp32 torch"):
        build(request, BuildProgress(output))
    assert "export" not in output.getvalue()
    assert leftovers(tmp_path / "store") == []


def test_tokenizer_with_more_tokens_than_the_model_is_rejected(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "model", layers=1)
    weights = load_file(source / "model.safetensors")
    words = weights["embeddings.word_embeddings.weight"]
    weights["embeddings.word_embeddings.weight"] = words[:20].clone()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    write_json(source / "config.json", config | {"vocab_size": 20})
    request = BuildRequest(ref=str(source), store=tmp_path / "store", recipe=SMALL, budget=UNTUNED)
    with pytest.raises(UnsupportedModel, match=r"returns the id \d+ .* vectors for 20 tokens"):
        build(request, BuildProgress(io.StringIO()))


def test_data_of_other_task_is_rejected_before_computation(
    tmp_path: Path, embedding_source: Path
) -> None:
    data = tmp_path / "data.jsonl"
    write_json(data, {"question": "who?"})
    output = io.StringIO()
    request = BuildRequest(
        ref=str(embedding_source),
        store=tmp_path / "store",
        recipe=SMALL,
        budget=replace(UNTUNED, evaluation=data),
    )
    with pytest.raises(BadEvaluationData, match=r"data\.jsonl"):
        build(request, BuildProgress(output))
    assert [line.split()[0] for line in output.getvalue().splitlines()] == ["resolve"]
