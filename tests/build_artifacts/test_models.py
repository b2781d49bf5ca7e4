from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from build_artifacts.adapter import read_adapter
from build_artifacts.checkpoint import Checkpoint
from build_artifacts.errors import UnsupportedModel
from build_artifacts.models import load_model
from build_artifacts.steps.merge import merge
from deployments.manifest import Source
from tests.build_artifacts.adapters import tiny_adapter
from tests.builders import tiny_checkpoint


def test_a_head_that_was_never_trained_is_refused(embedding_source: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no weights for `classifier") as caught:
        load_model(embedding_source, is_embedding=False, dtype="float32")
    assert "--adapter" in caught.value.hint


def test_a_checkpoint_without_a_pooler_is_whole_enough(
    tmp_path: Path, embedding_source: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    shutil.copytree(embedding_source, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    kept = {k: v for k, v in load_file(weights).items() if not k.startswith("pooler.")}
    assert len(kept) < len(load_file(weights))
    save_file(kept, weights, metadata={"format": "pt"})
    load_model(tmp_path / "model", is_embedding=True, dtype="float32")

    del kept["embeddings.LayerNorm.weight"]
    save_file(kept, weights, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"no weights for `embeddings\.LayerNorm"):
        load_model(tmp_path / "model", is_embedding=True, dtype="float32")


def pinned(directory: Path) -> Checkpoint:
    return Checkpoint(directory, Source(ref="here", revision="1"), "local/model")


def test_an_adapter_of_another_model_is_refused(tmp_path: Path, embedding_source: Path) -> None:
    other = tiny_checkpoint(tmp_path / "other", model_type="electra")
    adapter = read_adapter(
        tiny_adapter(tmp_path / "adapter", embedding_source, labels=("NO", "YES"))
    )
    with pytest.raises(UnsupportedModel, match="the adapter `adapter`"):
        merge(pinned(other), adapter, tmp_path / "merged")


def test_an_adapter_without_its_head_is_refused(tmp_path: Path, embedding_source: Path) -> None:
    from safetensors.numpy import load_file, save_file

    directory = tiny_adapter(tmp_path / "adapter", embedding_source, labels=("NO", "YES"))
    weights = directory / "adapter_model.safetensors"
    save_file({k: v for k, v in load_file(weights).items() if "lora_" in k}, weights)
    with pytest.raises(UnsupportedModel, match="has no weights for"):
        merge(pinned(embedding_source), read_adapter(directory), tmp_path / "merged")


def test_a_head_needs_labels_from_somewhere(tmp_path: Path, embedding_source: Path) -> None:
    directory = tiny_adapter(tmp_path / "adapter", embedding_source, labels=("NO", "YES"))
    (directory / "labels.json").unlink()
    with pytest.raises(UnsupportedModel, match="names the labels") as caught:
        merge(pinned(embedding_source), read_adapter(directory), tmp_path / "merged")
    assert "labels.json" in caught.value.hint
