"""Conversion of a checkpoint with quantized weights to one in 16 bits."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from build_artifacts.checkpoints.checkpoint import (
    CONFIG_NAME,
    DAMAGED_HINT,
    Checkpoint,
    copy_without_weights,
    list_weight_files,
    write_index,
)
from build_artifacts.errors import UnsupportedModel
from build_artifacts.steps.tensor_shard import VALUE_BYTES, PlannedTensor, write_shard
from build_artifacts.weight_formats.base import (
    UNQUANTIZED_HINT,
    FileTensor,
    FloatWeight,
    QuantizedWeight,
    WeightFormat,
)
from build_artifacts.weight_formats.reading import (
    EARLY_CONFIGS,
    FloatDtype,
    read_unquantized_config,
)

if TYPE_CHECKING:
    from torch import Tensor


def dequantize(
    checkpoint: Checkpoint, weight_format: WeightFormat, dtype: FloatDtype, into: Path
) -> None:
    """Write the checkpoint to `into` with its quantized weights as `dtype`, and others as they are.

    Values are computed in fp32. Raises UnsupportedModel for tensors that are missing, of other
    shapes or types, or invalid.
    """
    weights = checkpoint.weights
    target = into / weights.relative_to(checkpoint.directory)
    copy_without_weights(checkpoint.directory, into, weights=weights, without=EARLY_CONFIGS)
    config = json.dumps(read_unquantized_config(weights), indent=2)
    (target / CONFIG_NAME).write_text(config, encoding="utf-8")
    files = _open_files(weights, weight_format.unused)
    shards: dict[str, str] = {}
    size = 0
    for number, planned in enumerate(_plan(files, weight_format, dtype)):
        if planned:
            shard = f"model-{number:05}.safetensors"
            write_shard(target / shard, planned)
            shards |= dict.fromkeys(planned, shard)
            size += sum(tensor.nbytes for tensor in planned.values())
    write_index(target, shards, size)


def _open_files(weights: Path, unused: tuple[str, ...]) -> list[dict[str, FileTensor]]:
    """Return the tensors of each file by name, without those whose name has an unused ending."""
    from safetensors import safe_open

    files = []
    for path in list_weight_files(weights):
        file: Any = safe_open(path, framework="pt")
        tensors = {}
        for name in file.keys():  # noqa: SIM118 - the file object is no mapping
            if name.endswith(unused):
                continue
            values = file.get_slice(name)
            shape = tuple(values.get_shape())
            tensors[name] = FileTensor(file, name, values.get_dtype(), shape)
        files.append(tensors)
    return files


def _plan(
    files: Sequence[Mapping[str, FileTensor]], weight_format: WeightFormat, dtype: FloatDtype
) -> list[dict[str, PlannedTensor]]:
    """Plan the tensors of each new file, and check all names, types and shapes.

    Reads no values of weights, only small tensors such as stored shapes.
    """
    tensors = {name: tensor for file in files for name, tensor in file.items()}
    weights = _find_weights(tensors, weight_format)
    owners = {part.name: weight for weight in weights.values() for part in weight.tensors.values()}
    done: set[str] = set()
    plans = []
    for file in files:
        plan = {}
        for name, tensor in file.items():
            weight = owners.get(name)
            target = name if weight is None else weight.name
            if target in done:
                continue
            done.add(target)
            plan[target] = (
                _plan_other(tensor, weight_format)
                if weight is None
                else _plan_weight(target, weight_format.decode(weight), dtype)
            )
        plans.append(plan)
    return plans


def _find_weights(
    tensors: Mapping[str, FileTensor], weight_format: WeightFormat
) -> dict[str, QuantizedWeight]:
    """Return the quantized weights by name.

    Raises UnsupportedModel for a weight that the checkpoint has in two forms.
    """
    parts: defaultdict[str, dict[str, FileTensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if (found := weight_format.find_weight(name, tensors)) is not None:
            weight, ending = found
            parts[weight][ending] = tensor
        elif tensor.dtype in weight_format.quantized_dtypes:
            parts[name][""] = tensor
    for name in parts.keys() & tensors.keys():
        if "" not in weight_format.endings:
            raise UnsupportedModel(
                f"the checkpoint has the weight `{name}` twice, once quantized", hint=DAMAGED_HINT
            )
        parts[name][""] = tensors[name]
    endings = weight_format.endings
    return {name: QuantizedWeight(name, found, endings) for name, found in parts.items()}


def _plan_other(tensor: FileTensor, weight_format: WeightFormat) -> PlannedTensor:
    """Plan a copy of a tensor that is not quantized. Raises UnsupportedModel for other types."""
    if tensor.dtype not in VALUE_BYTES:
        raise UnsupportedModel(
            f"the tensor `{tensor.name}` has the type {tensor.dtype}, which cannot be built from a "
            f"checkpoint in {weight_format.title}",
            hint=UNQUANTIZED_HINT,
        )
    return PlannedTensor(tensor.dtype, tensor.shape, tensor.read_parts)


def _plan_weight(name: str, weight: FloatWeight, dtype: FloatDtype) -> PlannedTensor:
    return PlannedTensor(dtype, weight.shape, partial(_round, name, weight.read, dtype))


def _round(name: str, read: Callable[[], Iterator[Tensor]], dtype: FloatDtype) -> Iterator[Tensor]:
    import torch

    kind = torch.bfloat16 if dtype == "BF16" else torch.float16
    for values in read():
        rounded = values.to(kind)
        # fp16 may have infinities where fp32 has none. A sum is quicker than a look at each value.
        checked = rounded if dtype == "F16" else values
        if not bool(torch.isfinite(checked.sum(dtype=torch.float32))):
            range_hint = "; values beyond fp16 need the `dtype` `bfloat16` in config.json"
            raise UnsupportedModel(
                f"the weight `{name}` has values that are not finite",
                hint=f"{DAMAGED_HINT}{range_hint if dtype == 'F16' else ''}",
            )
        yield rounded
