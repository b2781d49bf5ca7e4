"""Loading torch models: safetensors only, no network, and never with invented weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from build_artifacts.errors import UnsupportedModel
from build_artifacts.recipes import Dtype
from deployments.artifacts.types import ModelHead

# Weights a checkpoint may lack: vectors are pooled without the model's own pooler, which some
# classifiers do use.
_UNUSED: Mapping[ModelHead, tuple[str, ...]] = {
    **dict.fromkeys(ModelHead, ("embeddings.position_ids",)),
    ModelHead.VECTOR: ("pooler.", "embeddings.position_ids"),
}

TorchModel = Any  # a transformers.PreTrainedModel; the library is not typed


# The loader of transformers for each head.
LOADERS: Mapping[ModelHead, str] = {
    ModelHead.VECTOR: "AutoModel",
    ModelHead.LABELS: "AutoModelForSequenceClassification",
    ModelHead.TOKENS: "AutoModelForTokenClassification",
    ModelHead.SPAN: "AutoModelForQuestionAnswering",
    ModelHead.MASKS: "AutoModelForMaskedLM",
    ModelHead.NEXT_TOKEN: "AutoModelForCausalLM",
}


def load_model(
    weights: Path,
    *,
    head: ModelHead,
    dtype: Dtype,
    has_encoder: bool = False,
    quantization: Any = None,
) -> TorchModel:
    """The model in `weights` with its head, on the CPU and in evaluation mode.

    `has_encoder`: of those that generate, one that reads its prompts with an encoder.
    `quantization`: how transformers rounds the weights, such as its BitsAndBytesConfig. Raises
    UnsupportedModel when it cannot be read or lacks weights that would then be random.
    """
    import torch
    import transformers

    how = {}
    if quantization is not None:  # which would else take a GPU, and not give its memory back
        how = {"quantization_config": quantization, "device_map": "cpu"}
    loader = getattr(transformers, "AutoModelForSeq2SeqLM" if has_encoder else LOADERS[head])
    try:
        model, info = loader.from_pretrained(
            weights,
            dtype=getattr(torch, dtype),
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **how,
        )
    except (OSError, ValueError, RuntimeError) as exc:
        raise UnsupportedModel(
            f"transformers cannot load the checkpoint: {first_line(exc)}",
            hint="load it with transformers in a Python shell to see why",
        ) from exc
    if missing := _find_used(info["missing_keys"], head):
        raise UnsupportedModel(
            f"the checkpoint has no weights for `{missing[0]}`",
            hint="pass the `--task` it was trained for, or the `--adapter` that adds the head",
        )
    return model.eval()


def _find_used(keys: Iterable[str], head: ModelHead) -> list[str]:
    return sorted(key for key in keys if not any(part in key for part in _UNUSED[head]))


def first_line(exc: BaseException) -> str:
    """The first line of an exception's text, or its type when it has none."""
    return (str(exc).strip() or type(exc).__name__).splitlines()[0]
