"""Merge of a LoRA adapter into a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from build_artifacts.checkpoints.adapter import ADAPTER_STEM, LABELS_HINT, LABELS_NAME, Adapter
from build_artifacts.checkpoints.architectures import (
    TransformersConfig,
    has_mxfp4_weights,
    load_config,
)
from build_artifacts.checkpoints.checkpoint import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    MODULES_NAME,
    Checkpoint,
    copy_without_weights,
    read_field,
    read_modules,
)
from build_artifacts.checkpoints.metadata import read_labels
from build_artifacts.checkpoints.models import (
    LOAD_ERRORS,
    LOADERS,
    TorchModel,
    dequantization_options,
    find_required,
)
from build_artifacts.errors import UnsupportedModel, convert_library_error, first_line
from build_artifacts.steps.adapter_texts import (
    check_adapter_vocabulary,
    copy_chat_format,
    copy_sentence_config,
)
from build_artifacts.steps.text_model import extract_text_adapter
from deployments.artifacts.types import ModelHead
from deployments.tasks import find_head

if TYPE_CHECKING:
    from torch.nn import Module, Parameter

# A line of torch about a tensor that does not fit its module.
_SIZE_MISMATCH = re.compile(r"size mismatch for (\S+): .*?(\[[\d, ]*\]).*?(\[[\d, ]*\])")


def merge(checkpoint: Checkpoint, adapter: Adapter, into: Path) -> None:
    """Write the checkpoint with merged adapter weights to `into`, in fp32.

    Raises UnsupportedModel if the adapter does not fit or lacks weights, such as those of a head.
    """
    check_adapter_vocabulary(adapter, checkpoint.weights)
    head = find_head(adapter.task)
    is_vector = head is ModelHead.VECTOR
    is_retrained = is_vector and bool(read_modules(adapter.directory))
    # A head replaces pooling, so the sentence-transformers config no longer applies. An adapter
    # trained with sentence-transformers has a config of its own.
    keeps_config = is_vector and not is_retrained
    root = checkpoint.directory if keeps_config else checkpoint.weights
    outdated = () if keeps_config else (MODULES_NAME,)
    copy_without_weights(root, into, weights=checkpoint.weights, without=outdated)
    target = into / checkpoint.weights.relative_to(root)
    if head is ModelHead.NEXT_TOKEN:
        copy_chat_format(adapter, target)
    if is_retrained:
        copy_sentence_config(adapter, target)
    # The original format of weights in MXFP4 has no place for others.
    is_original = not has_mxfp4_weights(checkpoint.weights)
    merged = _merged_model(checkpoint.weights, adapter)
    merged.save_pretrained(target, save_original_format=is_original)


def _merged_model(weights: Path, adapter: Adapter) -> TorchModel:
    from peft import PeftModel

    base, random = _base_model(weights, adapter)
    table = _find_tied_table(base)
    with TemporaryDirectory() as scratch:
        with _loading_errors(adapter, base.config):
            directory = extract_text_adapter(adapter.directory, Path(scratch))
            model = PeftModel.from_pretrained(base, str(directory), local_files_only=True)
        _check_complete(model, adapter, directory, random)
    if table is None:
        return _merge_into_base(model, adapter)
    _untie(model, table)
    merged = _merge_into_base(model, adapter)
    _tie_if_equal(merged)
    return merged


@contextmanager
def _loading_errors(adapter: Adapter, base: TransformersConfig) -> Iterator[None]:
    """Convert errors of peft for an adapter that does not fit its base model to UnsupportedModel.

    KeyError names a missing weight. `base` is the config of the base model.
    """
    try:
        yield
    except KeyError as exc:
        raise _missing_weight_error(adapter, str(exc.args[0])) from exc
    except (AttributeError, TypeError, re.error) as exc:
        raise UnsupportedModel(
            f"`{ADAPTER_CONFIG_NAME}` of the adapter `{adapter.name}` is invalid: "
            f"{first_line(exc)}",
            hint="correct the value, or save the adapter again with peft",
        ) from exc
    except (RuntimeError, ValueError, ImportError, LookupError) as exc:
        raise _label_count_error(adapter, base, str(exc)) or UnsupportedModel(
            f"the adapter `{adapter.name}` does not fit the model: {_describe_misfit(exc)}",
            hint="pass the base model of its training",
        ) from exc


def _label_count_error(
    adapter: Adapter, base: TransformersConfig, message: str
) -> UnsupportedModel | None:
    """Return the error for a head of another number of labels, if `message` of torch is about it.

    The weights of the layers come first in that message. They fit if it begins with the head.
    """
    mismatch = _SIZE_MISMATCH.search(message)
    if mismatch is None or find_head(adapter.task) not in (ModelHead.LABELS, ModelHead.TOKENS):
        return None
    name, *shapes = mismatch.groups()
    stored, required = (json.loads(shape) for shape in shapes)
    if ".lora_" in name or stored[1:] != required[1:] or required[:1] != [base.num_labels]:
        return None
    source = f"`{LABELS_NAME}` names" if adapter.labels else "the model has"
    return UnsupportedModel(
        f"the head of the adapter `{adapter.name}` has {stored[0]} labels, and {source} "
        f"{base.num_labels}",
        hint=LABELS_HINT,
    )


def _describe_misfit(exc: Exception) -> str:
    """Return the first tensor of another shape than the model needs, or the first line of `exc`."""
    if (mismatch := _SIZE_MISMATCH.search(str(exc))) is None:
        return first_line(exc)
    name, stored, required = mismatch.groups()
    # Without the name that peft gives an adapter: the name of the tensor in the file.
    tensor = name.replace(".default.", ".").removesuffix(".default")
    return f"`{tensor}` has the shape {stored}, and the model needs {required}"


def _merge_into_base(model: TorchModel, adapter: Adapter) -> TorchModel:
    try:
        return model.merge_and_unload().eval()
    except (RuntimeError, ValueError, TypeError) as exc:
        raise UnsupportedModel(
            f"the adapter `{adapter.name}` cannot be merged: {first_line(exc)}",
            hint="train it with options that peft can merge, such as without `lora_bias`",
        ) from exc


def _base_model(weights: Path, adapter: Adapter) -> tuple[TorchModel, list[str]]:
    """Load the base model. Return it with the names of its randomly initialized weights."""
    import torch
    import transformers

    head = find_head(adapter.task)
    options = dequantization_options(weights)
    if head in (ModelHead.LABELS, ModelHead.TOKENS):
        labels = dict(enumerate(adapter.labels or _read_labels(weights)))
        names = {"id2label": labels, "label2id": {label: i for i, label in labels.items()}}
        # The adapter replaces the head of the base, which may have another number of labels.
        options |= {**names, "ignore_mismatched_sizes": True}
    if adapter.problem_type is not None:
        options["problem_type"] = adapter.problem_type
    try:
        model, info = getattr(transformers, LOADERS[head]).from_pretrained(
            weights,
            dtype=torch.float32,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    except LOAD_ERRORS as exc:
        raise convert_library_error(
            exc,
            f"transformers cannot load the base model of the adapter `{adapter.name}`",
            hint="load it with transformers in a Python shell for details",
        ) from exc
    mismatched = [entry[0] for entry in info["mismatched_keys"]]
    return model, find_required([*info["missing_keys"], *mismatched], head)


def _find_tied_table(model: TorchModel) -> Parameter | None:
    """Return the token embedding table if the output head shares it, else None."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    is_tied = weight is not None and weight is model.get_input_embeddings().weight
    return weight if is_tied else None


def _untie(model: TorchModel, table: Parameter) -> None:
    """Give each module that shares `table`, except the first, a copy of its own.

    With a shared table, the merge would add the update of one module to all modules.
    """
    from torch.nn import Parameter

    modules: list[Module] = list(model.modules())
    for module in [module for module in modules if module._parameters.get("weight") is table][1:]:
        module.weight = Parameter(table.detach().clone(), requires_grad=False)


def _tie_if_equal(model: TorchModel) -> None:
    """Share the token embedding table with the output head again if the merge left them equal."""
    import torch

    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    is_equal = torch.equal(head.weight, table.weight)
    if is_equal:
        head.weight = table.weight
    model.config.tie_word_embeddings = is_equal  # peft may have changed this flag


def _read_labels(weights: Path) -> list[str]:
    if not read_field(weights / CONFIG_NAME, "id2label", dict):
        raise UnsupportedModel("neither the adapter nor the model defines labels", hint=LABELS_HINT)
    return list(read_labels(weights, load_config(weights)))


def _check_complete(
    model: TorchModel, adapter: Adapter, directory: Path, random: Collection[str]
) -> None:
    """Reject an adapter file that lacks weights, because the missing weights would be random.

    `random` names weights of the base model that the file must replace.
    """
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    path = directory / f"{ADAPTER_STEM}.safetensors"
    with safe_open(path, framework="numpy") as file:
        stored = set(file.keys())
    # peft would read the base of the training, even from the hub, and require the token vectors if
    # they have another size. Those that the adapter trained are required in any case.
    trained = get_peft_model_state_dict(model, save_embedding_layers=False)
    required = {*trained, *(f"base_model.model.{name}" for name in random)}
    if missing := sorted(required - stored):
        raise _missing_weight_error(adapter, missing[0])
    if foreign := sorted(name for name in stored - required if ".lora_" in name):
        raise UnsupportedModel(
            f"the adapter `{adapter.name}` has weights for `{foreign[0]}`, which fit no module",
            hint="pass the base model of its training",
        )


def _missing_weight_error(adapter: Adapter, weight: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the adapter `{adapter.name}` has no weights for `{weight}`",
        hint="pass the base model of its training; save it with its head (`modules_to_save`)",
    )
