"""Whole builds of sparse encoders: detection, the accuracy gate, labeled data and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from build_artifacts.errors import UnsupportedModel
from build_artifacts.pipeline import BuildRequest, build
from build_artifacts.progress import BuildProgress
from deployments.artifacts.manifest import REFERENCE_NAME, ArtifactManifest, Gate
from deployments.artifacts.types import Device, ModelHead, TaskName
from deployments.tuning.parity import ReferenceOutputs
from tests.integration.compiler.conftest import BOTH_DEVICES
from tests.support.checkpoint_metadata import read_checkpoint_metadata
from tests.support.prepared_build import LITTLE
from tests.support.tiny_encoders import tiny_checkpoint, tiny_tokenizer, write_json

PAIRS = "0\tgood\tthe river\n2\tgood film\tgreat film\n5\tthe city\tthe city\n"


@pytest.fixture(scope="module")
def splade(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "splade"
    return tiny_checkpoint(directory, head=ModelHead.SPARSE, layers=1)


def test_sparse_encoder_gets_accepted_graphs_for_both_devices(
    splade: Path, tmp_path: Path, progress: BuildProgress
) -> None:
    data = tmp_path / "pairs.tsv"
    data.write_text(PAIRS, encoding="utf-8")
    request = BuildRequest(
        ref=str(splade),
        store=tmp_path / "store",
        recipe=replace(BOTH_DEVICES, gate=Gate(metric_drop=200)),  # coarse on three pairs
        budget=replace(LITTLE, evaluation=data),
    )
    result = build(request, progress)
    manifest = ArtifactManifest.read(result.directory)
    assert manifest.tasks == (TaskName.SPARSE_EMBEDDINGS,)
    assert (manifest.head, manifest.similarity) == (ModelHead.SPARSE, "dot")
    assert {candidate.device for candidate in manifest.candidates} == set(Device)
    assert set(manifest.scores) == {"spearman"}
    for candidate in manifest.candidates:
        assert candidate.parity.cosine_worst >= manifest.gate.cosine_worst
        assert candidate.parity.batched_cosine_worst >= manifest.gate.batched_cosine_worst
    outputs = np.stack(ReferenceOutputs.read(result.directory / REFERENCE_NAME).outputs)
    assert outputs.shape[1] == manifest.output_width
    assert outputs.min() == 0
    assert np.mean(outputs > 0) < 0.5


def test_masked_language_model_becomes_splade_only_by_request(
    tmp_path: Path, progress: BuildProgress
) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", head=ModelHead.MASKS, layers=1)
    assert read_checkpoint_metadata(checkpoint).tasks == (TaskName.FILL_MASK,)
    assert read_checkpoint_metadata(checkpoint, TaskName.SPARSE_EMBEDDINGS).head is ModelHead.SPARSE


def test_model_without_the_head_of_a_masked_language_model_is_refused(
    tmp_path: Path, progress: BuildProgress
) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", labels=("NO", "YES"), layers=1)
    request = BuildRequest(
        ref=str(checkpoint), store=tmp_path / "store", task=TaskName.SPARSE_EMBEDDINGS
    )
    with pytest.raises(UnsupportedModel, match=r"has no weights for `cls\.predictions"):
        build(request, progress)


def test_decoder_is_refused(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    write_json(tmp_path / "config.json", config)
    with pytest.raises(UnsupportedModel, match="cannot be built as an encoder"):
        read_checkpoint_metadata(tmp_path, TaskName.SPARSE_EMBEDDINGS)


def test_texts_are_short_enough_for_the_scores_of_a_large_vocabulary(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {"model_max_length": 8_192})
    config = {"model_type": "bert", "vocab_size": 250_002, "max_position_embeddings": 8_192}
    write_json(tmp_path / "config.json", config)
    assert read_checkpoint_metadata(tmp_path, TaskName.SPARSE_EMBEDDINGS).max_tokens == 536
    assert read_checkpoint_metadata(tmp_path, TaskName.FILL_MASK).max_tokens == 8_192
