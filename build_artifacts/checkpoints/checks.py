"""Safety and completeness of checkpoints.

The build loads no pickled weights and no remote code, because both would execute foreign programs.
These checks find them by file name or config field, before anything is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from build_artifacts.checkpoints.architectures import read_model_class
from build_artifacts.checkpoints.checkpoint import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    MODULES_NAME,
    Checkpoint,
    check_modules,
    corrupt_file_error,
    is_plain_file,
    is_splade_model,
    read_field,
    read_modules,
    read_object,
    unreadable_source_error,
)
from build_artifacts.checkpoints.file_formats import unread_weights_error
from build_artifacts.errors import BuildError, SourceNotFound, UnsafeSource, UnsupportedModel
from deployments.builds.sources import is_hub_id

_MODULE_PACKAGE = "sentence_transformers."
# Limits of fields of config.json for which transformers creates a list, before it reads weights.
_MAX_COUNTS: Mapping[str, int] = {"num_labels": 1_000_000, "num_hidden_layers": 1_000}


def check_checkpoint(checkpoint: Checkpoint) -> None:
    """Reject unsafe and incomplete checkpoints. `sources/tokenizer.py` checks tokenizers.

    Raises the errors of `check_description` and, if no GGUF or ONNX file holds the weights, those
    of `check_weights`.
    """
    check_description(checkpoint)
    if checkpoint.packed is None:
        check_weights(checkpoint.weights, "model")


def check_description(checkpoint: Checkpoint) -> None:
    """Reject a checkpoint for what its files say, without its weights, which may be absent.

    Raises UnsafeSource for remote code and for a module outside of the checkpoint. Raises
    UnsupportedModel if the files of a LoRA adapter are beside the weights or in place of a model,
    and for a config with more layers or labels than any model has. Without config.json, raises the
    errors of `check_modules`, the error for pickled or GGUF weights, or SourceNotFound.
    """
    weights = checkpoint.weights
    is_adapter = is_plain_file(weights / ADAPTER_CONFIG_NAME)
    if not is_plain_file(weights / CONFIG_NAME):
        # A model of the module StaticEmbedding, for example, has no config.json. The error of
        # `check_modules` names the unsupported module, which explains more than a missing file.
        check_modules(checkpoint.directory, sparse=is_splade_model(checkpoint.directory))
        if is_adapter:
            raise adapter_without_model_error(checkpoint)
        raise _unread_weights_error(weights) or SourceNotFound(
            f"no `{CONFIG_NAME}` in `{checkpoint.source.ref}`",
            hint="SOURCE must be a transformers checkpoint",
        )
    _check_remote_code(checkpoint)
    _check_counts(weights / CONFIG_NAME)
    for module in read_modules(checkpoint.directory):
        checkpoint.module(module.path)  # raises for a link that leaves the checkpoint
    if is_adapter:  # transformers would load the adapter too, and add a merged one a second time
        raise UnsupportedModel(
            f"the checkpoint also has a LoRA adapter (`{ADAPTER_CONFIG_NAME}`)",
            hint=f"remove its `{ADAPTER_CONFIG_NAME}` if it is merged, or move it to another "
            "directory and pass that with `--adapter`",
        )


def adapter_without_model_error(checkpoint: Checkpoint) -> UnsupportedModel:
    """Build the error for a SOURCE that has a LoRA adapter in place of a model."""
    ref = checkpoint.source.ref
    directory = suggest_download(ref) if is_hub_id(ref) else "the directory of the adapter"
    base = read_field(checkpoint.weights / ADAPTER_CONFIG_NAME, "base_model_name_or_path", str)
    return UnsupportedModel(
        f"`{ref}` has a LoRA adapter of `{base or 'another model'}`, and no model",
        hint=f"pass the base model, `--adapter` with {directory}, and an `--id`",
    )


def suggest_download(ref: str) -> str:
    """Return how a user gets the directory of an adapter on the hub: `ID` or `ID@REVISION`."""
    model_id, _, revision = ref.partition("@")
    option = f" --revision {revision}" if revision else ""
    return f"the DIR of `hf download {model_id}{option} --local-dir DIR`"


def _check_remote_code(checkpoint: Checkpoint) -> None:
    hint = "use a checkpoint whose architecture is part of transformers"
    weights = checkpoint.weights
    model_type = str(read_object(weights / CONFIG_NAME).get("model_type"))
    if "auto_map" in read_object(weights / "tokenizer_config.json"):
        raise UnsafeSource(
            "`tokenizer_config.json` requires remote code (`auto_map`), which the build never "
            "executes",
            hint=hint,
        )
    if "auto_map" in read_object(weights / CONFIG_NAME) and not _is_native_decoder(checkpoint):
        why = (
            f"the code may compute other outputs than `{model_type}` of transformers, so only "
            "models that generate text are built without it"
            if _is_native(model_type)
            else f"transformers does not include `{model_type}`"
        )
        raise UnsafeSource(
            f"`{CONFIG_NAME}` requires remote code (`auto_map`), which the build never executes; "
            f"{why}",
            hint=hint,
        )
    # transformers interprets a name with a slash as a hub repository of kernels.
    for key in ("attn_implementation", "_attn_implementation"):
        if "/" in str(read_object(weights / CONFIG_NAME).get(key)):
            raise UnsafeSource(
                f"`{CONFIG_NAME}` requires remote code (`{key}`), which the build never executes",
                hint=hint,
            )
    for module in read_modules(checkpoint.directory):
        if not module.type.startswith(_MODULE_PACKAGE):
            raise UnsafeSource(
                f"`{MODULES_NAME}` requires remote code (`{module.type}`), which the build never "
                "executes",
                hint=hint,
            )
    program = next(iter(sorted(weights.glob("modeling_*.py"))), None)
    if program is not None and not _is_native(model_type):
        raise UnsafeSource(
            f"`{program.name}` is remote code, which the build never executes, and transformers "
            f"does not include `{model_type}`",
            hint=hint,
        )


def _check_counts(path: Path) -> None:
    config = read_object(path)
    for name, limit in _MAX_COUNTS.items():
        count = config.get(name)
        if isinstance(count, int) and count > limit:
            raise corrupt_file_error(path, f"`{name}` is {count}; the limit is {limit}")


def _is_native_decoder(checkpoint: Checkpoint) -> bool:
    """Return whether config.json names a class of transformers that only generates text.

    Such a model needs no remote code: without `trust_remote_code`, transformers ignores `auto_map`
    and runs its own class. Embedding models are excluded, because their remote code may, for
    example, replace causal attention.
    """
    from transformers.models.auto import modeling_auto as known

    path = checkpoint.weights / CONFIG_NAME
    model_type = read_field(path, "model_type", str)
    return (
        model_type in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and model_type not in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        and read_field(path, "architectures", list)
        == [known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
        and not read_modules(checkpoint.directory)
    )


def _is_native(model_type: str) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return bool(model_type in CONFIG_MAPPING)


def check_weights(directory: Path, stem: str) -> None:
    """Check that the weights are complete: `<stem>.safetensors`, or all shards of an index.

    If both exist, both are checked. Raises SourceNotFound for a missing file, SourceUnreadable for
    an unreadable file, and UnsupportedModel for a corrupt file or GGUF weights. Raises UnsafeSource
    for pickled weights or a path outside `directory`.
    """
    whole = directory / f"{stem}.safetensors"
    index = directory / f"{stem}.safetensors.index.json"
    shards = _shards(index) if is_plain_file(index) else {}
    if is_plain_file(whole) or not shards:
        _check_tensors(whole, set())
    for name, promised in sorted(shards.items()):
        _check_tensors(directory / name, promised)


def _shards(index: Path) -> dict[str, set[str]]:
    """Return the tensors of each shard according to the weight index."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise corrupt_file_error(index, "no `weight_map` from tensors to files")
    shards: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or name == "..":
            raise UnsafeSource(
                f"`{index.name}` points outside the checkpoint: `{name}`",
                hint="use a trusted checkpoint",
            )
        shards.setdefault(name, set()).add(tensor)
    return shards


def _check_tensors(path: Path, promised: set[str]) -> None:
    from safetensors import SafetensorError, safe_open

    if not is_plain_file(path):
        raise _unread_weights_error(path.parent) or SourceNotFound(
            f"no `{path.name}` in `{path.parent}`", hint="SOURCE must contain safetensors weights"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            missing = promised - set(file.keys())
    except OSError as exc:
        raise unreadable_source_error(path, str(exc)) from exc
    except SafetensorError as exc:
        raise corrupt_file_error(path, str(exc)) from exc
    if missing:
        raise corrupt_file_error(
            path, f"the tensor `{min(missing)}` of the weight index is missing"
        )


def _unread_weights_error(directory: Path) -> BuildError | None:
    try:
        names = os.listdir(directory) if directory.is_dir() else []
    except OSError as exc:
        raise unreadable_source_error(directory, str(exc.strerror)) from exc
    if (directory.parent / MODULES_NAME).is_file():  # the directory of a module
        names.append(MODULES_NAME)
    return unread_weights_error(f"`{directory}`", names, read_model_class(directory))
