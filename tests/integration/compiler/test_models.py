from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from build_artifacts.checkpoints.adapter import read_adapter
from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.models import LOADERS, load_model
from build_artifacts.checkpoints.tasks import select_tasks
from build_artifacts.errors import UnsupportedModel
from build_artifacts.families import read_metadata
from build_artifacts.steps.merge import merge
from deployments.artifacts.manifest import ModelSource
from deployments.artifacts.types import ModelHead
from tests.support.adapters import tiny_adapter
from tests.support.tiny_encoders import tiny_checkpoint


def test_untrained_head_is_rejected(embedding_source: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no weights for `classifier") as caught:
        load_model(embedding_source, head=ModelHead.LABELS, dtype="float32")
    assert "--adapter" in caught.value.hint


def test_missing_pooler_is_accepted_for_vectors(tmp_path: Path, embedding_source: Path) -> None:
    from safetensors.numpy import load_file, save_file

    shutil.copytree(embedding_source, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    kept = {k: v for k, v in load_file(weights).items() if not k.startswith("pooler.")}
    assert len(kept) < len(load_file(weights))
    save_file(kept, weights, metadata={"format": "pt"})
    load_model(tmp_path / "model", head=ModelHead.VECTOR, dtype="float32")

    del kept["embeddings.LayerNorm.weight"]
    save_file(kept, weights, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"no weights for `embeddings\.LayerNorm"):
        load_model(tmp_path / "model", head=ModelHead.VECTOR, dtype="float32")


def test_classifier_without_pooler_is_rejected(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    source = tiny_checkpoint(tmp_path, labels=("NO", "YES"), layers=1)
    weights = source / "model.safetensors"
    kept = {k: v for k, v in load_file(weights).items() if "pooler." not in k}
    save_file(kept, weights, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"no weights for `bert\.pooler"):
        load_model(source, head=ModelHead.LABELS, dtype="float32")


def test_weights_of_other_head_are_rejected(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path, head=ModelHead.SPAN, layers=1)
    load_model(source, head=ModelHead.SPAN, dtype="float32")
    with pytest.raises(UnsupportedModel, match="no weights for `classifier"):
        load_model(source, head=ModelHead.TOKENS, dtype="float32")


@pytest.mark.parametrize(
    ("head", "labels", "typed"),
    [
        (ModelHead.SPAN, (), True),
        (ModelHead.SPAN, (), False),
        (ModelHead.TOKENS, ("O", "NAME"), True),
        (ModelHead.TOKENS, ("O", "NAME"), False),
    ],
)
def test_merged_adapter_matches_peft(
    head: ModelHead, labels: tuple[str, ...], typed: bool, tmp_path: Path, embedding_source: Path
) -> None:
    import torch
    import transformers
    from peft import PeftModel

    directory = tiny_adapter(
        tmp_path / "adapter", embedding_source, head=head, labels=labels, typed=typed
    )
    adapter = read_adapter(directory)
    merge(pinned(embedding_source), adapter, tmp_path / "merged")
    merged = pinned(tmp_path / "merged")
    tasks = select_tasks(merged, None, None)
    assert tasks == (adapter.task,)
    assert read_metadata(merged, tasks).labels == labels

    named = {"num_labels": len(labels)} if labels else {}
    base = getattr(transformers, LOADERS[head]).from_pretrained(embedding_source, **named)
    theirs = PeftModel.from_pretrained(base, str(directory)).eval()
    ours = load_model(merged.weights, head=head, dtype="float32")
    ids = torch.arange(5, 25)[None]
    with torch.inference_mode():
        for mine, due in zip(ours(ids).to_tuple(), theirs(ids).to_tuple(), strict=True):
            torch.testing.assert_close(mine, due, atol=1e-4, rtol=1e-4)


def pinned(directory: Path) -> Checkpoint:
    return Checkpoint(directory, ModelSource(ref="here", revision="1"), "local/model")


def test_adapter_of_other_model_is_rejected(tmp_path: Path, embedding_source: Path) -> None:
    other = tiny_checkpoint(tmp_path / "other", model_type="electra")
    adapter = read_adapter(
        tiny_adapter(tmp_path / "adapter", embedding_source, labels=("NO", "YES"))
    )
    with pytest.raises(UnsupportedModel, match="the adapter `adapter`"):
        merge(pinned(other), adapter, tmp_path / "merged")


def test_adapter_without_head_is_rejected(tmp_path: Path, embedding_source: Path) -> None:
    from safetensors.numpy import load_file, save_file

    directory = tiny_adapter(tmp_path / "adapter", embedding_source, labels=("NO", "YES"))
    weights = directory / "adapter_model.safetensors"
    save_file({k: v for k, v in load_file(weights).items() if "lora_" in k}, weights)
    with pytest.raises(UnsupportedModel, match="has no weights for"):
        merge(pinned(embedding_source), read_adapter(directory), tmp_path / "merged")


def test_head_without_labels_is_rejected(tmp_path: Path, embedding_source: Path) -> None:
    directory = tiny_adapter(tmp_path / "adapter", embedding_source, labels=("NO", "YES"))
    (directory / "labels.json").unlink()
    with pytest.raises(UnsupportedModel, match="defines labels") as caught:
        merge(pinned(embedding_source), read_adapter(directory), tmp_path / "merged")
    assert "labels.json" in caught.value.hint
