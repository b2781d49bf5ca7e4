"""A build from request to published version: what it is called, and when it is needed."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from build_artifacts.checkpoints.checkpoint import content_digest
from build_artifacts.console import BuildProgress
from build_artifacts.errors import BuildError, UnsafeSource
from build_artifacts.evaluation import BadEvaluationData
from build_artifacts.families.base import BuildBudget
from build_artifacts.inspection import list_versions
from build_artifacts.pipeline import (
    BuildRequest,
    BuildResult,
    build,
    find_sealed,
)
from build_artifacts.recipes import CPU_FP32, BuildRecipe
from build_artifacts.search.probes import tokenize_texts
from deployments.artifacts.manifest import ArtifactManifest, Candidate, Gate
from deployments.artifacts.store import BUILDING_NAME, LATEST_NAME, resolve_version
from deployments.artifacts.types import Device, TaskName
from deployments.batching.batches import collate
from deployments.config import EncoderSettings
from deployments.engines import GraphSpec, open_engine
from deployments.messages import TokenizedItem
from deployments.tuning.parity import ProbeOutputs, ReferenceOutputs, cosines
from tests.integration.compiler.conftest import BOTH_DEVICES, LABELS
from tests.support.artifacts import GRAPH_NAME, seal_tiny
from tests.support.builders import HIDDEN, POSITIONS
from tests.support.prepared_build import LITTLE, SMALL

TEXTS = ("the lovely river", "bad", "a train to the city and a long night " * 4)


def store_of(result: BuildResult) -> Path:
    return result.directory.parents[1]


def sealed_answers(
    result: BuildResult, candidate: Candidate
) -> tuple[ProbeOutputs, list[TokenizedItem]]:
    """What a sealed graph answers to TEXTS in one padded batch, and what it was asked."""
    manifest, directory = result.manifest, result.directory
    items = list(tokenize_texts(directory, manifest.max_tokens, TEXTS))
    engine = open_engine(GraphSpec.of(directory, manifest, candidate), EncoderSettings())
    try:
        return engine.run(collate(items)).items, items
    finally:
        engine.close()


def test_an_embedding_model_is_sealed_with_graphs_for_either_encoder(
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


def test_the_store_holds_the_version_and_nothing_of_the_build(embedding_build: BuildResult) -> None:
    store = store_of(embedding_build)
    assert {path.name for path in store.iterdir()} == {BUILDING_NAME, "local--embedder"}
    assert list((store / BUILDING_NAME).iterdir()) == []
    (entry,) = list_versions(store)
    assert entry.manifest == embedding_build.manifest
    assert entry.is_latest


def test_the_reference_of_a_host_to_come_is_sealed(embedding_build: BuildResult) -> None:
    reference = ReferenceOutputs.read(embedding_build.directory / "reference.npz")
    assert len(reference.items) == len(reference.outputs) >= 64
    assert {answer.shape for answer in reference.outputs} == {(HIDDEN,)}
    assert max(len(item.ids) for item in reference.items) == POSITIONS


@pytest.mark.parametrize("device", Device)
def test_what_was_sealed_answers_like_the_checkpoint(
    embedding_build: BuildResult, embedding_source: Path, device: Device
) -> None:
    import torch
    from transformers import AutoModel

    candidate = embedding_build.manifest.candidate_for(device)
    assert candidate is not None
    answers, items = sealed_answers(embedding_build, candidate)
    model = AutoModel.from_pretrained(embedding_source).eval()
    with torch.inference_mode():
        hidden = [model(torch.from_numpy(i.ids.astype(np.int64))[None])[0][0] for i in items]
    expected = [h.mean(0).numpy() for h in hidden]
    assert float(cosines(answers, expected).min()) > 0.98
    # Not normalised: that is the server's part.
    assert abs(np.linalg.norm(answers[0]) - np.linalg.norm(expected[0])) < 0.1
    assert abs(np.linalg.norm(answers[0]) - 1) > 0.1


def test_a_second_build_finds_the_first_and_points_to_it(
    embedding_build: BuildResult, embedding_source: Path
) -> None:
    told = io.StringIO()
    inode = embedding_build.directory.stat().st_ino
    (embedding_build.directory.parent / LATEST_NAME).unlink()
    store = store_of(embedding_build)
    request = BuildRequest(
        ref=str(embedding_source), store=store, recipe=BOTH_DEVICES, budget=LITTLE
    )
    again = build(request, BuildProgress(told))
    assert again.already_built
    assert again.manifest == embedding_build.manifest
    assert again.directory.stat().st_ino == inode
    assert [line.split()[0] for line in told.getvalue().splitlines()] == ["resolve"]
    assert resolve_version(store, "local/embedder", LATEST_NAME) == again.manifest.version


def test_a_merged_adapter_answers_like_peft(
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

    answers, items = sealed_answers(result, manifest.candidates[0])
    base = AutoModelForSequenceClassification.from_pretrained(embedding_source, num_labels=3)
    model = PeftModel.from_pretrained(base, str(adapter_source)).eval()
    with torch.inference_mode():
        expected = [
            model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()
            for ids, _ in items
        ]
    assert max(abs(e).max() for e in expected) > 1
    np.testing.assert_allclose(np.stack(answers), np.stack(expected), atol=1e-4)


def version_of(request: BuildRequest, data: str) -> str:
    """The version that `request` is built under, with `data` that end the build at once."""
    path = request.store.with_name(f"{request.store.name}.tsv")
    path.write_text(data, encoding="utf-8")
    effort = replace(request.budget, evaluation=path)
    with pytest.raises(BadEvaluationData):
        build(replace(request, budget=effort), BuildProgress(io.StringIO()))
    (log,) = (request.store / BUILDING_NAME).iterdir()
    return log.stem.rpartition("--")[2]


def test_another_recipe_gate_adapter_or_data_is_another_version(
    tmp_path: Path, embedding_source: Path, adapter_source: Path
) -> None:
    base = BuildRequest(ref=str(embedding_source), store=tmp_path, recipe=SMALL, budget=LITTLE)
    strict = replace(SMALL, gate=Gate(cosine_mean=0.99))
    longer = BuildBudget(tune_seconds=7)
    requests = {
        "base": base,
        "recipe": replace(base, recipe=BOTH_DEVICES),
        "gate": replace(base, recipe=strict),
        "adapter": replace(base, adapter=adapter_source),
        "longer": replace(base, budget=longer, id="another/name"),
    }
    versions = {
        name: version_of(replace(request, store=tmp_path / name), "no examples")
        for name, request in requests.items()
    }
    # What it is called and how long it is tuned change nothing that is served.
    assert versions.pop("longer") == versions["base"]
    versions["data"] = version_of(replace(base, store=tmp_path / "data"), "none either")
    assert len(set(versions.values())) == len(versions) == 5


def test_a_damaged_version_does_not_count_as_built(tmp_path: Path) -> None:
    directory = seal_tiny(tmp_path, "tiny/model")
    assert find_sealed(tmp_path, "tiny/model", directory.name) is not None
    graph = directory / GRAPH_NAME
    graph.write_bytes(graph.read_bytes()[:-1])
    assert find_sealed(tmp_path, "tiny/model", directory.name) is None


def test_a_source_that_is_not_the_pinned_one_is_refused(
    tmp_path: Path, embedding_source: Path, progress: BuildProgress
) -> None:
    request = BuildRequest(ref=str(embedding_source), store=tmp_path, revision="0" * 64)
    with pytest.raises(UnsafeSource, match="not the source that was pinned"):
        build(request, progress)


@pytest.mark.parametrize("bad", ["../escape", "a/b/c", "with space", "a--b"])
def test_an_id_that_is_no_id_is_refused_before_anything_is_built(
    tmp_path: Path, embedding_source: Path, progress: BuildProgress, bad: str
) -> None:
    with pytest.raises(BuildError, match="is not a model id"):
        build(BuildRequest(ref=str(embedding_source), store=tmp_path, id=bad), progress)


def test_data_that_is_not_there_is_refused_in_one_line(
    tmp_path: Path, embedding_source: Path, progress: BuildProgress
) -> None:
    effort = replace(LITTLE, evaluation=tmp_path / "none.tsv")
    request = BuildRequest(ref=str(embedding_source), store=tmp_path, budget=effort)
    with pytest.raises(BuildError, match=r"none\.tsv` cannot be read: No such file"):
        build(request, progress)
