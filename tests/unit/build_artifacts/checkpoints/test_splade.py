"""Configuration files of sparse encoders."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_artifacts.checkpoints.checkpoint import Checkpoint, check_modules, is_splade_model
from build_artifacts.checkpoints.splade import SparseConfig, SpladePooling, read_sparse_config
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.manifest import ModelSource
from tests.support.tiny_encoders import write_json, write_pooling, write_splade

MASKED_LM = {
    "transformer_task": "fill-mask",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "module_output_name": "token_embeddings",
}


def read_config(directory: Path) -> SparseConfig:
    source = ModelSource(ref="here", revision="1")
    check_modules(directory, sparse=True)
    return read_sparse_config(Checkpoint(directory, source, "local/model"))


def test_pooling_comes_from_the_module(tmp_path: Path) -> None:
    write_splade(tmp_path, pooling_strategy="sum", activation_function="log1p_relu")
    assert read_config(tmp_path).pooling == SpladePooling("sum", "log1p_relu")
    write_splade(tmp_path)
    assert read_config(tmp_path).pooling == SpladePooling("max", "relu")


def test_masked_language_model_gets_the_pooling_of_splade_v2(tmp_path: Path) -> None:
    assert not is_splade_model(tmp_path)
    assert read_config(tmp_path) == SparseConfig(SpladePooling("max", "relu"))


def test_length_and_prompts_come_from_sentence_transformers(tmp_path: Path) -> None:
    write_splade(tmp_path)
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 256})
    settings = {"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": "query"}
    write_json(tmp_path / "config_sentence_transformers.json", settings)
    config = read_config(tmp_path)
    assert config.max_seq_length == 256
    assert dict(config.prompts) == {"query": "q: ", "document": ""}
    assert config.default_prompt == "query"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"pooling_strategy": "mean"}, "`pooling_strategy` of the SpladePooling module is `mean`"),
        ({"activation_function": "gelu"}, "`activation_function` .* is `gelu`"),
        ({"activation_function": ["relu"]}, r"`activation_function` .* is `\['relu'\]`"),
    ],
)
def test_other_poolings_are_rejected(
    tmp_path: Path, settings: dict[str, object], reason: str
) -> None:
    write_splade(tmp_path, **settings)
    with pytest.raises(UnsupportedModel, match=reason):
        read_config(tmp_path)


def test_transformer_module_must_return_the_logits_of_a_masked_language_model(
    tmp_path: Path,
) -> None:
    write_splade(tmp_path, transformer="Transformer")
    with pytest.raises(UnsupportedModel, match="states no `transformer_task`"):
        read_config(tmp_path)
    path = tmp_path / "sentence_bert_config.json"
    write_json(path, {"transformer_task": "feature-extraction"})
    with pytest.raises(UnsupportedModel, match="is `feature-extraction`; the build reads `logits`"):
        read_config(tmp_path)
    write_json(path, MASKED_LM | {"max_seq_length": 8})
    assert read_config(tmp_path).max_seq_length == 8


@pytest.mark.parametrize(
    "kinds",
    [
        ("MLMTransformer", "SpladePooling", "Normalize"),
        ("SparseStaticEmbedding", "SpladePooling"),
        ("SpladePooling",),
    ],
)
def test_other_modules_beside_the_pooling_are_rejected(
    tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    types = [f"sentence_transformers.sparse_encoder.models.{kind}" for kind in kinds]
    write_json(tmp_path / "modules.json", [{"type": kind, "path": ""} for kind in types])
    assert is_splade_model(tmp_path)
    reason = f"modules {', '.join(kinds)}, which are not"
    with pytest.raises(UnsupportedModel, match=reason) as info:
        read_config(tmp_path)
    assert "MLMTransformer, SpladePooling" in str(info.value.hint)


def test_modules_of_an_embedding_model_are_not_those_of_a_sparse_encoder(tmp_path: Path) -> None:
    write_pooling(tmp_path)
    assert not is_splade_model(tmp_path)
    with pytest.raises(UnsupportedModel, match="Transformer, Pooling, Normalize, which are not"):
        read_config(tmp_path)
    write_splade(tmp_path)
    with pytest.raises(UnsupportedModel, match="unsupported module `MLMTransformer`"):
        check_modules(tmp_path, sparse=False)
