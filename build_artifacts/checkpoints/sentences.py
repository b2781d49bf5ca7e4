"""Configuration files of sentence-transformers: embedding models and cross-encoders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from build_artifacts.checkpoints.checkpoint import (
    CONFIG_NAME,
    MODULE_TYPES,
    Checkpoint,
    Json,
    corrupt_file_error,
    read_field,
    read_modules,
    read_object,
)
from build_artifacts.checkpoints.projection import (
    DenseLayer,
    check_module_names,
    read_dense_layer,
)
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.manifest import TOKENIZER_NAME

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Pooling = Literal["mean", "cls", "last", "max", "mean_sqrt_len", "weighted_mean"]
Similarity = Literal["cosine", "dot"]
SENTENCE_CONFIG_NAME = "config_sentence_transformers.json"

# Pooling by its names in configs. Older configs have flags such as `pooling_mode_mean_tokens`, and
# newer configs have names such as `mean`.
_POOLINGS: Mapping[str, Pooling] = {
    "mean_tokens": "mean",
    "mean": "mean",
    "cls_token": "cls",
    "cls": "cls",
    "lasttoken": "last",
    "max_tokens": "max",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean_tokens": "weighted_mean",
    "weightedmean": "weighted_mean",
}
_POOLING_FLAG = "pooling_mode_"
# File names of the Transformer module's config. The build reads the first file that has content.
TRANSFORMER_CONFIG_NAMES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Arguments that sentence-transformers passes to `from_pretrained` of the config, the model and the
# tokenizer, and to the call of the tokenizer. Versions before 6 use the names that end in `_args`.
_ARGUMENTS = (
    "config_args", "model_args", "tokenizer_args", "config_kwargs", "model_kwargs",
    "processor_kwargs", "processing_kwargs.common", "processing_kwargs.text",
)  # fmt: skip
# sentence-transformers ignores `trust_remote_code` there. The others do not change fp32 outputs.
_ARGUMENTS_WITHOUT_EFFECT = {
    "trust_remote_code", "torch_dtype", "dtype", "attn_implementation", "add_pooling_layer",
    "cache_dir", "device_map", "local_files_only", "low_cpu_mem_usage", "padding_side", "revision",
    "token", "use_fast", "use_safetensors",
}  # fmt: skip
# Prompts that every SentenceTransformer has. If the config states no text for them, they are empty.
_OWN_PROMPTS = ("query", "document")


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """Pooling, projection, normalization, similarity and prompts of an embedding model."""

    pooling: Pooling
    projection: tuple[DenseLayer, ...]  # layers to apply to the pooled vectors, in order
    normalize: bool
    # Values of a vector that remain after the projection and the normalization; None: all.
    dimensions: int | None
    similarity: Similarity
    prompts: tuple[tuple[str, str], ...]
    default_prompt: str | None


def read_embedding_config(checkpoint: Checkpoint, hidden_size: int) -> EmbeddingConfig:
    """Read the embedding config of modules that passed `check_modules`.

    Without a Pooling module, the pooling is the mean. Raises UnsupportedModel for a pooling,
    normalization or similarity that is not supported, and the errors of `read_dense_layer` and
    `read_prompts`.
    """
    modules = _read_modules(checkpoint)
    prompts, default_prompt = read_prompts(checkpoint)
    pooling: Pooling = "mean"
    if paths := modules["Pooling"]:
        pooling = _pooling(checkpoint.module(paths[0]) / CONFIG_NAME, any(prompts.values()))
    projection: list[DenseLayer] = []
    width = hidden_size
    for path in modules["Dense"]:
        projection.append(read_dense_layer(checkpoint.module(path), width))
        width = projection[-1].width
    for path in modules["Normalize"]:
        check_module_names(checkpoint.module(path))
    normalize = bool(modules["Normalize"])
    dimensions = _read_dimensions(checkpoint, width)
    return EmbeddingConfig(
        pooling=pooling,
        projection=tuple(projection),
        normalize=normalize,
        dimensions=dimensions,
        similarity=_read_similarity(checkpoint, normalized=normalize and dimensions is None),
        prompts=tuple(prompts.items()),
        default_prompt=default_prompt,
    )


def read_max_seq_length(weights: Path, *, masked_lm: bool = False) -> Json:
    """Read the maximum input length in tokens, `max_seq_length`; None when absent.

    Raises UnsupportedModel if texts must be lowercased but the tokenizer does not lowercase them,
    and the errors of `check_arguments`. Also if the module does not return token vectors or, with
    `masked_lm`, the logits of a masked language model.
    """
    config = read_transformer_config(weights)
    check_arguments(weights)
    _check_token_outputs(config, masked_lm=masked_lm)
    check_lowercasing(weights)
    return config.get("max_seq_length")


def check_arguments(weights: Path) -> None:
    """Raise UnsupportedModel for arguments of the Transformer module that change the outputs."""
    config = read_transformer_config(weights)
    for key in _ARGUMENTS:
        arguments = read_path(config, key)
        if changing := sorted(set(arguments or {}) - _ARGUMENTS_WITHOUT_EFFECT):
            raise UnsupportedModel(
                f"the Transformer module has `{changing[0]}` in its `{key}`, which the build does "
                "not pass on",
                hint=f"remove it, and state its effect in {CONFIG_NAME} or tokenizer_config.json",
            )


def read_transformer_config(weights: Path) -> dict[str, Json]:
    configs = (read_object(weights / name) for name in TRANSFORMER_CONFIG_NAMES)
    return next(filter(None, configs), {})


def read_path(config: Mapping[str, Json], path: str) -> dict[str, Json] | None:
    """Return the object at the dotted `path`, or None. Raises UnsupportedModel for other values."""
    value: Json = config
    for name in path.split("."):
        value = value.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise UnsupportedModel(
                f"`{name}` of the Transformer module is not an object",
                hint="the checkpoint is damaged: download or save it again",
            )
    return dict(value)


def _check_token_outputs(config: Mapping[str, Json], *, masked_lm: bool) -> None:
    """Raise UnsupportedModel unless the Transformer module returns what the build reads.

    It may return another output, such as BERT's pooled vector, or the output for a text that the
    chat template renders.
    """
    task, output = "feature-extraction", "last_hidden_state"
    if masked_lm:
        task, output = "fill-mask", "logits"
    text = read_path(config, "modality_config.text") or {}
    stated = {
        "transformer_task": (config.get("transformer_task"), task),
        "module_output_name": (config.get("module_output_name"), "token_embeddings"),
        "modality_config.text.method": (text.get("method"), "forward"),
        "modality_config.text.method_output_name": (
            text.get("method_output_name"),
            output,
        ),
        "modality_config.message": (read_path(config, "modality_config.message"), None),
    }
    for name, (value, supported) in stated.items():
        if value not in (None, supported, [supported]):
            raise UnsupportedModel(
                f"`{name}` of the Transformer module is `{value}`; the build reads `{output}` of "
                "texts only",
                hint="use a model that pools these outputs of its Transformer module",
            )


def is_cross_encoder(checkpoint: Checkpoint) -> bool:
    """Return whether sentence-transformers saved the checkpoint as a CrossEncoder."""
    config = checkpoint.weights / CONFIG_NAME
    value = read_field(config, "sentence_transformers", dict) or {}
    config_file = read_object(checkpoint.directory / SENTENCE_CONFIG_NAME)
    return (
        "activation_fn" in value
        # written by sentence-transformers before version 4
        or "sbert_ce_default_activation_function" in read_object(config)
        or config_file.get("model_type") == "CrossEncoder"
    )


def check_no_default_prompt(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedModel for a cross-encoder that expects a prompt before every query."""
    prompts, name = read_prompts(checkpoint)
    if name is not None and prompts.get(name):
        raise UnsupportedModel(
            f"the cross-encoder has the default prompt `{name}`; prompts are supported for "
            "embedding models only",
            hint=f"set `default_prompt_name` in {SENTENCE_CONFIG_NAME} to null and send the "
            "prompt with each query",
        )


def _read_modules(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return the directories of the sentence-transformers modules by type."""
    modules = read_modules(checkpoint.directory)
    return {
        known: [module.path for module in modules if module.class_name == known]
        for known in MODULE_TYPES
    }


def read_prompts(checkpoint: Checkpoint) -> tuple[dict[str, str], str | None]:
    """Return the prompts and the name of the default prompt.

    A prompt that is null becomes an empty text. The name is None without a default prompt. It is
    also None if the default is one of `_OWN_PROMPTS` without a text in the config, because such a
    prompt is empty. Raises UnsupportedModel if any other default prompt has no text in the config.
    """
    path = checkpoint.directory / SENTENCE_CONFIG_NAME
    stated = read_field(path, "prompts", dict) or {}
    prompts = {str(name): "" if text is None else str(text) for name, text in stated.items()}
    default = read_field(path, "default_prompt_name", str)
    if default is None or default in prompts:
        return prompts, default
    if default in _OWN_PROMPTS:
        return prompts, None
    raise UnsupportedModel(
        f"`{path.name}` does not define its default prompt `{default}`",
        hint="correct `default_prompt_name` or `prompts`",
    )


def _read_dimensions(checkpoint: Checkpoint, width: int) -> int | None:
    """Return how many of `width` values sentence-transformers keeps; None for all."""
    path = checkpoint.directory / SENTENCE_CONFIG_NAME
    dimensions = read_field(path, "truncate_dim", int)
    if dimensions is not None and dimensions < 1:
        raise corrupt_file_error(path, f"`truncate_dim` is {dimensions}")
    return dimensions if dimensions is not None and dimensions < width else None


def _read_similarity(checkpoint: Checkpoint, *, normalized: bool) -> Similarity:
    path = checkpoint.directory / SENTENCE_CONFIG_NAME
    name = read_field(path, "similarity_fn_name", str) or "cosine"
    if name not in ("cosine", "dot"):
        raise UnsupportedModel(
            f"the similarity `{name}` is not supported",
            hint=f"set `similarity_fn_name` in {path.name} to cosine or dot if the accuracy allows "
            "it",
        )
    # The dot product of normalized vectors is their cosine.
    return "dot" if name == "dot" and not normalized else "cosine"


def _pooling(path: Path, has_prompts: bool) -> Pooling:
    config = read_object(path)
    if has_prompts and config.get("include_prompt") is False:
        raise UnsupportedModel(
            "pooling without the prompt's tokens (`include_prompt: false`) is not supported",
            hint="set `include_prompt` to true if the accuracy allows it",
        )
    chosen = _read_pooling_names(config) if config else []
    if len(chosen) == 1 and (pooling := _POOLINGS.get(chosen[0])) is not None:
        return pooling
    raise UnsupportedModel(
        f"pooling by {' and '.join(chosen) or 'nothing'} is not supported",
        hint="use one of: mean, cls, lasttoken, max, mean_sqrt_len_tokens, weightedmean",
    )


def _read_pooling_names(config: Mapping[str, Json]) -> list[str]:
    """Return the names of the poolings whose vectors sentence-transformers concatenates.

    As in sentence-transformers, `pooling_mode` overrides the flags, and the default is the mean.
    """
    names = config.get("pooling_mode")
    if names is not None:
        return [str(name) for name in (names if isinstance(names, list) else [names])]
    flags = [key for key, value in config.items() if key.startswith(_POOLING_FLAG) and value]
    return sorted(flag.removeprefix(_POOLING_FLAG) for flag in flags) or ["mean"]


def is_lowercasing(tokenizer: Tokenizer) -> bool:
    normalizer = tokenizer.normalizer
    return normalizer is not None and normalizer.normalize_str("A") == "a"


def check_lowercasing(weights: Path) -> None:
    """Raise UnsupportedModel if texts must be lowercased but the tokenizer does not lowercase."""
    from tokenizers import Tokenizer

    if not read_transformer_config(weights).get("do_lower_case"):
        return
    if not is_lowercasing(Tokenizer.from_file(str(weights / TOKENIZER_NAME))):
        raise UnsupportedModel(
            "sentence-transformers lowercases the text before tokenization (`do_lower_case`)",
            hint=f"add a Lowercase normalizer to `{TOKENIZER_NAME}`",
        )
