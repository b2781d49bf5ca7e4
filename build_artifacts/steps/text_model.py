"""Extraction of the text model from a checkpoint with image inputs, or from an adapter of one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from build_artifacts.checkpoints.adapter import ADAPTER_STEM
from build_artifacts.checkpoints.checkpoint import (
    ADAPTER_CONFIG_NAME,
    SAFETENSORS_INDEX_NAME,
    Checkpoint,
    copy_without_weights,
    list_weight_files,
)
from build_artifacts.checkpoints.decoders import check_decoder
from build_artifacts.checkpoints.text_models import find_text_name, load_text_config
from build_artifacts.errors import UnsupportedModel

_ADAPTED = "base_model.model."  # start of the names of an adapter's tensors


def extract_text_model(checkpoint: Checkpoint, into: Path) -> Checkpoint:
    """Write the text model to `into`, in the types of its weights.

    Raises UnsupportedModel if it cannot be built, or if the checkpoint has no weights of it.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    weights = checkpoint.weights
    config = load_text_config(weights)
    check_decoder(config)  # before gigabytes are copied
    copy_without_weights(weights, into, weights=weights)
    shards: dict[str, str] = {}
    size = 0
    for number, path in enumerate(list_weight_files(weights)):
        with safe_open(path, framework="pt") as file:
            names = {name: find_text_name(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            tensors = {text: file.get_tensor(name) for name, text in names.items() if text}
        if tensors:
            shard = f"model-{number:05}.safetensors"
            save_file(tensors, into / shard, metadata={"format": "pt"})
            shards |= dict.fromkeys(tensors, shard)
            size += sum(tensor.nbytes for tensor in tensors.values())
    if not shards:
        raise UnsupportedModel(
            "the checkpoint has no weights of a text model",
            hint="download or save the checkpoint again",
        )
    index = {"metadata": {"total_size": size}, "weight_map": shards}
    (into / SAFETENSORS_INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")
    if "lm_head.weight" in shards:  # transformers shares the tables only if they are equal
        config.tie_word_embeddings = False
    config.save_pretrained(into)
    return Checkpoint(into, checkpoint.source, checkpoint.default_id)


def extract_text_adapter(adapter: Path, into: Path) -> Path:
    """Return the directory of the adapter as one of the text model, which may be a copy in `into`.

    An adapter that was trained with the class for image inputs has the names of its modules.
    """
    from safetensors.torch import load_file, save_file

    tensors = load_file(adapter / f"{ADAPTER_STEM}.safetensors")
    names = {name: find_text_name(name.removeprefix(_ADAPTED)) for name in tensors}
    if not any(text and f"{_ADAPTED}{text}" != name for name, text in names.items()):
        return adapter
    renamed = {f"{_ADAPTED}{text}": tensors[name] for name, text in names.items() if text}
    save_file(renamed, into / f"{ADAPTER_STEM}.safetensors", metadata={"format": "pt"})
    shutil.copyfile(adapter / ADAPTER_CONFIG_NAME, into / ADAPTER_CONFIG_NAME)
    return into
