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
from build_artifacts.checkpoints.projection import DenseLayer, read_dense_layer
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.manifest import TOKENIZER_NAME

Pooling = Literal["mean", "cls", "last"]
SENTENCE_CONFIG_NAME = "config_sentence_transformers.json"

# Module types of sentence-transformers, in the order of their use.
MODULE_TYPES = ("Transformer", "Pooling", "Dense", "Normalize")
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
    """Pooling, projection, normalization and prompts of an embedding model."""

    pooling: Pooling
    projection: tuple[DenseLayer, ...]  # of the pooled vectors, in order
    normalize: bool
    prompts: tuple[tuple[str, str], ...]
    default_prompt: str | None


def read_embedding_config(checkpoint: Checkpoint, hidden_size: int) -> EmbeddingConfig:
    """Read the embedding config; the default pooling is the mean.

    Raises UnsupportedModel for a module or a pooling that the build does not support, and the
    errors of `read_dense_layer`.
    """
    modules = _read_modules(checkpoint)
    config_file = checkpoint.directory / SENTENCE_CONFIG_NAME
    prompts = read_field(config_file, "prompts", dict) or {}
    pooling: Pooling = "mean"
    if paths := modules["Pooling"]:
        pooling = _pooling(checkpoint.module(paths[0]) / CONFIG_NAME, bool(prompts))
    projection: list[DenseLayer] = []
    for path in modules["Dense"]:
        width = projection[-1].width if projection else hidden_size
        projection.append(read_dense_layer(checkpoint.module(path), width))
    return EmbeddingConfig(
        pooling=pooling,
        projection=tuple(projection),
        normalize=bool(modules["Normalize"]),
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


def _read_modules(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return the directories of the sentence-transformers modules by type.

    Raises UnsupportedModel for modules of another type or in an order other than MODULE_TYPES.
    """
    modules = read_modules(checkpoint.directory)
    kinds = [module.type.rpartition(".")[2] for module in modules]
    for kind in kinds:
        if kind not in MODULE_TYPES:
            raise UnsupportedModel(
                f"`{MODULES_NAME}` has the unsupported module `{kind}`",
                hint=f"supported: {', '.join(MODULE_TYPES)}",
            )
    if kinds != sorted(kinds, key=MODULE_TYPES.index):
        raise UnsupportedModel(
            f"`{MODULES_NAME}` has the modules in the unsupported order {', '.join(kinds)}",
            hint=f"supported: {', '.join(MODULE_TYPES)}",
        )
    return {
        known: [module.path for module, kind in zip(modules, kinds, strict=True) if kind == known]
        for known in MODULE_TYPES
    }


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
