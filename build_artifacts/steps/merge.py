"""Merge of a LoRA adapter into a checkpoint."""

from __future__ import annotations

from pathlib import Path

from build_artifacts.checkpoints.adapter import ADAPTER_STEM, Adapter
from build_artifacts.checkpoints.architectures import load_config
from build_artifacts.checkpoints.checkpoint import (
    CONFIG_NAME,
    MODULES_NAME,
    Checkpoint,
    copy_without_weights,
    read_field,
)
from build_artifacts.checkpoints.metadata import read_labels
from build_artifacts.checkpoints.models import LOADERS, TorchModel, first_line
from build_artifacts.errors import UnsupportedModel
from deployments.artifacts.types import ModelHead
from deployments.tasks import find_head


def merge(checkpoint: Checkpoint, adapter: Adapter, into: Path) -> Checkpoint:
    """Write the checkpoint with merged adapter weights to `into`, in fp32.

    Raises UnsupportedModel if the adapter does not fit or lacks weights, such as those of a head.
    """
    is_head = find_head(adapter.task) is not ModelHead.VECTOR
    # A head replaces pooling, so the sentence-transformers config no longer applies.
    root = checkpoint.weights if is_head else checkpoint.directory
    outdated = (MODULES_NAME,) if is_head else ()
    copy_without_weights(root, into, weights=checkpoint.weights, without=outdated)
    target = into / checkpoint.weights.relative_to(root)
    _merged_model(checkpoint.weights, adapter).save_pretrained(target)
    return Checkpoint(into, checkpoint.source, checkpoint.default_id)


def _merged_model(weights: Path, adapter: Adapter) -> TorchModel:
    from peft import PeftModel

    base = _base_model(weights, adapter)
    try:
        model = PeftModel.from_pretrained(base, str(adapter.directory))
    except (RuntimeError, ValueError) as exc:
        raise UnsupportedModel(
            f"the adapter `{adapter.name}` does not fit the model: {first_line(exc)}",
            hint="pass the base model of its training",
        ) from exc
    except KeyError as exc:
        raise _missing_weight_error(adapter, str(exc.args[0])) from exc
    _check_complete(model, adapter)
    return model.merge_and_unload().eval()


def _base_model(weights: Path, adapter: Adapter) -> TorchModel:
    import torch
    import transformers

    head = find_head(adapter.task)
    names: dict[str, object] = {}
    if head in (ModelHead.LABELS, ModelHead.TOKENS):
        labels = dict(enumerate(adapter.labels or _read_labels(weights)))
        names = {"id2label": labels, "label2id": {label: i for i, label in labels.items()}}
    return getattr(transformers, LOADERS[head]).from_pretrained(
        weights,
        dtype=torch.float32,
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
        **names,
    )


def _read_labels(weights: Path) -> list[str]:
    if not read_field(weights / CONFIG_NAME, "id2label", dict):
        raise UnsupportedModel(
            "neither the adapter nor the model defines labels",
            hint='add a `labels.json` to the adapter, such as ["NEGATIVE", "POSITIVE"]',
        )
    return list(read_labels(weights, load_config(weights)))


def _check_complete(model: TorchModel, adapter: Adapter) -> None:
    """Reject an adapter file that lacks weights, because the missing weights would be random."""
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    path = adapter.directory / f"{ADAPTER_STEM}.safetensors"
    with safe_open(path, framework="numpy") as file:
        stored = set(file.keys())
    if missing := sorted(set(get_peft_model_state_dict(model)) - stored):
        raise _missing_weight_error(adapter, missing[0])


def _missing_weight_error(adapter: Adapter, weight: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the adapter `{adapter.name}` has no weights for `{weight}`",
        hint="pass the base model of its training; save it with its head (`modules_to_save`)",
    )
