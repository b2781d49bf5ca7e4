from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from build_artifacts.checkpoint import content_digest
from build_artifacts.errors import BuildError, GateFailed, UnsafeSource
from build_artifacts.pipeline import BuildRequest, BuildResult, build, sealed_already
from build_artifacts.progress import Progress
from build_artifacts.recipe import CPU_FP32, CPU_INT8, Gate, Recipe
from build_artifacts.steps.verify import cosines, encode_probes
from build_artifacts.workspace import BUILDING_NAME
from deployments.batching.collate import collate
from deployments.config import LaneSettings
from deployments.engines import open_engine
from deployments.manifest import ArtifactManifest, Device, TaskName
from tests.builders import HIDDEN, POSITIONS
from tests.sealed import GRAPH_NAME, seal_tiny

TEXTS = ("the lovely river", "bad", "a train to the city and a long night " * 4)


def store_of(result: BuildResult) -> Path:
    return result.directory.parents[1]


def test_an_embedding_model_is_sealed_with_a_graph_for_either_lane(
    embedding_build: BuildResult, embedding_source: Path
) -> None:
    manifest = ArtifactManifest.read(embedding_build.directory)
    assert manifest.id == "local/embedder"
    assert manifest.tasks == (TaskName.FEATURE_EXTRACTION, TaskName.SENTENCE_SIMILARITY)
    assert (manifest.width, manifest.max_tokens) == (HIDDEN, POSITIONS)
    assert (manifest.pooling, manifest.normalize) == ("mean", True)
    assert manifest.source.revision == content_digest(embedding_source)
    assert [c.name for c in manifest.candidates] == ["cpu-int8", "gpu-fp16"]
    assert all(c.parity.cosine_mean > 0.985 for c in manifest.candidates)
    assert set(manifest.files) == {
        "tokenizer.json",
        "graphs/cpu-int8.onnx",
        "graphs/gpu-fp16.onnx",
    }


@pytest.mark.parametrize("device", Device)
def test_what_was_sealed_answers_like_the_checkpoint(
    embedding_build: BuildResult, embedding_source: Path, device: Device
) -> None:
    import torch
    from transformers import AutoModel

    manifest, directory = embedding_build.manifest, embedding_build.directory
    candidate = manifest.candidate_for(device)
    assert candidate is not None
    engine = open_engine(directory, candidate, LaneSettings())
    probes = encode_probes(directory, manifest.max_tokens, TEXTS)
    rows = engine.run(collate(probes)).rows
    model = AutoModel.from_pretrained(embedding_source).eval()
    with torch.inference_mode():
        hidden = [model(torch.from_numpy(p.astype(np.int64))[None])[0][0] for p in probes]
    expected = np.stack([h.mean(0).numpy() for h in hidden])
    assert cosines(rows, expected).min() > 0.98
    # Not normalised: that is the server's part.
    assert abs(np.linalg.norm(rows[0]) - np.linalg.norm(expected[0])) < 0.1
    assert abs(np.linalg.norm(rows[0]) - 1) > 0.1


def test_a_second_build_finds_the_first(
    embedding_build: BuildResult, embedding_source: Path, progress: Progress
) -> None:
    inode = embedding_build.directory.stat().st_ino
    again = build(
        BuildRequest(ref=str(embedding_source), store=store_of(embedding_build)), progress
    )
    assert again.was_there
    assert again.manifest == embedding_build.manifest
    assert again.directory.stat().st_ino == inode


def test_a_merged_adapter_answers_like_peft(
    adapter_build: BuildResult, embedding_source: Path, adapter_source: Path
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    manifest, directory = adapter_build.manifest, adapter_build.directory
    assert manifest.tasks == (TaskName.TEXT_CLASSIFICATION,)
    assert manifest.labels == ("SAD", "GLAD", "MAD")
    assert manifest.problem == "single_label"
    assert manifest.pooling is None
    assert manifest.source.adapter == "mood"
    assert manifest.source.adapter_revision == content_digest(adapter_source)

    base = AutoModelForSequenceClassification.from_pretrained(embedding_source, num_labels=3)
    model = PeftModel.from_pretrained(base, str(adapter_source)).eval()
    probes = encode_probes(directory, manifest.max_tokens, TEXTS)
    with torch.inference_mode():
        expected = [
            model(input_ids=torch.from_numpy(p.astype(np.int64))[None]).logits[0] for p in probes
        ]
    candidate = manifest.candidate_for(Device.GPU)
    assert candidate is not None
    engine = open_engine(directory, candidate, LaneSettings())
    np.testing.assert_allclose(
        engine.run(collate(probes)).rows, torch.stack(expected).numpy(), atol=0.05
    )


def test_a_graph_that_misses_the_gate_is_replaced_by_the_next(
    tmp_path: Path, embedding_source: Path
) -> None:
    told = io.StringIO()
    # Stricter than int8 can be, not than fp32 is.
    strict = Recipe(lanes=((CPU_INT8, CPU_FP32),), gate=Gate(cosine_mean=0.999999))
    result = build(
        BuildRequest(ref=str(embedding_source), store=tmp_path), Progress(told), recipe=strict
    )
    assert [c.name for c in result.manifest.candidates] == ["cpu-fp32"]
    assert "cpu-int8 against fp32 torch: left out, mean cosine" in told.getvalue()


def test_a_damaged_version_does_not_count_as_built(tmp_path: Path) -> None:
    directory = seal_tiny(tmp_path, "tiny/model")
    assert sealed_already(tmp_path, "tiny/model", directory.name) is not None
    graph = directory / GRAPH_NAME
    graph.write_bytes(graph.read_bytes()[:-1])
    assert sealed_already(tmp_path, "tiny/model", directory.name) is None


def test_no_graph_for_the_cpu_is_an_error(
    tmp_path: Path, embedding_source: Path, progress: Progress
) -> None:
    impossible = Recipe(lanes=((CPU_FP32,),), gate=Gate(cosine_mean=1.1))
    with pytest.raises(GateFailed):
        build(BuildRequest(ref=str(embedding_source), store=tmp_path), progress, recipe=impossible)
    assert [p.name for p in tmp_path.iterdir()] == [BUILDING_NAME]


def test_a_source_that_is_not_the_pinned_one_is_refused(
    tmp_path: Path, embedding_source: Path, progress: Progress
) -> None:
    request = BuildRequest(ref=str(embedding_source), store=tmp_path, revision="0" * 64)
    with pytest.raises(UnsafeSource, match="not the source that was pinned"):
        build(request, progress)


@pytest.mark.parametrize("bad", ["../escape", "a/b/c", "with space", "a--b"])
def test_an_id_that_is_no_id_is_refused_before_anything_is_built(
    tmp_path: Path, embedding_source: Path, progress: Progress, bad: str
) -> None:
    with pytest.raises(BuildError, match="is not a model id"):
        build(BuildRequest(ref=str(embedding_source), store=tmp_path, id=bad), progress)
