"""Contents of artifacts and their atomic publication."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.compaction.plan import Compaction, LayerReduction
from build_artifacts.encoders.candidates import CandidateGraphs, build_graph_spec
from build_artifacts.encoders.preparation import PreparedModel
from build_artifacts.families.base import BuildBudget, BuildContext, GateResult
from build_artifacts.families.encoder import EncoderBuild, EncoderCandidate
from build_artifacts.presets import (
    CPU_INT8,
    CPU_INT8_DYNAMIC,
    DYNAMIC,
    FULL,
    GPU_FP16,
    QUICK,
    SEARCH_PRESETS,
)
from build_artifacts.recipes import (
    CPU_FP32,
    BuildRecipe,
    CandidateRecipe,
    DynamicInt8,
    artifact_version,
)
from build_artifacts.steps.seal import ArtifactIdentity, read_tool_versions, write_artifact
from deployments.artifacts.manifest import ArtifactManifest, Gate, ModelSource, Parity
from deployments.artifacts.store import BUILDING_NAME, LATEST_NAME, publish, resolve_version
from deployments.artifacts.types import Device, TaskName
from deployments.tuning.parity import ReferenceOutputs
from tests.support.fakes import item
from tests.support.prepared_build import RecordingRunner
from tests.support.tiny_encoders import tiny_tokenizer

VERSION = "0123456789ab"
EXACT = Parity(cosine_mean=1.0, cosine_worst=1.0, batched_cosine_worst=1.0)
FACTS = CheckpointMetadata(
    tasks=(TaskName.TEXT_CLASSIFICATION,),
    architecture="BertForSequenceClassification",
    max_tokens=16,
    output_width=2,
    labels=("NO", "YES"),
    problem_type="single_label",
    similarity="dot",  # not the default
)
WHOLE = Compaction(
    architecture="bert",
    heads_before=8,
    ffn_channels_before=128,
    parameters_before=90,
    parameters_after=90,
)
GATE = Gate(cosine_mean=0.97)


def prepared(root: Path, compaction: Compaction = WHOLE) -> PreparedModel:
    """Write the files that the step `prepare` would write, without a model."""
    tiny_tokenizer(root / "weights")
    reference = root / "reference"
    reference.mkdir()
    ReferenceOutputs((item(5, 3),), (np.zeros(2, dtype=np.float32),)).write(
        reference / "reference.npz"
    )
    (reference / "scores.json").write_text('{"accuracy": 0.9}', encoding="utf-8")
    (reference / "compaction.json").write_text(compaction.model_dump_json(), encoding="utf-8")
    return PreparedModel(root / "weights", FACTS, reference, None)


def accept(prepared: PreparedModel, recipe: CandidateRecipe, graph: Path) -> EncoderCandidate:
    return EncoderCandidate(
        recipe=recipe,
        spec=build_graph_spec(recipe, graph, prepared),
        result=GateResult(parity=EXACT, scores={"accuracy": 0.89}),
    )


def staged(root: Path, content: bytes = b"a graph", compaction: Compaction = WHOLE) -> Path:
    """Write an artifact of two candidates that share one graph; return its directory."""
    root.mkdir(parents=True)
    model = prepared(root, compaction)
    graph = root / "graph.onnx"
    graph.write_bytes(content)
    runner = RecordingRunner(root / "work")
    context = BuildContext(
        steps=runner.steps,
        weights=model.weights,
        metadata=model.metadata,
        recipe=BuildRecipe(candidates=(), gate=GATE),
        budget=BuildBudget(tune_seconds=0),
    )
    build = EncoderBuild(context, model, CandidateGraphs(runner.steps, model))
    accepted = (
        replace(accept(model, CPU_INT8, graph), excluded_nodes=("node_MatMul_1",)),
        accept(model, replace(CPU_FP32, name="the-same-graph"), graph),
    )
    identity = ArtifactIdentity("tiny/model", VERSION, ModelSource(ref="here", revision="1"), "abc")
    into = root / "artifact"
    into.mkdir()
    write_artifact(build.package(accepted, identity), into)
    return into


def test_manifest_contains_all_metadata(tmp_path: Path) -> None:
    manifest = ArtifactManifest.read(staged(tmp_path / "work"))
    assert (manifest.labels, manifest.problem_type) == (("NO", "YES"), "single_label")
    assert manifest.similarity == "dot"
    assert (manifest.gate, manifest.scores) == (GATE, {"accuracy": 0.9})
    assert manifest.pruned is None
    first, second = manifest.candidates
    assert (first.name, first.excluded_nodes) == ("cpu-int8", ("node_MatMul_1",))
    assert first.scores == {"accuracy": 0.89}
    assert first.options == CPU_INT8.options
    assert (second.name, second.excluded_nodes) == ("the-same-graph", ())
    assert manifest.built_with["recipe"] == "abc"
    assert set(read_tool_versions()) <= set(manifest.built_with)


def test_shared_graph_is_stored_once(tmp_path: Path) -> None:
    directory = staged(tmp_path / "work")
    manifest = ArtifactManifest.read(directory)
    assert {c.graph for c in manifest.candidates} == {"graphs/cpu-int8.onnx"}
    assert [path.name for path in (directory / "graphs").iterdir()] == ["cpu-int8.onnx"]
    assert set(manifest.files) == {"tokenizer.json", "reference.npz", "graphs/cpu-int8.onnx"}


def test_manifest_describes_compaction(tmp_path: Path) -> None:
    cut = LayerReduction(layer=0, heads=(1,), ffn_channels=(2, 3))
    compaction = WHOLE.model_copy(update={"reductions": (cut,), "parameters_after": 60})
    manifest = ArtifactManifest.read(staged(tmp_path / "work", compaction=compaction))
    assert manifest.pruned == (
        "removed 1 of 8 heads and 2 of 128 feed-forward channels: 90 -> 60 parameters"
    )


def test_publish_renames_and_sets_latest(tmp_path: Path) -> None:
    made, store = staged(tmp_path / "work"), tmp_path / "store"
    inode = made.stat().st_ino
    directory = publish(made, store, "tiny/model", VERSION)
    assert directory == store / "tiny--model" / VERSION
    assert directory.stat().st_ino == inode
    assert resolve_version(store, "tiny/model", LATEST_NAME) == VERSION


def test_publish_replaces_existing_version(tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / BUILDING_NAME).mkdir(parents=True)
    publish(staged(tmp_path / "one", b"first"), store, "tiny/model", VERSION)
    directory = publish(staged(tmp_path / "two", b"second"), store, "tiny/model", VERSION)
    assert (directory / "graphs" / "cpu-int8.onnx").read_bytes() == b"second"
    ArtifactManifest.read(directory)
    assert list((store / BUILDING_NAME).iterdir()) == []


def test_former_version_is_deleted_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deletion of gigabytes takes seconds and can be interrupted."""
    store = tmp_path / "store"
    (store / BUILDING_NAME).mkdir(parents=True)
    publish(staged(tmp_path / "one", b"first"), store, "tiny/model", VERSION)

    def interrupt(_path: Path, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupt)
    with pytest.raises(KeyboardInterrupt):
        publish(staged(tmp_path / "two", b"second"), store, "tiny/model", VERSION)
    assert resolve_version(store, "tiny/model", LATEST_NAME) == VERSION
    directory = store / "tiny--model" / VERSION
    assert (directory / "graphs" / "cpu-int8.onnx").read_bytes() == b"second"


def test_failed_publication_keeps_the_former_version(tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / BUILDING_NAME).mkdir(parents=True)
    directory = publish(staged(tmp_path / "one", b"first"), store, "tiny/model", VERSION)
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "absent", store, "tiny/model", VERSION)
    assert (directory / "graphs" / "cpu-int8.onnx").read_bytes() == b"first"


TOOLS = {"torch": "2", "onnxruntime": "1"}
INPUTS = ("revision", None, "feature-extraction", None)
SMALL = BuildRecipe(candidates=(CPU_INT8,))


def test_version_depends_on_all_build_inputs() -> None:
    other_scheme = replace(CPU_INT8, options=CPU_INT8.options.model_copy(update={"spinning": True}))
    versions = [
        artifact_version(SMALL, TOOLS, *INPUTS),
        artifact_version(SMALL, {**TOOLS, "torch": "3"}, *INPUTS),
        artifact_version(SMALL, {**TOOLS, "openvino": "1"}, *INPUTS),
        *(artifact_version(SMALL, TOOLS, *INPUTS[:i], "x", *INPUTS[i + 1 :]) for i in range(4)),
        artifact_version(replace(SMALL, revision=SMALL.revision + 1), TOOLS, *INPUTS),
        artifact_version(replace(SMALL, keep=1), TOOLS, *INPUTS),
        artifact_version(replace(SMALL, gate=GATE), TOOLS, *INPUTS),
        artifact_version(replace(SMALL, candidates=(CPU_INT8, GPU_FP16)), TOOLS, *INPUTS),
        artifact_version(replace(SMALL, candidates=(other_scheme,)), TOOLS, *INPUTS),
        artifact_version(replace(SMALL, fallback=CPU_INT8), TOOLS, *INPUTS),
    ]
    assert len(set(versions)) == len(versions)
    assert artifact_version(SMALL, dict(reversed(TOOLS.items())), *INPUTS) == versions[0]
    assert all(len(version) == 12 and int(version, 16) >= 0 for version in versions)


def test_tool_versions_are_installed_versions() -> None:
    tools = read_tool_versions()
    assert {"torch", "transformers", "onnx", "onnxscript", "onnxruntime", "tokenizers"} <= set(
        tools
    )
    assert json.loads(json.dumps(tools)) == tools
    assert "onnxruntime-gpu" not in tools, "one name, whichever package provides it"


@pytest.mark.parametrize("tool", ["onnx-ir", "bitsandbytes", "accelerate"])
def test_tool_versions_include_quantizers(tool: str) -> None:
    assert (tool in read_tool_versions()) == (find_spec(tool.replace("-", "_")) is not None)


@pytest.mark.parametrize("recipe", SEARCH_PRESETS.values(), ids=SEARCH_PRESETS)
def test_candidate_names_are_unique(recipe: BuildRecipe) -> None:
    everything = (*recipe.candidates, recipe.fallback)
    assert len({candidate.name for candidate in everything}) == len(everything)
    first = CPU_INT8_DYNAMIC if recipe is DYNAMIC else CPU_INT8
    assert recipe.candidates_for(Device.CPU)[0] == first, "default candidate without measurements"


def test_candidates_depend_on_the_batch_only_by_request() -> None:
    for recipe in SEARCH_PRESETS.values():
        dynamic = [c for c in recipe.candidates if isinstance(c.quantization, DynamicInt8)]
        assert bool(dynamic) == (recipe is DYNAMIC)


def test_quick_preset_is_subset_of_full() -> None:
    assert set(QUICK.candidates) <= set(FULL.candidates)
    assert QUICK.gate == FULL.gate == Gate()
