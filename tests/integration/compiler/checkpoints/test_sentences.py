"""Metadata of sentence-transformers models, read from their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_artifacts.checkpoints.checkpoint import copy_without_weights
from build_artifacts.errors import UnsafeSource, UnsupportedModel
from deployments.artifacts.types import TaskName
from tests.support.checkpoint_metadata import read_checkpoint_metadata
from tests.support.tiny_encoders import (
    HIDDEN,
    tiny_checkpoint,
    write_dense,
    write_json,
    write_pooling,
)

EMBEDDER = {"model_type": "bert", "architectures": ["BertModel"]}


def embedder_with_dense(directory: Path, **settings: object) -> Path:
    """Write the files of an embedding model of hidden size 32 with a Dense module."""
    config = EMBEDDER | {"hidden_size": HIDDEN}
    write_json(directory / "config.json", config)
    write_pooling(directory)
    write_dense(directory, "2_Dense", **{"output_width": 24} | settings)
    return directory


def test_width_of_a_dense_module_is_that_of_the_vectors(tmp_path: Path) -> None:
    metadata = read_checkpoint_metadata(embedder_with_dense(tmp_path))
    assert (metadata.output_width, metadata.token_width) == (24, HIDDEN)
    assert [layer.activation for layer in metadata.projection] == ["Tanh"]


@pytest.mark.parametrize(("dimensions", "default"), [(16, 16), (24, None), (99, None)])
def test_default_dimensions_are_below_the_width_of_the_vectors(
    tmp_path: Path, dimensions: int, default: int | None
) -> None:
    embedder_with_dense(tmp_path)
    write_json(tmp_path / "config_sentence_transformers.json", {"truncate_dim": dimensions})
    assert read_checkpoint_metadata(tmp_path).default_dimensions == default


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"activation_function": "torch.nn.modules.activation.Hardswish"}, r"`2_Dense` .* activ"),
        ({"activation_function": "os.system.Tanh"}, "unsupported activation `os.system.Tanh`"),
        ({"activation_function": 5}, "`activation_function` is not a string"),
        ({"input_width": 31}, r"shape \[24, 31\] does not fit 32 values"),
        ({"module_input_name": "token_embeddings"}, "`2_Dense` reads `token_embeddings`"),
        ({"module_output_name": "token_embeddings"}, "`2_Dense` writes `token_embeddings`"),
        ({"use_residual": True}, r"`2_Dense` adds its input .* \(`use_residual`\)"),
    ],
)
def test_dense_module_that_cannot_be_built_is_rejected(
    tmp_path: Path, settings: dict[str, object], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        read_checkpoint_metadata(embedder_with_dense(tmp_path, **settings))


def test_arguments_of_a_cross_encoder_that_change_outputs_are_rejected(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, labels=("SCORE",))
    write_json(checkpoint / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})
    write_json(checkpoint / "tokenizer_config.json", {"model_max_length": 64})
    assert read_checkpoint_metadata(checkpoint).max_tokens == 64
    arguments = {"model_max_length": 20}
    write_json(checkpoint / "sentence_bert_config.json", {"processor_kwargs": arguments})
    with pytest.raises(UnsupportedModel, match="`model_max_length` in its `processor_kwargs`"):
        read_checkpoint_metadata(checkpoint)


def test_dense_module_with_pickled_weights_only_is_rejected(tmp_path: Path) -> None:
    dense = embedder_with_dense(tmp_path) / "2_Dense"
    (dense / "model.safetensors").rename(dense / "pytorch_model.bin")
    with pytest.raises(UnsafeSource, match=r"2_Dense` has pickled weights only"):
        read_checkpoint_metadata(tmp_path)


@pytest.mark.parametrize(
    ("kinds", "reason"),
    [
        (["Transformer", "Pooling", "LayerNorm"], "unsupported module `LayerNorm`"),
        (["Transformer", "Pooling", "SparseAutoEncoder"], "unsupported module `SparseAuto"),
        (["SparseStaticEmbedding"], "unsupported module `SparseStaticEmbedding`"),
        (["Router"], "unsupported module `Router`"),
        (["Transformer", "Pooling", "Normalize", "Dense"], "unsupported order Transformer, Po"),
        (["Pooling", "Normalize"], "has the modules Pooling, Normalize; one Transformer"),
        (["Transformer", "Transformer", "Pooling"], "Transformer, Pooling; one Transformer and"),
        (["Transformer", "Pooling", "Pooling"], "Pooling, Pooling; one Transformer and at most"),
    ],
)
def test_modules_that_cannot_be_built_are_rejected(
    tmp_path: Path, kinds: list[str], reason: str
) -> None:
    embedder_with_dense(tmp_path)
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense"}
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": paths.get(kind, "x")}
        for kind in kinds
    ]
    write_json(tmp_path / "modules.json", modules)
    with pytest.raises(UnsupportedModel, match=reason):
        read_checkpoint_metadata(tmp_path)


@pytest.mark.parametrize("model_type", ["model2vec", "clip"])
def test_modules_are_checked_before_the_config(tmp_path: Path, model_type: str) -> None:
    write_json(tmp_path / "config.json", {"model_type": model_type})
    modules = [{"type": "sentence_transformers.models.StaticEmbedding", "path": "."}]
    write_json(tmp_path / "modules.json", modules)
    with pytest.raises(UnsupportedModel, match="unsupported module `StaticEmbedding`"):
        read_checkpoint_metadata(tmp_path)


@pytest.mark.parametrize(
    ("max_seq_length", "max_tokens"),
    [(16, 16), (48, 48), (100, 64), (None, 32), (0, 32)],
    ids=["smaller", "larger", "more than the positions", "null", "not a limit"],
)
def test_max_seq_length_replaces_the_limit_of_the_tokenizer(
    tmp_path: Path, max_seq_length: int | None, max_tokens: int
) -> None:
    write_json(tmp_path / "config.json", EMBEDDER | {"max_position_embeddings": 64})
    write_json(tmp_path / "tokenizer_config.json", {"model_max_length": 32})
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": max_seq_length})
    write_pooling(tmp_path)
    assert read_checkpoint_metadata(tmp_path).max_tokens == max_tokens


def cross_encoder(directory: Path, **settings: object) -> Path:
    labels = {"id2label": {"0": "LABEL_0"}, "sentence_transformers": {"activation_fn": "none"}}
    write_json(
        directory / "config.json",
        {"model_type": "bert", "architectures": ["BertForSequenceClassification"]} | labels,
    )
    write_json(directory / "config_sentence_transformers.json", settings)
    return directory


def test_cross_encoder_with_a_default_prompt_is_rejected(tmp_path: Path) -> None:
    cross_encoder(tmp_path, prompts={"web": "Rank: "}, default_prompt_name="web")
    with pytest.raises(UnsupportedModel, match="the default prompt `web`") as caught:
        read_checkpoint_metadata(tmp_path)
    assert "`default_prompt_name`" in caught.value.hint


@pytest.mark.parametrize("text", ["", None])
def test_cross_encoder_with_an_empty_prompt_is_accepted(tmp_path: Path, text: str | None) -> None:
    prompts = {"web": text, "other": "Other: "}
    cross_encoder(tmp_path, prompts=prompts, default_prompt_name="web")
    assert read_checkpoint_metadata(tmp_path).tasks[0] == TaskName.TEXT_RANKING


def test_copy_keeps_weights_of_modules(tmp_path: Path) -> None:
    source = embedder_with_dense(tmp_path / "source")
    (source / "model.safetensors").write_bytes(b"weights of the encoder")
    copy_without_weights(source, tmp_path / "copy", weights=source)
    copied = {path.relative_to(tmp_path / "copy") for path in tmp_path.glob("copy/**/*.*")}
    assert Path("2_Dense/model.safetensors") in copied
    assert Path("model.safetensors") not in copied
