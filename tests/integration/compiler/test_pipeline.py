"""Whole builds: contents, reuse and version of published artifacts."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from build_artifacts import pipeline
from build_artifacts.accuracy_gate import CandidateSearch
from build_artifacts.checkpoints.checkpoint import content_digest
from build_artifacts.commands.build import print_result
from build_artifacts.encoders.probes import tokenize_texts
from build_artifacts.errors import BuildError, UnsafeSource
from build_artifacts.evaluation import BadEvaluationData
from build_artifacts.families.base import BuildBudget
from build_artifacts.pipeline import (
    BuildRequest,
    BuildResult,
    build,
    find_sealed,
)
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import CPU_FP32, BuildRecipe
from cluster.models.listing import list_versions
from deployments.artifacts.manifest import ArtifactManifest, Candidate, Gate
from deployments.artifacts.store import BUILDING_NAME, LATEST_NAME, resolve_version
from deployments.artifacts.types import Device, TaskName
from deployments.batching.batch_policy import collate
from deployments.config import EncoderSettings
from deployments.engines import GraphSpec, open_engine
from deployments.messages import TokenizedItem
from deployments.tuning.parity import ProbeOutputs, ReferenceOutputs, cosines
from tests.integration.compiler.conftest import BOTH_DEVICES, LABELS
from tests.support.artifacts import GRAPH_NAME, seal_tiny
from tests.support.prepared_build import LITTLE, SMALL
from tests.support.tiny_encoders import HIDDEN, POSITIONS

TEXTS = ("the lovely river", "bad", "a train to the city and a long night " * 4)


def store_path(result: BuildResult) -> Path:
    return result.directory.parents[1]


def run_sealed_graph(
    result: BuildResult, candidate: Candidate
) -> tuple[ProbeOutputs, list[TokenizedItem]]:
    """Run a sealed graph on TEXTS in one padded batch. Return outputs and tokenized texts."""
    manifest, directory = result.manifest, result.directory
    items = list(tokenize_texts(directory, manifest.max_tokens, TEXTS))
    engine = open_engine(GraphSpec.of(directory, manifest, candidate), EncoderSettings())
    try:
        return engine.run(collate(items)).items, items
    finally:
        engine.close()


def test_embedding_model_has_graphs_for_both_devices(
    embedding_build: BuildResult, embedding_source: Path
) -> None:
    assert not embedding_build.already_built
    manifest = ArtifactManifest.read(embedding_build.directory)
    assert manifest.id == "local/embedder"
    assert manifest.tasks == (TaskName.FEATURE_EXTRACTION, TaskName.SENTENCE_SIMILARITY)
    assert (manifest.output_width, manifest.max_tokens) == (HIDDEN, POSITIONS)
    assert (manifest.pooling, manifest.normalize) == ("mean", True)
    assert manifest.source.revision == content_digest(embedding_source)
    assert (manifest.gate, manifest.scores, manifest.pruned) == (Gate(), {}, None)
    names = [c.name for c in manifest.candidates]
    assert names[-1] == "gpu-fp16"
    assert set(names[:-1]) <= {"cpu-int8", "cpu-int8-weights"}
    assert all(c.parity.cosine_mean >= manifest.gate.cosine_mean for c in manifest.candidates)
    graphs = {f"graphs/{name}.onnx" for name in names}
    assert set(manifest.files) == {"tokenizer.json", "reference.npz", *graphs}


def test_finished_build_leaves_only_the_version(embedding_build: BuildResult) -> None:
    store = store_path(embedding_build)
    assert {path.name for path in store.iterdir()} == {BUILDING_NAME, "local--embedder"}
    assert list((store / BUILDING_NAME).iterdir()) == []
    (entry,) = list_versions(store)
    assert entry.manifest == embedding_build.manifest
    assert entry.is_latest


def test_reference_outputs_are_sealed(embedding_build: BuildResult) -> None:
    reference = ReferenceOutputs.read(embedding_build.directory / "reference.npz")
    assert len(reference.items) == len(reference.outputs) >= 64
    assert {answer.shape for answer in reference.outputs} == {(HIDDEN,)}
    assert max(len(item.ids) for item in reference.items) == POSITIONS


@pytest.mark.parametrize("device", Device)
def test_sealed_graph_matches_checkpoint(
    embedding_build: BuildResult, embedding_source: Path, device: Device
) -> None:
    import torch
    from transformers import AutoModel

    candidate = embedding_build.manifest.candidate_for(device)
    assert candidate is not None
    answers, items = run_sealed_graph(embedding_build, candidate)
    model = AutoModel.from_pretrained(embedding_source).eval()
    with torch.inference_mode():
        hidden = [model(torch.from_numpy(i.ids.astype(np.int64))[None])[0][0] for i in items]
    expected = [h.mean(0).numpy() for h in hidden]
    assert float(cosines(answers, expected).min()) > 0.98
    # The graph does not normalize vectors; the server does.
    assert abs(np.linalg.norm(answers[0]) - np.linalg.norm(expected[0])) < 0.1
    assert abs(np.linalg.norm(answers[0]) - 1) > 0.1


def test_resumed_build_seals_the_graphs_that_it_accepts(
    embedding_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU without free memory rejects graphs that it later runs."""
    request = BuildRequest(
        ref=str(embedding_source), store=tmp_path, recipe=BOTH_DEVICES, budget=LITTLE
    )

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CandidateSearch, "select_graphs", lambda self: self.select_for(Device.CPU))
        patch.setattr(pipeline, "publish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            build(request, BuildProgress(io.StringIO()))
    resumed = build(request, BuildProgress(io.StringIO()))
    assert resumed.manifest.candidate_for(Device.GPU) is not None


def test_second_build_reuses_version_and_sets_latest(
    embedding_build: BuildResult, embedding_source: Path
) -> None:
    output = io.StringIO()
    inode = embedding_build.directory.stat().st_ino
    (embedding_build.directory.parent / LATEST_NAME).unlink()
    store = store_path(embedding_build)
    request = BuildRequest(
        ref=str(embedding_source), store=store, recipe=BOTH_DEVICES, budget=LITTLE
    )
    again = build(request, BuildProgress(output))
    assert again.already_built
    assert again.manifest == embedding_build.manifest
    assert again.directory.stat().st_ino == inode
    assert [line.split()[0] for line in output.getvalue().splitlines()] == ["resolve"]
    assert resolve_version(store, "local/embedder", LATEST_NAME) == again.manifest.version


def test_forced_build_says_how_a_server_gets_it(
    embedding_build: BuildResult,
    embedding_source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_result(embedding_build)
    assert "unload" not in capsys.readouterr().err
    store = shutil.copytree(store_path(embedding_build), tmp_path / "store")
    request = BuildRequest(
        ref=str(embedding_source), store=store, recipe=BOTH_DEVICES, budget=LITTLE, force=True
    )
    again = build(request, BuildProgress(io.StringIO()))
    print_result(again)
    name = f"local/embedder@{again.manifest.version}"
    assert f"hundredfold models unload {name}" in capsys.readouterr().err


def test_sealed_adapter_matches_peft(
    tmp_path: Path, embedding_source: Path, adapter_source: Path, progress: BuildProgress
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    request = BuildRequest(
        ref=str(embedding_source),
        store=tmp_path,
        id="tiny/mood",
        adapter=adapter_source,
        recipe=BuildRecipe(candidates=(CPU_FP32,)),
        budget=BuildBudget(tune_seconds=0),
    )
    result = build(request, progress)
    manifest = result.manifest
    assert manifest.tasks == (TaskName.TEXT_CLASSIFICATION,)
    assert (manifest.labels, manifest.problem_type, manifest.pooling) == (
        LABELS,
        "single_label",
        None,
    )
    assert manifest.source.adapter == "mood"
    assert manifest.source.adapter_revision == content_digest(adapter_source)

    answers, items = run_sealed_graph(result, manifest.candidates[0])
    base = AutoModelForSequenceClassification.from_pretrained(embedding_source, num_labels=3)
    model = PeftModel.from_pretrained(base, str(adapter_source)).eval()
    with torch.inference_mode():
        expected = [
            model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()
            for ids, _ in items
        ]
    assert max(abs(e).max() for e in expected) > 1
    np.testing.assert_allclose(np.stack(answers), np.stack(expected), atol=1e-4)


def test_adapter_without_an_id_does_not_replace_its_base(
    embedding_build: BuildResult, embedding_source: Path, adapter_source: Path
) -> None:
    store = store_path(embedding_build)
    request = BuildRequest(
        ref=str(embedding_source), store=store, adapter=adapter_source, recipe=SMALL, budget=LITTLE
    )
    with pytest.raises(BuildError, match="would answer for the model without it") as raised:
        build(request, BuildProgress(io.StringIO()))
    assert f"--adapter {adapter_source} --id ORGANIZATION/NAME" in raised.value.hint
    latest = resolve_version(store, embedding_build.manifest.id, LATEST_NAME)
    assert latest == embedding_build.manifest.version


def read_build_version(request: BuildRequest, data: str) -> str:
    """Return the version of a build with evaluation data `data`, which must be invalid.

    The build derives its version before it parses the data, and then fails quickly.
    """
    path = request.store.with_name(f"{request.store.name}.tsv")
    path.write_text(data, encoding="utf-8")
    budget = replace(request.budget, evaluation=path)
    with pytest.raises(BadEvaluationData):
        build(replace(request, budget=budget), BuildProgress(io.StringIO()))
    (log,) = (request.store / BUILDING_NAME).iterdir()
    return log.stem.rpartition("--")[2]


def test_version_depends_on_recipe_gate_adapter_and_data(
    tmp_path: Path, embedding_source: Path, adapter_source: Path
) -> None:
    base = BuildRequest(ref=str(embedding_source), store=tmp_path, recipe=SMALL, budget=LITTLE)
    strict = replace(SMALL, gate=Gate(cosine_mean=0.99))
    longer = BuildBudget(tune_seconds=7)
    requests = {
        "base": base,
        "recipe": replace(base, recipe=BOTH_DEVICES),
        "gate": replace(base, recipe=strict),
        "adapter": replace(base, adapter=adapter_source, id="tiny/mood"),
        "longer": replace(base, budget=longer, id="another/name"),
    }
    versions = {
        name: read_build_version(replace(request, store=tmp_path / name), "no examples")
        for name, request in requests.items()
    }
    # The model id and the tuning time do not change the artifact.
    assert versions.pop("longer") == versions["base"]
    versions["data"] = read_build_version(replace(base, store=tmp_path / "data"), "none either")
    assert len(set(versions.values())) == len(versions) == 5


def test_damaged_version_is_not_found(tmp_path: Path) -> None:
    directory = seal_tiny(tmp_path, "tiny/model")
    assert find_sealed(tmp_path, "tiny/model", directory.name) is not None
    graph = directory / GRAPH_NAME
    graph.write_bytes(graph.read_bytes()[:-1])
    assert find_sealed(tmp_path, "tiny/model", directory.name) is None


def test_source_with_other_revision_is_rejected(
    tmp_path: Path, embedding_source: Path, progress: BuildProgress
) -> None:
    request = BuildRequest(ref=str(embedding_source), store=tmp_path, revision="0" * 64)
    with pytest.raises(UnsafeSource, match="not the source that was pinned"):
        build(request, progress)


@pytest.mark.parametrize("invalid_id", ["../escape", "a/b/c", "with space", "a--b"])
def test_invalid_model_id_is_rejected(
    tmp_path: Path, embedding_source: Path, progress: BuildProgress, invalid_id: str
) -> None:
    with pytest.raises(BuildError, match="is not a model id"):
        build(BuildRequest(ref=str(embedding_source), store=tmp_path, id=invalid_id), progress)


def test_missing_data_is_rejected(
    tmp_path: Path, embedding_source: Path, progress: BuildProgress
) -> None:
    budget = replace(LITTLE, evaluation=tmp_path / "none.tsv")
    request = BuildRequest(ref=str(embedding_source), store=tmp_path, budget=budget)
    with pytest.raises(BuildError, match=r"none\.tsv` cannot be read: No such file"):
        build(request, progress)
