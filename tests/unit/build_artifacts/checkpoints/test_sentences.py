"""Configs of embedding models, read as sentence-transformers reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_artifacts.checkpoints.checkpoint import Checkpoint
from build_artifacts.checkpoints.sentences import (
    EmbeddingConfig,
    read_embedding_config,
    read_max_seq_length,
)
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.manifest import ModelSource
from tests.support.tiny_encoders import HIDDEN, tiny_tokenizer, write_json, write_pooling

OTHER_NAMES = ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")


def read_config(directory: Path, **settings: object) -> EmbeddingConfig:
    """Read the config of a model whose config_sentence_transformers.json has `settings`."""
    write_json(directory / "config_sentence_transformers.json", settings)
    if not (directory / "modules.json").exists():
        write_pooling(directory, normalize=False)
    checkpoint = Checkpoint(directory, ModelSource(ref="here", revision="1"), "local/model")
    return read_embedding_config(checkpoint, HIDDEN)


def read_pooling(directory: Path, **settings: object) -> str:
    write_pooling(directory)
    settings = {"word_embedding_dimension": HIDDEN} | settings
    write_json(directory / "1_Pooling" / "config.json", settings)
    return read_config(directory).pooling


@pytest.mark.parametrize(
    ("settings", "pooling"),
    [
        ({}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["mean"]}, "mean"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
        ({"pooling_mode": "cls", "pooling_mode_mean_tokens": True}, "cls"),
        ({"pooling_mode": None, "pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False}, "mean"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "max"}, "max"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, "mean_sqrt_len"),
        ({"pooling_mode": "weightedmean"}, "weighted_mean"),
        ({"pooling_mode_weightedmean_tokens": True}, "weighted_mean"),
    ],
)
def test_names_replace_flags_and_the_mean_is_the_default(
    tmp_path: Path, settings: dict[str, object], pooling: str
) -> None:
    assert read_pooling(tmp_path, **settings) == pooling


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"pooling_mode": ["cls", "mean"]}, "pooling by cls and mean"),
        ({"pooling_mode": ["mean", "mean"]}, "pooling by mean and mean"),
        ({"pooling_mode": []}, "pooling by nothing"),
        ({"pooling_mode": "median"}, "pooling by median"),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            "pooling by cls_token and mean_tokens",
        ),
        ({"pooling_mode_attention": True}, "pooling by attention"),
    ],
)
def test_pooling_that_is_not_supported_is_named(
    tmp_path: Path, settings: dict[str, object], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        read_pooling(tmp_path, **settings)


def test_prompt_of_null_is_empty(tmp_path: Path) -> None:
    prompts = {"query": None, "document": "text: "}
    config = read_config(tmp_path, prompts=prompts, default_prompt_name="query")
    assert config.prompts == (("query", ""), ("document", "text: "))
    assert config.default_prompt == "query"


def test_prompts_of_every_model_need_no_text(tmp_path: Path) -> None:
    assert read_config(tmp_path, prompts={}, default_prompt_name="query").default_prompt is None


def test_default_prompt_that_does_not_exist_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="not define its default prompt `search`"):
        read_config(tmp_path, prompts={"query": "Q: "}, default_prompt_name="search")


def test_empty_prompts_may_be_left_out_of_the_pooling(tmp_path: Path) -> None:
    write_pooling(tmp_path)
    pooling = {"pooling_mode": "mean", "include_prompt": False}
    write_json(tmp_path / "1_Pooling" / "config.json", pooling)
    assert read_config(tmp_path, prompts={"query": "", "document": None}).pooling == "mean"
    with pytest.raises(UnsupportedModel, match="`include_prompt: false`"):
        read_config(tmp_path, prompts={"query": "Q: "})


@pytest.mark.parametrize(
    ("settings", "similarity"),
    [
        ({}, "cosine"),
        ({"similarity_fn_name": None}, "cosine"),
        ({"similarity_fn_name": "cosine"}, "cosine"),
        ({"similarity_fn_name": "dot"}, "dot"),
    ],
)
def test_similarity_is_the_stated_one_or_the_cosine(
    tmp_path: Path, settings: dict[str, object], similarity: str
) -> None:
    assert read_config(tmp_path, **settings).similarity == similarity


def test_dot_product_of_normalized_vectors_is_their_cosine(tmp_path: Path) -> None:
    write_pooling(tmp_path, normalize=True)
    assert read_config(tmp_path, similarity_fn_name="dot").similarity == "cosine"


@pytest.mark.parametrize("name", ["euclidean", "manhattan"])
def test_distances_are_rejected_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"the similarity `{name}` is not supported"):
        read_config(tmp_path, similarity_fn_name=name)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_config_named_after_another_architecture_is_read(tmp_path: Path, name: str) -> None:
    write_json(tmp_path / f"sentence_{name}_config.json", {"max_seq_length": 128})
    assert read_max_seq_length(tmp_path) == 128


def test_truncation_of_vectors_is_their_default(tmp_path: Path) -> None:
    assert read_config(tmp_path).dimensions is None
    assert read_config(tmp_path, truncate_dim=None).dimensions is None
    assert read_config(tmp_path, truncate_dim=16).dimensions == 16
    with pytest.raises(UnsupportedModel, match="`truncate_dim` is 0"):
        read_config(tmp_path, truncate_dim=0)


def test_dot_product_of_vectors_that_are_truncated_after_normalization_is_kept(
    tmp_path: Path,
) -> None:
    write_pooling(tmp_path, normalize=True)
    for dimensions, similarity in ((HIDDEN - 1, "dot"), (HIDDEN, "cosine")):
        config = read_config(tmp_path, truncate_dim=dimensions, similarity_fn_name="dot")
        assert config.similarity == similarity


@pytest.mark.parametrize("name", ["module_input_name", "module_output_name"])
def test_normalization_of_other_vectors_is_rejected(tmp_path: Path, name: str) -> None:
    write_pooling(tmp_path, normalize=True)
    write_json(tmp_path / "2_Normalize" / "config.json", {name: "sentence_embedding"})
    assert read_config(tmp_path).normalize
    write_json(tmp_path / "2_Normalize" / "config.json", {name: "token_embeddings"})
    with pytest.raises(UnsupportedModel, match=r"`2_Normalize` .* `token_embeddings` instead"):
        read_config(tmp_path)


LAST_STATE = {"method": "forward", "method_output_name": "last_hidden_state"}


def test_token_vectors_are_the_last_hidden_state(tmp_path: Path) -> None:
    settings = {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": LAST_STATE},
        "module_output_name": "token_embeddings",
        "processing_kwargs": {},
        "max_seq_length": 8,
    }
    write_json(tmp_path / "sentence_bert_config.json", settings)
    assert read_max_seq_length(tmp_path) == 8


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"transformer_task": "fill-mask"}, "transformer_task"),
        ({"module_output_name": "sentence_embedding"}, "module_output_name"),
        (
            {"modality_config": {"text": LAST_STATE | {"method_output_name": "pooler_output"}}},
            "modality_config.text.method_output_name",
        ),
        (
            {"modality_config": {"text": LAST_STATE | {"method": "get_text_features"}}},
            "modality_config.text.method",
        ),
        (
            {"modality_config": {"text": LAST_STATE, "message": LAST_STATE}},
            "modality_config.message",
        ),
    ],
)
def test_other_outputs_than_token_vectors_are_rejected(
    tmp_path: Path, settings: dict[str, object], name: str
) -> None:
    write_json(tmp_path / "sentence_bert_config.json", settings)
    with pytest.raises(UnsupportedModel, match=f"`{name}` of the Transformer module is"):
        read_max_seq_length(tmp_path)


@pytest.mark.parametrize("part", ["text", "common"])
def test_arguments_of_the_tokenizer_call_are_rejected(tmp_path: Path, part: str) -> None:
    arguments = {"max_length": 16, "truncation": True}
    write_json(tmp_path / "sentence_bert_config.json", {"processing_kwargs": {part: arguments}})
    with pytest.raises(UnsupportedModel, match=f"`max_length` in its `processing_kwargs.{part}`"):
        read_max_seq_length(tmp_path)


@pytest.mark.parametrize(
    "key",
    [
        "config_args",
        "model_args",
        "tokenizer_args",
        "config_kwargs",
        "model_kwargs",
        "processor_kwargs",
    ],
)
def test_arguments_that_change_outputs_are_rejected(tmp_path: Path, key: str) -> None:
    path = tmp_path / "sentence_bert_config.json"
    write_json(path, {"max_seq_length": 8, key: {"trust_remote_code": True, "dtype": "float16"}})
    assert read_max_seq_length(tmp_path) == 8
    write_json(path, {key: {"trust_remote_code": True, "is_causal": False}})
    with pytest.raises(UnsupportedModel, match=f"`is_causal` in its `{key}`"):
        read_max_seq_length(tmp_path)
    write_json(path, {key: True})
    with pytest.raises(UnsupportedModel, match=f"`{key}` of the Transformer module"):
        read_max_seq_length(tmp_path)


def test_arguments_about_loading_and_padding_are_accepted(tmp_path: Path) -> None:
    arguments = {
        "model_args": {"use_safetensors": True, "device_map": "auto", "revision": "main"},
        "tokenizer_args": {"use_fast": True, "padding_side": "left"},
    }
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 8, **arguments})
    assert read_max_seq_length(tmp_path) == 8


def test_first_config_with_content_counts(tmp_path: Path) -> None:
    assert read_max_seq_length(tmp_path) is None
    write_json(tmp_path / "sentence_bert_config.json", {})
    write_json(tmp_path / "sentence_albert_config.json", {"max_seq_length": 64})
    assert read_max_seq_length(tmp_path) == 64
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": None})
    assert read_max_seq_length(tmp_path) is None


def test_lowercasing_in_a_config_of_another_name_requires_it_of_the_tokenizer(
    tmp_path: Path,
) -> None:
    tiny_tokenizer(tmp_path)
    write_json(tmp_path / "sentence_roberta_config.json", {"do_lower_case": True})
    assert read_max_seq_length(tmp_path) is None
    tokenizer = tmp_path / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8")
    tokenizer.write_text(text.replace('"lowercase": true', '"lowercase": false'), encoding="utf-8")
    with pytest.raises(UnsupportedModel, match="`do_lower_case`"):
        read_max_seq_length(tmp_path)
