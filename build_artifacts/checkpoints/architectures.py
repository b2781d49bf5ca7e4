"""Properties of architectures that configs do not state: tasks, limits and sliding windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from build_artifacts.checkpoints.checkpoint import CONFIG_NAME, read_field
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.types import TaskName

TransformersConfig = Any  # a transformers.PretrainedConfig; mypy skips the library


# Class names by model type of checkpoints with image inputs. The text model is built alone.
WITH_IMAGES: Mapping[str, str] = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3n": "Gemma3nForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "lfm2_vl": "Lfm2VlForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
}

# Task by suffix of the model class in the config of a checkpoint or an adapter. The first matching
# suffix decides, so the more general suffixes come last.
_TASKS_BY_CLASS: Mapping[str, TaskName] = {
    "ForSequenceClassification": TaskName.TEXT_CLASSIFICATION,
    "ForTokenClassification": TaskName.TOKEN_CLASSIFICATION,
    "ForQuestionAnswering": TaskName.QUESTION_ANSWERING,
    "ForMaskedLM": TaskName.FILL_MASK,
    "ForCausalLM": TaskName.TEXT_GENERATION,
    # Former name of T5's class. XLM and FlauBERT, which predict masked tokens, keep such names.
    "T5WithLMHeadModel": TaskName.TEXT2TEXT_GENERATION,
    "WithLMHeadModel": TaskName.FILL_MASK,
    "LMHeadModel": TaskName.TEXT_GENERATION,
    "PegasusForConditionalGeneration": TaskName.SUMMARIZATION,
    "M2M100ForConditionalGeneration": TaskName.TRANSLATION,
    **dict.fromkeys(WITH_IMAGES.values(), TaskName.TEXT_GENERATION),
    "ForConditionalGeneration": TaskName.TEXT2TEXT_GENERATION,
    "MTModel": TaskName.TRANSLATION,
    "Model": TaskName.FEATURE_EXTRACTION,
}

MXFP4 = "mxfp4"  # name of the format in configs

# Errors of transformers and torch for a config with impossible values, such as AssertionError for a
# padding id beyond the vocabulary and ZeroDivisionError for no attention heads.
MODEL_ERRORS = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
)


def load_config(weights: Path) -> TransformersConfig:
    """Load config.json with transformers.

    Raises UnsupportedModel if transformers rejects it or `architectures` is not a list.
    """
    from transformers import AutoConfig

    # Check the type of this field, because transformers does not.
    read_field(weights / CONFIG_NAME, "architectures", list)
    with config_errors(CONFIG_NAME):
        return AutoConfig.from_pretrained(weights, trust_remote_code=False)


@contextmanager
def config_errors(name: str) -> Iterator[None]:
    """Convert config errors of transformers to UnsupportedModel with the file name `name`."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (*MODEL_ERRORS, MemoryError, OSError, StrictDataclassError) as exc:
        first_paragraph = str(exc).partition("\n\n")[0]
        raise UnsupportedModel(
            f"transformers does not support `{name}`: {' '.join(first_paragraph.split())}",
            hint="use a valid config of an architecture that is part of transformers",
        ) from exc


def parse_task_class(name: str) -> TaskName | None:
    """Return the task of a class name such as `BertForMaskedLM`; None if its suffix is unknown."""
    return next((t for ending, t in _TASKS_BY_CLASS.items() if name.endswith(ending)), None)


def has_mxfp4_weights(weights: Path) -> bool:
    """Return whether the checkpoint has weights in MXFP4, as those of GPT-OSS."""
    quantization = read_field(weights / CONFIG_NAME, "quantization_config", dict) or {}
    return quantization.get("quant_method") == MXFP4


def check_unquantized(config: TransformersConfig) -> None:
    """Raise UnsupportedModel if the weights are quantized, except GPT-OSS's in MXFP4.

    Its authors publish no others, and each value of MXFP4 is one of bf16, too. A build has already
    converted the formats of `weight_formats`, so that their configs state no quantization.
    """
    quantization = getattr(config, "quantization_config", None)
    is_mxfp4 = quantization and quantization.get("quant_method") == MXFP4
    if quantization and not (is_mxfp4 and config.model_type == "gpt_oss"):
        raise UnsupportedModel(
            f"the checkpoint is quantized with `{quantization.get('quant_method')}`, which cannot "
            "be converted to a float type",
            hint="build from a checkpoint that is not quantized, or from one of GPTQ, AWQ, "
            "AutoRound, bitsandbytes, compressed-tensors or Model Optimizer, or in fp8",
        )


def read_model_class(weights: Path) -> str:
    """Return the first class name in config.json, or an empty text if it names none."""
    architectures = read_field(weights / CONFIG_NAME, "architectures", list)
    return str((architectures or [""])[0])


def read_architecture(config: TransformersConfig) -> str:
    """Return the class name in the config, or the model type if the config names no class."""
    name = str((config.architectures or [config.model_type])[0])
    return _CLASSES_OF_TRANSFORMERS.get(name, name)


# Classes in the code of checkpoints, and the classes of transformers for the same models.
_CLASSES_OF_TRANSFORMERS: Mapping[str, str] = {"MPTForCausalLM": "MptForCausalLM"}


def read_head_size(config: TransformersConfig) -> int:
    """Return the channels of each attention head of a decoder."""
    if has_latent_attention(config):  # `head_dim` counts those with RoPE only
        return int(config.qk_head_dim)
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)


def has_latent_attention(config: TransformersConfig) -> bool:
    """Return whether keys and values of all heads come from one vector, as in DeepSeek-V2."""
    return hasattr(type(config), "kv_lora_rank")


def read_kv_heads(config: TransformersConfig) -> int:
    """Return the number of KV heads of each layer of a decoder."""
    heads: int = config.num_attention_heads
    if has_latent_attention(config):
        return heads
    if getattr(config, "new_decoder_architecture", False):  # of Falcon
        return int(config.num_kv_heads)
    if config.model_type in _MULTI_QUERY:
        return 1 if config.multi_query else heads
    # config.json may have the field although the class ignores it, such as GPT-NeoX's.
    is_declared = hasattr(type(config), "num_key_value_heads")
    return config.num_key_value_heads or heads if is_declared else heads


def read_max_positions(config: TransformersConfig) -> int | None:
    """Return the maximum number of input tokens, or None if the config states no maximum.

    Raises UnsupportedModel if the maximum depends on a padding id that the config does not state.
    """
    positions = _read_alibi_limit(config) or getattr(config, "max_position_embeddings", None)
    skipped = _POSITIONS_AFTER_PADDING.get(config.model_type)
    if positions and skipped:
        positions -= skipped(config)
    positions = positions or _read_recurrent_limit(config)
    limits = (_extend_by_yarn(positions, config), _read_rope_limit(config))
    return min((limit for limit in limits if limit), default=None)


# Model types with one KV head for all query heads if `multi_query` is true.
_MULTI_QUERY = ("falcon", "gpt_bigcode")


def _read_alibi_limit(config: TransformersConfig) -> int | None:
    """Return the tokens of the training texts of a model with ALiBi, None for other models.

    ALiBi itself has no limit.
    """
    if config.model_type not in _ALIBI_LIMITS:
        return None
    name, default = _ALIBI_LIMITS[config.model_type]
    return int(getattr(config, name, None) or default)


# Fields of configs, and their values in the training of models whose configs lack them.
_ALIBI_LIMITS: Mapping[str, tuple[str, int]] = {
    "bloom": ("seq_length", 2048),
    "mpt": ("max_seq_len", 2048),
}


def _read_recurrent_limit(config: TransformersConfig) -> int | None:
    """Return the tokens of the training texts of a model without attention and positions.

    Its states have no limit. Another number may be in config.json, though the class ignores it.
    """
    return 2048 if config.model_type == "mamba2" else None


def _extend_by_yarn(positions: int | None, config: TransformersConfig) -> int | None:
    """Return the context with YaRN, which many configs do not include in their maximum."""
    rope = getattr(config, "rope_parameters", None) or {}
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if not (positions and original and factor) or rope.get("rope_type") != "yarn":
        return positions
    return max(positions, int(factor * original))


def _read_rope_limit(config: TransformersConfig) -> int | None:
    """Return the reach of the shorter RoPE table of longrope, or None for other RoPE types.

    A longrope model has two tables. An encoder selects one by the longest text of a batch, and the
    graph of a decoder by the capacity of its cache, instead of the length of each text. Texts must
    therefore stay within the range of the shorter table.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    layers = [rope, *(own for own in rope.values() if isinstance(own, dict))]  # by layer type
    name = "original_max_position_embeddings"
    split = [layer for layer in layers if layer.get("rope_type") == "longrope"]
    # The config class may ignore a field beside the settings, but the model builder reads it.
    owners = [*split, vars(config)] if split else []
    return min((owner[name] for owner in owners if owner.get(name)), default=None)


def min_trace_tokens(config: TransformersConfig) -> int:
    """Return the lower bound of the dynamic token axis during tracing."""
    return _MIN_TRACE_TOKENS.get(config.model_type, 2)


# MobileBERT concatenates each token with its left and right neighbors, so a trace needs three
# tokens. The resulting graph is also correct for two tokens.
_MIN_TRACE_TOKENS: Mapping[str, int] = {"mobilebert": 3}


def _count_padding_positions(config: TransformersConfig) -> int:
    if not isinstance(config.pad_token_id, int):
        raise UnsupportedModel(
            f"`{CONFIG_NAME}` states no `pad_token_id`, after which the positions of "
            f"`{config.model_type}` start",
            hint=f"set `pad_token_id` in {CONFIG_NAME} to the id of the padding token, such as 1",
        )
    return config.pad_token_id + 1


# Number of unused position embeddings, for models whose positions start after the padding id.
_POSITIONS_AFTER_PADDING: Mapping[str, Callable[[TransformersConfig], int]] = {
    "mpnet": lambda _: 2,  # fixed in the model code; the config has no effect
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm",
         "data2vec-text", "xmod", "esm", "ibert", "luke", "markuplm", "lilt", "layoutlmv3"),
        _count_padding_positions,
    ),
}  # fmt: skip


def has_experts(config: TransformersConfig) -> bool:
    """Return whether layers of the model are mixtures of experts.

    Configs of models without experts may state one expert. Nemotron-H's have a number of experts
    even if no layer has them.
    """
    if config.model_type == "nemotron_h":
        return "moe" in config.layer_types
    counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts"))
    return any(isinstance(count, int) and count > 1 for count in counts)
