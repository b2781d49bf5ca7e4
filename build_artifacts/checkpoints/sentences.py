"""Configuration files of sentence-transformers: embedding models and cross-encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from build_artifacts.checkpoints.checkpoint import (
    CONFIG_NAME,
    MODULES_NAME,
    Checkpoint,
    Json,
    read_field,
    read_modules,
    read_object,
)
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.manifest import TOKENIZER_NAME

Pooling = Literal["mean", "cls", "last"]
SENTENCE_CONFIG_NAME = "config_sentence_transformers.json"

# Pooling by its names in configs. Older configs have flags such as `pooling_mode_mean_tokens`, and
# newer configs have names such as `mean`.
_POOLINGS: Mapping[str, Pooling] = {
    "mean_tokens": "mean",
    "mean": "mean",
    "cls_token": "cls",
    "cls": "cls",
    "lasttoken": "last",
}


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """Pooling, normalization and prompts of an embedding model."""

    pooling: Pooling
    normalize: bool
    prompts: tuple[tuple[str, str], ...]
    default_prompt: str | None


def read_embedding_config(checkpoint: Checkpoint) -> EmbeddingConfig:
    """Read the embedding config; the default pooling is the mean.

    Raises UnsupportedModel for a module or a pooling that the build does not support.
    """
    modules = _modules(checkpoint)
    config_file = checkpoint.directory / SENTENCE_CONFIG_NAME
    prompts = read_field(config_file, "prompts", dict) or {}
    pooling: Pooling = "mean"
    if "Pooling" in modules:
        pooling = _pooling(checkpoint.module(modules["Pooling"]) / CONFIG_NAME, bool(prompts))
    return EmbeddingConfig(
        pooling=pooling,
        normalize="Normalize" in modules,
        prompts=tuple((str(name), str(text)) for name, text in prompts.items()),
        default_prompt=read_field(config_file, "default_prompt_name", str),
    )


def read_max_seq_length(weights: Path) -> Json:
    """Read `max_seq_length`, None when absent.

    Raises UnsupportedModel if texts must be lowercased but the tokenizer does not lowercase them.
    """
    sentence = read_object(weights / "sentence_bert_config.json")
    if sentence.get("do_lower_case"):
        _check_lowercases(weights)
    return sentence.get("max_seq_length")


def is_cross_encoder(checkpoint: Checkpoint) -> bool:
    """Return whether sentence-transformers saved the checkpoint as a CrossEncoder."""
    config = checkpoint.weights / CONFIG_NAME
    value = read_field(config, "sentence_transformers", dict) or {}
    config_file = read_object(checkpoint.directory / SENTENCE_CONFIG_NAME)
    return (
        "activation_fn" in value
        # before sentence-transformers 4
        or "sbert_ce_default_activation_function" in read_object(config)
        or config_file.get("model_type") == "CrossEncoder"
    )


def _modules(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the directory of each sentence-transformers module by type."""
    kinds: dict[str, str] = {}
    for module in read_modules(checkpoint.directory):
        kind = module.type.rpartition(".")[2]
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise UnsupportedModel(
                f"`{MODULES_NAME}` has the unsupported module `{kind}`",
                hint="supported: Transformer, Pooling, Normalize",
            )
        kinds[kind] = module.path
    return kinds


def _pooling(path: Path, has_prompts: bool) -> Pooling:
    config = read_object(path)
    if has_prompts and config.get("include_prompt") is False:
        raise UnsupportedModel(
            "pooling without the prompt's tokens (`include_prompt: false`) is not supported",
            hint="set `include_prompt` to true if the accuracy allows it",
        )
    named = {str(config["pooling_mode"])} if "pooling_mode" in config else set()
    flags = {k.removeprefix("pooling_mode_") for k, v in config.items() if v is True}
    chosen = sorted((named | flags) - {"include_prompt"})
    poolings = {_POOLINGS.get(name) for name in chosen}
    if len(poolings) == 1 and (pooling := poolings.pop()) is not None:
        return pooling
    raise UnsupportedModel(
        f"pooling by {' and '.join(chosen) or 'nothing'} is not supported",
        hint="use one of: mean, cls, lasttoken",
    )


def _check_lowercases(weights: Path) -> None:
    from tokenizers import Tokenizer

    normalizer = Tokenizer.from_file(str(weights / TOKENIZER_NAME)).normalizer
    if normalizer is None or normalizer.normalize_str("A") != "a":
        raise UnsupportedModel(
            "sentence-transformers lowercases the text before tokenization (`do_lower_case`)",
            hint=f"add a Lowercase normalizer to `{TOKENIZER_NAME}`",
        )
