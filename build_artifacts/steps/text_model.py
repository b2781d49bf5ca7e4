"""Extraction of the text model from a checkpoint with image inputs, or from an adapter of one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from build_artifacts.checkpoints.adapter import ADAPTER_STEM
from build_artifacts.checkpoints.checkpoint import (
    ADAPTER_CONFIG_NAME,
    DAMAGED_HINT,
    Checkpoint,
    Json,
    copy_without_weights,
    list_weight_files,
    read_object,
    write_index,
)
from build_artifacts.checkpoints.decoders import check_decoder
from build_artifacts.checkpoints.text_models import (
    find_text_name,
    is_name_of_whole_model,
    load_text_config,
)
from build_artifacts.errors import UnsupportedModel

_ADAPTED = "base_model.model."  # start of the names of an adapter's tensors
_LORA_TENSOR = re.compile(r"\.lora_[^.]+(\.weight)?$")  # the end of such a name, after the module


def extract_text_model(checkpoint: Checkpoint, into: Path) -> None:
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
        raise UnsupportedModel("the checkpoint has no weights of a text model", hint=DAMAGED_HINT)
    write_index(into, shards, size)
    if {"lm_head.weight", "model.embed_tokens.weight"} <= shards.keys():
        # Checkpoints with a head of its own may state the flag nevertheless.
        config.tie_word_embeddings = False
    config.save_pretrained(into)


def extract_text_adapter(adapter: Path, into: Path) -> Path:
    """Return the directory of the adapter as one of the text model, which may be a copy in `into`.

    An adapter that was trained with the class for image inputs has the names of its modules, and
    may adapt the image encoder, which texts do not need. Raises UnsupportedModel for an adapter of
    the image encoder alone.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(adapter / f"{ADAPTER_STEM}.safetensors", framework="pt") as file:
        names = [name.removeprefix(_ADAPTED) for name in file.keys()]  # noqa: SIM118 - no mapping
        if not any(map(is_name_of_whole_model, names)):
            return adapter
        texts = {name: find_text_name(name) for name in names}
        renamed = {f"{_ADAPTED}{old}": f"{_ADAPTED}{new}" for old, new in texts.items() if new}
        if not renamed:
            raise UnsupportedModel(
                f"the adapter `{adapter.name}` changes the image encoder only; the text model, "
                "which the build takes, stays as it is",
                hint="build the model without `--adapter`",
            )
        tensors = {text: file.get_tensor(name) for name, text in renamed.items()}
    save_file(tensors, into / f"{ADAPTER_STEM}.safetensors", metadata={"format": "pt"})
    config = _rename_modules(adapter, read_object(adapter / ADAPTER_CONFIG_NAME), renamed)
    (into / ADAPTER_CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
    return into


def _rename_modules(
    adapter: Path, config: Mapping[str, Json], renamed: Mapping[str, str]
) -> dict[str, Json]:
    """Return the config of the adapter, with the names of the modules in `renamed` as its targets.

    `renamed` has the new names of tensors by the old ones. Patterns could fit the old names only.
    """
    from peft.utils.other import get_pattern_key

    modules = {
        _find_module(old): _find_module(new)
        for old, new in renamed.items()
        if _LORA_TENSOR.search(old)
    }
    parameters = _find_target_parameters(adapter, config, modules)
    patterns = {}
    for field in ("rank_pattern", "alpha_pattern"):
        values = config.get(field) or {}
        targets = {**modules, **parameters}
        keys = {new: get_pattern_key(values, old) for old, new in targets.items()}
        patterns[field] = {new: values[key] for new, key in keys.items() if key in values}
    holders = {name.rpartition(".")[0] for name in parameters.values()}
    unused = dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern"))
    return {
        **config,
        **patterns,
        **unused,
        "target_modules": sorted(set(modules.values()) - holders),
        "target_parameters": sorted(parameters.values()) or None,
    }


def _find_module(tensor: str) -> str:
    """Return the module of a LoRA tensor. Those of several parameters of a module are nested."""
    return _LORA_TENSOR.sub("", tensor.removeprefix(_ADAPTED)).replace(".base_layer", "")


def _find_target_parameters(
    adapter: Path, config: Mapping[str, Json], modules: Mapping[str, str]
) -> dict[str, str]:
    """Return the new names of the parameters that the adapter targets, by the old ones.

    These are weights of a module that is no layer, such as one with all experts. `modules` has the
    new names of modules with LoRA tensors by the old ones.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    if not (targets := config.get("target_parameters")):
        return {}
    read = LoraConfig.from_pretrained(str(adapter))
    # The tensors of a module belong to its parameters if the module itself is no target.
    holders = [old for old in modules if not check_target_module_exists(read, old)]
    names = {target: target.rpartition(".")[2] for target in targets}
    return {
        f"{old}.{name}": f"{modules[old]}.{name}"
        for old in holders
        for target, name in names.items()
        if f".{old}.{name}".endswith(f".{target}")
    }
