"""Conversion of weights in fp8 to a checkpoint in bf16."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from build_artifacts.checkpoints.architectures import load_config
from build_artifacts.checkpoints.checkpoint import (
    CONFIG_NAME,
    Checkpoint,
    copy_without_weights,
    list_weight_files,
    write_index,
)
from build_artifacts.checkpoints.decoders import check_decoder
from build_artifacts.checkpoints.fp8 import (
    FP8_DTYPE,
    Fp8Format,
    ScaleBlock,
    read_fp8_format,
    read_unquantized_config,
)
from build_artifacts.checkpoints.text_models import has_images, load_text_config
from build_artifacts.errors import UnsupportedModel
from build_artifacts.steps.tensor_shard import VALUE_BYTES, PlannedTensor, write_shard

if TYPE_CHECKING:
    from torch import Tensor

_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
_GATE_UP = "gate_up_proj"  # part of the name of a weight that is both projections of experts
# Values in memory at once. Parts that fit into the cache of a core are converted twice as fast.
_MAX_PART_VALUES = 1 << 20
_DAMAGED = "download or save the checkpoint again"


class _FileTensor(NamedTuple):
    """A tensor of the checkpoint. Its values stay in the file."""

    file: Any  # a `safe_open` object of torch tensors
    name: str
    dtype: str  # in the words of safetensors
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor

    def read_parts(self) -> Iterator[Tensor]:
        """Yield the values in order, in parts of the first axis."""
        if not self.shape:
            yield self.read()
            return
        values = self.file.get_slice(self.name)
        step = max(1, _MAX_PART_VALUES // max(1, math.prod(self.shape[1:])))
        for start in range(0, self.shape[0], step):
            yield values[start : start + step]


class _ScaleGrid(NamedTuple):
    """The scales of a weight [..., rows, columns], one for each block of each of its matrices."""

    values: Tensor  # fp32, [matrices, block rows, block columns]
    rows: Tensor  # block row of each row
    columns: Tensor  # block column of each column


def dequantize_fp8(checkpoint: Checkpoint, into: Path, *, is_decoder: bool) -> Checkpoint:
    """Write the checkpoint to `into` with its weights in fp8 as bf16, and others as they are.

    A weight is its values times its scales, computed in fp32. `is_decoder` tells that the model
    will be built as a decoder. Raises UnsupportedModel if such a model cannot be built, or for
    missing, foreign or invalid scales and types of tensors.
    """
    weights = checkpoint.weights
    fp8 = read_fp8_format(weights)
    assert fp8 is not None, "bug: a conversion of weights that are not in fp8"
    target = into / weights.relative_to(checkpoint.directory)
    copy_without_weights(checkpoint.directory, into, weights=weights)
    config = json.dumps(read_unquantized_config(weights), indent=2)
    (target / CONFIG_NAME).write_text(config, encoding="utf-8")
    if is_decoder:  # before gigabytes are written
        check_decoder(load_text_config(target) if has_images(target) else load_config(target))
    files = _open_files(weights)
    scales = _find_scales({name: each for file in files for name, each in file.items()}, fp8)
    dropped = {scale.name for scale in scales.values()}
    shards: dict[str, str] = {}
    size = 0
    for number, file in enumerate(files):
        planned = {
            name: _plan(tensor, scales.get(name), fp8.block)
            for name, tensor in file.items()
            if name not in dropped and not name.endswith(fp8.unused)
        }
        if planned:
            shard = f"model-{number:05}.safetensors"
            write_shard(target / shard, planned)
            shards |= dict.fromkeys(planned, shard)
            size += sum(tensor.nbytes for tensor in planned.values())
    write_index(target, shards, size)
    return Checkpoint(into, checkpoint.source, checkpoint.default_id)


def _open_files(weights: Path) -> list[dict[str, _FileTensor]]:
    """Return the tensors of each file by name."""
    from safetensors import safe_open

    files = []
    for path in list_weight_files(weights):
        file: Any = safe_open(path, framework="pt")
        tensors = {}
        for name in file.keys():  # noqa: SIM118 - the file object is no mapping
            values = file.get_slice(name)
            shape = tuple(values.get_shape())
            tensors[name] = _FileTensor(file, name, values.get_dtype(), shape)
        files.append(tensors)
    return files


def _find_scales(tensors: Mapping[str, _FileTensor], fp8: Fp8Format) -> dict[str, _FileTensor]:
    """Return the scales by the names of their weights, which may be in other files.

    Raises UnsupportedModel for weights without scales, scales without weights, and other types.
    """
    scales = {}
    for name, tensor in tensors.items():
        if name.endswith(fp8.unused):
            continue
        weight = fp8.find_weight(name, tensors)
        if weight is not None:
            if weight not in tensors or tensors[weight].dtype != FP8_DTYPE:
                state = "not in fp8" if weight in tensors else "missing"
                raise UnsupportedModel(
                    f"the checkpoint has the scales `{name}`, but their weight is {state}",
                    hint=_DAMAGED,
                )
            scales[weight] = tensor
        elif tensor.dtype == FP8_DTYPE and f"{name}{fp8.scale_suffix}" not in tensors:
            raise UnsupportedModel(
                f"the checkpoint has no scales `{name}{fp8.scale_suffix}` for its weight in fp8",
                hint=_DAMAGED,
            )
        elif tensor.dtype not in (FP8_DTYPE, *VALUE_BYTES):
            raise UnsupportedModel(
                f"the tensor `{name}` has the type {tensor.dtype}, which cannot be built",
                hint=f"use a checkpoint with {FP8_DTYPE} as its only type of quantized weights",
            )
    return scales


def _plan(tensor: _FileTensor, scales: _FileTensor | None, block: ScaleBlock) -> PlannedTensor:
    if scales is None:
        return PlannedTensor(tensor.dtype, tensor.shape, tensor.read_parts)
    read = partial(_dequantize_parts, tensor, _build_grid(tensor, scales, block))
    return PlannedTensor("BF16", tensor.shape, read)


def _build_grid(weight: _FileTensor, scales: _FileTensor, block: ScaleBlock) -> _ScaleGrid:
    """Read the scales of a weight of one matrix, or of a matrix per expert.

    Gate and up projection of an expert in one matrix may have blocks of their own. Raises
    UnsupportedModel for another shape or type of scales, for scales with two readings, and for
    values that are not finite.
    """
    import torch

    if len(weight.shape) not in (2, 3):
        raise UnsupportedModel(
            f"the weight `{weight.name}` in fp8 has the shape {list(weight.shape)}, which is not "
            "that of a matrix or of experts",
            hint="use a checkpoint whose other weights are not quantized",
        )
    if scales.dtype not in _SCALE_DTYPES:
        raise UnsupportedModel(
            f"the scales `{scales.name}` have the type {scales.dtype}, which cannot be built",
            hint=f"supported: {', '.join(_SCALE_DTYPES)}",
        )
    *experts, rows, columns = weight.shape
    row_blocks = _index_blocks(rows, block.rows)
    column_blocks = _index_blocks(columns, block.columns)
    half = _index_blocks(rows // 2, block.rows)
    halves = torch.cat([half, half + _count(half)])
    values = scales.read().float()
    if block == ScaleBlock(None, None) and scales.shape in ((), (1,), tuple(experts)):
        values = values.reshape(-1, 1, 1).expand(math.prod(experts), 1, 1).reshape(*experts, 1, 1)
    shape = tuple(values.shape)
    whole = (*experts, _count(row_blocks), _count(column_blocks))
    are_halves_possible = len(halves) == rows and _count(halves) == _count(row_blocks)
    is_ambiguous = are_halves_possible and not torch.equal(halves, row_blocks)
    if _GATE_UP in weight.name and shape == whole and is_ambiguous:
        raise UnsupportedModel(
            f"the scales `{scales.name}` may belong to blocks of the whole weight, or of its gate "
            "and its up projection",
            hint="use a checkpoint that is not quantized",
        )
    if shape != whole and experts and shape == (*experts, _count(halves), whole[-1]):
        row_blocks = halves
    elif shape != whole:
        raise UnsupportedModel(
            f"the scales `{scales.name}` have the shape {list(scales.shape)}; their weight of the "
            f"shape {list(weight.shape)} needs {list(whole)}",
            hint="correct `quantization_config` in config.json, or download the checkpoint again",
        )
    if not bool(torch.isfinite(values).all()):
        raise UnsupportedModel(
            f"the scales `{scales.name}` have values that are not finite", hint=_DAMAGED
        )
    return _ScaleGrid(values.reshape(-1, *shape[-2:]), row_blocks, column_blocks)


def _index_blocks(size: int, block: int | None) -> Tensor:
    """Return the block of each of `size` rows or columns. The last block may be smaller."""
    import torch

    return torch.arange(size) // (block or size or 1)


def _count(blocks: Tensor) -> int:
    return int(blocks[-1]) + 1 if len(blocks) else 0


def _dequantize_parts(weight: _FileTensor, grid: _ScaleGrid) -> Iterator[Tensor]:
    """Yield the values of the weight in bf16, in order and in parts of rows."""
    import torch

    *_, rows, columns = weight.shape
    values = weight.file.get_slice(weight.name)
    step = max(1, _MAX_PART_VALUES // max(1, columns))
    for matrix, scales in enumerate(grid.values):
        for start in range(0, rows, step):
            part = slice(start, start + step)
            stored = values[part] if len(weight.shape) == 2 else values[matrix, part]
            scaled = stored.float().mul_(_expand(scales, grid.rows[part], grid.columns))
            if not bool(torch.isfinite(scaled.sum())):  # quicker than a look at each value
                raise UnsupportedModel(
                    f"the weight `{weight.name}` has values that are not finite", hint=_DAMAGED
                )
            yield scaled.to(torch.bfloat16)


def _expand(scales: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the scale of each value of some rows, or one for all columns.

    `rows` and `columns` are the block rows and the block columns of the values.
    """
    first = int(rows[0])
    used = scales[first : int(rows[-1]) + 1]
    # Columns first: of the few block rows instead of the many rows.
    spread = used if used.shape[1] == 1 else used[:, columns]
    return spread.index_select(0, rows - first)
