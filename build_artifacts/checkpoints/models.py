"""Loading of torch models: safetensors only, offline, and without randomly initialized weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from build_artifacts.checkpoints.architectures import MODEL_ERRORS, has_mxfp4_weights
from build_artifacts.checkpoints.checkpoint import DAMAGED_HINT, list_weight_files
from build_artifacts.errors import UnsupportedModel, convert_library_error
from deployments.artifacts.types import Dtype, ModelHead

# Parts of the names of weights that a model does not use, by head. A checkpoint may lack these
# weights. The head VECTOR does not use the pooler, but some classifiers do.
_UNUSED: Mapping[ModelHead, tuple[str, ...]] = {
    **dict.fromkeys(ModelHead, ("embeddings.position_ids",)),
    ModelHead.VECTOR: ("pooler.", "embeddings.position_ids"),
}

# Errors of `from_pretrained` for a checkpoint that does not fit its config or its class, such as
# KeyError for an unknown activation.
LOAD_ERRORS = (*MODEL_ERRORS, OSError, ImportError, MemoryError)

# Part of the name of a weight that belongs to one layer of several.
_LAYER_NUMBER = re.compile(r"\.\d+\.")
_MISFIT_HINT = f"config.json and the weights do not fit: {DAMAGED_HINT}"

# Memory per parameter of a model that is loaded in fp32, with what a merge or a calibration adds.
_FP32_MODEL_BYTES = 5

TorchModel = Any  # a transformers.PreTrainedModel; the library is not typed
_LoadingInfo = Mapping[str, Any]  # names of weights by kind of difference, from transformers


# Loader class of transformers per head.
LOADERS: Mapping[ModelHead, str] = {
    ModelHead.VECTOR: "AutoModel",
    ModelHead.LABELS: "AutoModelForSequenceClassification",
    ModelHead.TOKENS: "AutoModelForTokenClassification",
    ModelHead.SPAN: "AutoModelForQuestionAnswering",
    ModelHead.MASKS: "AutoModelForMaskedLM",
    ModelHead.SPARSE: "AutoModelForMaskedLM",
    ModelHead.NEXT_TOKEN: "AutoModelForCausalLM",
}


def load_model(
    weights: Path,
    *,
    head: ModelHead,
    dtype: Dtype,
    has_encoder: bool = False,
    quantization: Any = None,
    is_checked: bool = False,
) -> TorchModel:
    """Load the model in `weights` on the CPU in evaluation mode.

    `is_checked` skips the comparison of shapes with the config (up to a second), for weights that
    this build has loaded before.

    `has_encoder` selects the encoder-decoder class for NEXT_TOKEN. `quantization` is a config of
    transformers, such as BitsAndBytesConfig. Raises UnsupportedModel when loading fails, if weights
    are missing, or if they have other shapes than the config states.
    """
    # A config may state a far larger model than the files have, so compare before using memory.
    shapes = None if is_checked else _load_shapes(weights, head, has_encoder=has_encoder)
    if shapes is not None:
        _check_fit(*shapes, head)
    options = dequantization_options(weights)
    if quantization is not None:  # without a device map, transformers would occupy GPU memory
        options = {"quantization_config": quantization, "device_map": "cpu"}
    try:
        model, info = _load(weights, head, dtype, has_encoder=has_encoder, **options)
    except LOAD_ERRORS as exc:
        raise convert_library_error(
            exc,
            "transformers cannot load the checkpoint",
            hint="load it with transformers in a Python shell for details",
        ) from exc
    _check_fit(model, info, head)
    return model.eval()


def find_unused_layers(weights: Path, *, head: ModelHead, has_encoder: bool = False) -> list[str]:
    """Return the sorted names of weights of layers that the model does not use.

    Such layers predict several tokens at once, or config.json states fewer layers than the files
    have. Empty if transformers cannot load the checkpoint.
    """
    shapes = _load_shapes(weights, head, has_encoder=has_encoder)
    names = () if shapes is None else shapes[1]["unexpected_keys"]
    return sorted(name for name in names if _LAYER_NUMBER.search(name))


def _load(
    weights: Path, head: ModelHead, dtype: Dtype, *, has_encoder: bool, **options: Any
) -> tuple[TorchModel, _LoadingInfo]:
    import torch
    import transformers

    loader = getattr(transformers, "AutoModelForSeq2SeqLM" if has_encoder else LOADERS[head])
    model, info = loader.from_pretrained(
        weights,
        dtype=getattr(torch, dtype),
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # otherwise the error does not name the weight
        **options,
    )
    return model, info


def _load_shapes(
    weights: Path, head: ModelHead, *, has_encoder: bool
) -> tuple[TorchModel, _LoadingInfo] | None:
    """Load the names and shapes of the weights, with all conversions, but no values.

    Return None if this fails: either loading of the values fails for the same reason, or a
    conversion requires values.
    """
    options = dequantization_options(weights)
    try:
        return _load(
            weights, head, "float32", has_encoder=has_encoder, device_map="meta", **options
        )
    except LOAD_ERRORS:
        return None


def _check_fit(model: TorchModel, info: _LoadingInfo, head: ModelHead) -> None:
    """Raise UnsupportedModel for a weight that is missing or has another shape."""
    if mismatched := sorted(info["mismatched_keys"]):
        name, actual, expected = mismatched[0]
        raise UnsupportedModel(
            f"`{name}` has the shape {list(actual)}; config.json requires {list(expected)}",
            hint=_MISFIT_HINT,
        )
    missing = find_required(info["missing_keys"], head)
    if body := [name for name in missing if _is_in_body(name, model)]:
        raise UnsupportedModel(f"the checkpoint has no weights for `{body[0]}`", hint=_MISFIT_HINT)
    if missing:
        raise UnsupportedModel(
            f"the checkpoint has no weights for `{missing[0]}`",
            hint="pass the `--task` of its training, or the `--adapter` with the head",
        )


def _is_in_body(name: str, model: TorchModel) -> bool:
    """Return whether a weight belongs to the model without its head.

    The pooler counts as part of the head, because checkpoints of other heads have none.
    """
    is_head_class = model.base_model is not model
    is_outside = is_head_class and not name.startswith(f"{model.base_model_prefix}.")
    return not is_outside and "pooler." not in name


def count_parameters(weights: Path) -> int:
    """Return the number of values in the weights of the model in `weights`.

    MXFP4 packs two values into a byte, and has scales beside them.
    """
    from safetensors import safe_open

    total = 0
    for path in list_weight_files(weights):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - the file object is no mapping
                stored = math.prod(file.get_slice(name).get_shape())
                if name.endswith("_blocks"):
                    stored *= 2
                total += 0 if name.endswith("_scales") else stored
    return total


def estimate_memory(weights: Path) -> int:
    """Return the bytes of memory that the work on the model in `weights` in fp32 takes."""
    return _FP32_MODEL_BYTES * count_parameters(weights)


def dequantization_options(weights: Path) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that make weights in MXFP4 float weights."""
    import transformers

    if not has_mxfp4_weights(weights):
        return {}
    return {"quantization_config": transformers.Mxfp4Config(dequantize=True)}


def check_token_ids(model: TorchModel, highest: int, token: str | None = None) -> None:
    """Raise UnsupportedModel if the model has no vector for `highest`, the highest token id.

    `token` is the text of that token, if known.
    """
    known = len(model.get_input_embeddings().weight)
    if highest >= known:
        raise UnsupportedModel(
            f"the tokenizer returns the id {highest}{'' if token is None else f' for `{token}`'}; "
            f"the model has vectors for {known} tokens",
            hint="if only tokenizer_config.json names the token, such as in "
            "`additional_special_tokens`, remove it there; else the tokenizer is that of another "
            f"model: {DAMAGED_HINT}",
        )


def check_special_ids(model: TorchModel, ids: Iterable[int]) -> None:
    """Raise UnsupportedModel if the model has no vector for an id that its configs state."""
    known = len(model.get_input_embeddings().weight)
    if (highest := max(ids)) >= known:
        raise UnsupportedModel(
            f"the configs state the token id {highest}, such as `eos_token_id`; the model has "
            f"vectors for {known} tokens",
            hint="correct the token ids in config.json and generation_config.json",
        )


def find_required(keys: Iterable[str], head: ModelHead) -> list[str]:
    """Return the weights among `keys` that a model with `head` uses, sorted."""
    return sorted(key for key in keys if not any(part in key for part in _UNUSED[head]))
