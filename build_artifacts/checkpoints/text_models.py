"""Checkpoints with image inputs, of which the build takes the text model alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from build_artifacts.checkpoints.architectures import (
    WITH_IMAGES,
    TransformersConfig,
    config_errors,
    load_config,
)
from build_artifacts.checkpoints.checkpoint import (
    CONFIG_NAME,
    Checkpoint,
    Json,
    read_field,
    read_modules,
    read_object,
)
from build_artifacts.errors import UnsupportedModel

# Text models that have no class of their own, with the model type that computes the same for texts.
# They differ in positions of images only: the three positions of a text token are equal.
_SAME_FOR_TEXT: Mapping[str, str] = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
_IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")  # RoPE fields

# Start of the names of the text model's tensors. Older checkpoints of Qwen2-VL have no such part.
_TEXT_PREFIX = re.compile(r"(model\.)?(language_model|text_model)\.(model\.)?")
_PLAIN_NAMES = re.compile(r"model\.(embed_tokens|layers|norm)\.")
_IMAGE_PREFIX = re.compile(
    r"(model\.)?(visual|vision_model|vision_tower|connector|multi_modal_projector)\."
)
_HEAD = re.compile(r"(model\.)?(language_model\.)?lm_head\.")


def is_reduced_to_text(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint has image inputs and a text model that the build takes.

    A checkpoint that sentence-transformers saved is built as it is.
    """
    has_images = read_field(checkpoint.weights / CONFIG_NAME, "model_type", str) in WITH_IMAGES
    return has_images and not read_modules(checkpoint.directory)


def load_text_config(weights: Path) -> TransformersConfig:
    """Return the config of the text model, with the name of its class.

    Raises the errors of `load_config`, and UnsupportedModel if transformers has no such class.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    whole = load_config(weights)
    config = whole.get_text_config()
    if (model_type := _SAME_FOR_TEXT.get(config.model_type)) is not None:
        values = {name: value for name, value in config.to_dict().items() if name != "model_type"}
        rope = values.get("rope_parameters") or {}
        kept = {name: value for name, value in rope.items() if name not in _IMAGE_POSITIONS}
        with config_errors(CONFIG_NAME):
            config = CONFIG_MAPPING[model_type](**values | {"rope_parameters": kept})
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedModel(
            f"transformers has no class for the text model `{config.model_type}`",
            hint="use a model that generates text from text alone",
        )
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    # In the whole model, the flag of the text model has no effect.
    config.tie_word_embeddings = whole.tie_word_embeddings
    config.eos_token_id = _read_eos_token(weights)
    if hasattr(whole, "quantization_config"):
        config.quantization_config = whole.quantization_config
    return config


def _read_eos_token(weights: Path) -> Json:
    """Return the end tokens that config.json states, not the default of the class."""
    whole = read_object(weights / CONFIG_NAME)
    token = whole.get("eos_token_id")
    return token if token is not None else (whole.get("text_config") or {}).get("eos_token_id")


def find_text_name(name: str) -> str | None:
    """Return the name that a tensor has in the text model, or None if it is no part of it."""
    if (head := _HEAD.match(name)) is not None:
        return f"lm_head.{name[head.end() :]}"
    if (prefix := _TEXT_PREFIX.match(name)) is not None:
        return f"model.{name[prefix.end() :]}"
    return name if _PLAIN_NAMES.match(name) else None


def is_name_of_whole_model(name: str) -> bool:
    """Return whether a tensor of this name belongs to a model with image inputs."""
    return bool(_TEXT_PREFIX.match(name) or _IMAGE_PREFIX.match(name))
