"""Encoder checkpoints: supported models, and reasons why others cannot be built."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from build_artifacts.checkpoints.architectures import (
    TransformersConfig,
    check_unquantized,
    parse_task_class,
    read_architecture,
)
from build_artifacts.checkpoints.decoders import suggest_text_generation
from build_artifacts.checkpoints.encoder_decoders import SUPPORTED as ENCODER_DECODERS
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.types import TEXT2TEXT_TASKS, ModelHead

# Base classes of decoders with a head, in transformers' `modeling_layers`.
_GENERIC_CLASSES: Mapping[ModelHead, str] = {
    ModelHead.LABELS: "GenericForSequenceClassification",
    ModelHead.TOKENS: "GenericForTokenClassification",
    ModelHead.SPAN: "GenericForQuestionAnswering",
}
_USE_ENCODER = "use an encoder of text, such as BERT, XLM-RoBERTa or ModernBERT"


def check_encoder(config: TransformersConfig, head: ModelHead, *, pooled: bool) -> None:
    """Raise UnsupportedModel, with the reason, for a model that cannot be built as an encoder.

    `pooled` states whether the checkpoint configures the use of a decoder's output: a pooling of
    its token vectors, or a score from its logits. Such a decoder, or one whose class has a head for
    labels or spans, is accepted as an encoder if its config does not set `is_decoder`.
    """
    architecture = read_architecture(config)
    find_reason = _UNSUPPORTED.get(config.model_type)
    if find_reason is not None and (reason := find_reason(config)) is not None:
        why, hint = reason
        raise UnsupportedModel(f"`{config.model_type}` cannot be exported: {why}", hint=hint)
    reads_whole_text = pooled or _has_output_head(config, head)
    if not (_is_encoder(config, head) or (reads_whole_text and not _generates_only(config, head))):
        kind = "encoder-decoders" if _has_decoder(config, head) else "decoders"
        raise UnsupportedModel(
            f"`{architecture}` cannot be built as an encoder: `{config.model_type}` models are "
            f"{kind}",
            hint=_suggest_way(config, head, pooled=pooled),
        )
    # Models of several modalities, such as CLIP, have a config per modality. Their top-level config
    # lacks these fields.
    for name in ("hidden_size", "vocab_size"):
        if not hasattr(config, name):
            raise UnsupportedModel(
                f"`{architecture}` cannot be built: the config of `{config.model_type}` has no "
                f"`{name}`, so it is not an encoder of text alone",
                hint=_USE_ENCODER,
            )
    check_unquantized(config)


def _suggest_way(config: TransformersConfig, head: ModelHead, *, pooled: bool) -> str:
    """Return the hint for a model that is not an encoder. Offer only supported alternatives."""
    if pooled:
        return _USE_ENCODER
    ways = []
    if head is ModelHead.VECTOR and not _generates_only(config, head):
        ways.append("add a sentence-transformers pooling")
    if generation := suggest_text_generation(config):
        ways.append(generation)
    task = parse_task_class(read_architecture(config))
    if task in TEXT2TEXT_TASKS and config.model_type in ENCODER_DECODERS:
        ways.append(f"pass `--task {task}`")
    return ", or ".join(ways) or _USE_ENCODER


def _is_encoder(config: TransformersConfig, head: ModelHead) -> bool:
    from transformers.models.auto import modeling_auto as known

    if _generates_only(config, head):
        return False
    # transformers lists models such as BERT as masked and as causal language models, because they
    # can be configured as decoders. A model in both tables is an encoder here.
    masked = config.model_type in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return masked or config.model_type not in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _has_output_head(config: TransformersConfig, head: ModelHead) -> bool:
    """Return whether the class in config.json is that of a decoder with labels or spans.

    The classes of transformers' other decoders, such as GPT-2, may read their token vectors in
    other ways than `wrap_for_export` does.
    """
    import transformers

    model_class = getattr(transformers, read_architecture(config), None)
    generic = _GENERIC_CLASSES.get(head)
    if generic is None or not isinstance(model_class, type):
        return False
    return issubclass(model_class, getattr(transformers.modeling_layers, generic))


def _generates_only(config: TransformersConfig, head: ModelHead) -> bool:
    return _has_decoder(config, head) or bool(getattr(config, "is_decoder", False))


def _has_decoder(config: TransformersConfig, head: ModelHead) -> bool:
    """Return whether transformers loads an encoder and a decoder for `head`.

    transformers 5 saves encoders such as T5EncoderModel with `is_encoder_decoder: false`. Their
    classes for tokens have the encoder alone, but `AutoModel`, for vectors, also has the decoder.
    """
    from transformers.models.auto import modeling_auto as known

    if config.is_encoder_decoder or head is not ModelHead.VECTOR:
        return bool(config.is_encoder_decoder)
    return (
        config.model_type in known.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
        and config.model_type not in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        and config.model_type not in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )


Reason = tuple[str, str]  # why a model cannot be exported, and a hint for the user


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


def _check_token_types(_config: TransformersConfig) -> Reason | None:
    return "its token [CLS] has a segment type of its own, which the server has not", _USE_ENCODER


_UNSUPPORTED: Mapping[str, Callable[[TransformersConfig], Reason | None]] = {
    "longformer": _check_longformer,
    "big_bird": _check_big_bird,
    "funnel": _check_token_types,
    "xlnet": _check_token_types,
}
