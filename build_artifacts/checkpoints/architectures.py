"""Properties of architectures that configs do not state: tasks, limits and unsupported models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from build_artifacts.checkpoints.checkpoint import CONFIG_NAME, read_field
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.types import TaskName

TransformersConfig = Any  # a transformers.PretrainedConfig; the library is not typed


# Task by suffix of the class name that a checkpoint or an adapter states. The first matching
# suffix counts.
_TASKS_BY_CLASS: Mapping[str, TaskName] = {
    "ForSequenceClassification": TaskName.TEXT_CLASSIFICATION,
    "ForTokenClassification": TaskName.TOKEN_CLASSIFICATION,
    "ForQuestionAnswering": TaskName.QUESTION_ANSWERING,
    "ForMaskedLM": TaskName.FILL_MASK,
    "ForCausalLM": TaskName.TEXT_GENERATION,
    "LMHeadModel": TaskName.TEXT_GENERATION,
    "PegasusForConditionalGeneration": TaskName.SUMMARIZATION,
    "M2M100ForConditionalGeneration": TaskName.TRANSLATION,
    "ForConditionalGeneration": TaskName.TEXT2TEXT_GENERATION,
    "MTModel": TaskName.TRANSLATION,
    "Model": TaskName.FEATURE_EXTRACTION,
}


# Errors that transformers raises for a config that it does not know, or for values of wrong types.
_CONFIG_ERRORS = (ValueError, TypeError, AttributeError, LookupError, OSError)


def load_config(weights: Path) -> TransformersConfig:
    """Load config.json with transformers.

    Raises UnsupportedModel if transformers rejects it or `architectures` is not a list.
    """
    from transformers import AutoConfig

    read_field(weights / CONFIG_NAME, "architectures", list)  # transformers does not check it
    with config_errors(CONFIG_NAME):
        return AutoConfig.from_pretrained(weights, trust_remote_code=False)


@contextmanager
def config_errors(name: str) -> Iterator[None]:
    """Turn errors of transformers into UnsupportedModel, which names the file `name`."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except (*_CONFIG_ERRORS, StrictDataclassError) as exc:
        first_paragraph = str(exc).partition("\n\n")[0]
        raise UnsupportedModel(
            f"transformers does not support `{name}`: {' '.join(first_paragraph.split())}",
            hint="use a valid config of an architecture that is part of transformers",
        ) from exc


def parse_task_class(name: str) -> TaskName | None:
    """Return the task of a class name such as `BertForMaskedLM`; None if its suffix is unknown."""
    return next((t for ending, t in _TASKS_BY_CLASS.items() if name.endswith(ending)), None)


def check_architecture(config: TransformersConfig, *, pooled: bool) -> None:
    """Raise UnsupportedModel with a reason unless the encoder compiler supports the model.

    `pooled` states whether the checkpoint configures pooling of token vectors. If it does, a
    decoder is accepted as an encoder.
    """
    if not (_is_encoder(config) or (pooled and not _generates_only(config))):
        raise UnsupportedModel(
            f"`{config.model_type}` is not an encoder",
            hint="add a sentence-transformers pooling, or pass `--task text-generation`",
        )
    find_reason = _UNSUPPORTED.get(config.model_type)
    if find_reason is not None and (reason := find_reason(config)) is not None:
        why, hint = reason
        raise UnsupportedModel(f"`{config.model_type}` cannot be exported: {why}", hint=hint)


def read_architecture(config: TransformersConfig) -> str:
    """Return the class name in the checkpoint's config, or the model type if there is none."""
    return str((config.architectures or [config.model_type])[0])


def read_max_positions(config: TransformersConfig) -> int | None:
    """Return the maximum number of input tokens, None when the config does not state it."""
    positions = getattr(config, "max_position_embeddings", None)
    skipped = _POSITIONS_AFTER_PADDING.get(config.model_type)
    return positions - skipped(config) if positions and skipped else positions


def min_trace_tokens(config: TransformersConfig) -> int:
    """Return the lower bound of the dynamic token axis during tracing."""
    return _MIN_TRACE_TOKENS.get(config.model_type, 2)


def _is_encoder(config: TransformersConfig) -> bool:
    from transformers.models.auto import modeling_auto as known

    if _generates_only(config):
        return False
    # transformers lists models such as BERT as masked and as causal language models, because they
    # can be configured as decoders. A model in both tables is an encoder here.
    masked = config.model_type in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return masked or config.model_type not in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _generates_only(config: TransformersConfig) -> bool:
    return bool(config.is_encoder_decoder or getattr(config, "is_decoder", False))


Reason = tuple[str, str]  # reason and hint


def _check_longformer(_config: TransformersConfig) -> Reason | None:
    return (
        "its global attention tokens depend on the input, and tracing does not support "
        "data-dependent sizes",
        "use an encoder with full or sliding attention, such as ModernBERT",
    )


def _check_big_bird(config: TransformersConfig) -> Reason | None:
    if config.attention_type == "original_full":
        return None
    same_up_to = (5 + 2 * config.num_random_blocks) * config.block_size
    return (
        f"its `{config.attention_type}` attention selects random blocks",
        'set `"attention_type": "original_full"` in config.json; the model itself '
        f"uses it up to {same_up_to} tokens",
    )


_UNSUPPORTED: Mapping[str, Callable[[TransformersConfig], Reason | None]] = {
    "longformer": _check_longformer,
    "big_bird": _check_big_bird,
}

# MobileBERT concatenates each token with its left and right neighbors, so a trace needs three
# tokens. The resulting graph is also correct for two tokens.
_MIN_TRACE_TOKENS: Mapping[str, int] = {"mobilebert": 3}

# Offset of the first position for models that number positions after the padding id.
_POSITIONS_AFTER_PADDING: Mapping[str, Callable[[TransformersConfig], int]] = {
    "mpnet": lambda _: 2,  # fixed in the model code; the config has no effect
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm",
         "data2vec-text", "xmod", "esm", "ibert", "luke", "markuplm"),
        lambda config: int(config.pad_token_id) + 1,
    ),
}  # fmt: skip
