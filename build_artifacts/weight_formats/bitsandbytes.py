"""Weights of bitsandbytes: NF4 or FP4 with a scale per block, and int8 with one per row."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from build_artifacts.checkpoints.checkpoint import DAMAGED_HINT
from build_artifacts.errors import UnsupportedModel
from build_artifacts.types import MAX_INT8
from build_artifacts.weight_formats.base import (
    UNQUANTIZED_HINT,
    FileTensor,
    FloatWeight,
    QuantizedWeight,
    WeightFormat,
    check_shape,
    split_rows,
)
from build_artifacts.weight_formats.packing import look_up, unpack_nibbles
from build_artifacts.weight_formats.scale_grid import (
    ROW,
    ScaleGrid,
    build_block_grid,
    build_scaled_weight,
    count_blocks,
)

if TYPE_CHECKING:
    from torch import Tensor

_STATE = ".quant_state.bitsandbytes__"  # with the name of the type
_TYPES = ("nf4", "fp4")
# Bytes of the types in which packed codes may be stored, such as bf16 for training with FSDP.
_STORAGE_BYTES = {"U8": 1, "BF16": 2, "F16": 2, "F32": 4}
# Errors for a state that is not JSON, has other fields, is too deep or has infinite numbers.
_STATE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError)
_MAX_BLOCK = 4096  # values; the library has no larger blocks


class _NestedScales(NamedTuple):
    """Scales that are codes themselves: a value of `table` times a scale, plus the offset."""

    table: FileTensor
    scales: FileTensor
    block: int
    offset: float


class _FourBitBlocks(NamedTuple):
    """A weight in 4 bits, as one sequence of blocks of values."""

    codes: FileTensor
    table: FileTensor  # values of the 16 codes
    scales: FileTensor
    nested: _NestedScales | None
    block: int
    size: int  # number of values


@dataclass(frozen=True, slots=True)
class Bnb4BitFormat(WeightFormat):
    """Weights whose shape, block sizes and offset are JSON in a tensor of bytes."""

    endings: ClassVar = {
        **dict.fromkeys(("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"), ""),
        **dict.fromkeys((f"{_STATE}{each}" for each in _TYPES), ""),
    }
    quantized_dtypes: ClassVar = {"U8"}

    @property
    def title(self) -> str:
        return "4 bits of bitsandbytes"

    def decode(self, weight: QuantizedWeight) -> FloatWeight:
        name = next((each for each in _TYPES if weight.find(f"{_STATE}{each}")), _TYPES[0])
        state_tensor = weight.require(f"{_STATE}{name}", ("U8",))
        shape, sizes, offset = _read_state(state_tensor)
        block, nested_block = sizes
        count = math.prod(shape)
        codes = weight.require("", tuple(_STORAGE_BYTES))
        check_shape(codes, (count_blocks(count, 2 * _STORAGE_BYTES[codes.dtype]), 1), shape)
        blocks = count_blocks(count, block)
        table = weight.require(".quant_map", ("F32",))
        check_shape(table, (16,), shape)
        scales = weight.require(".absmax", ("F32", "U8"))
        check_shape(scales, (blocks,), shape)
        nested = None
        if scales.dtype == "U8":
            outer = weight.require(".nested_absmax", ("F32",))
            check_shape(outer, (count_blocks(blocks, nested_block),), shape)
            outer_table = weight.require(".nested_quant_map", ("F32",))
            check_shape(outer_table, (256,), shape)
            nested = _NestedScales(outer_table, outer, nested_block, offset)
        return FloatWeight(
            shape, partial(_read_blocks, _FourBitBlocks(codes, table, scales, nested, block, count))
        )


def _read_state(tensor: FileTensor) -> tuple[tuple[int, ...], tuple[int, int], float]:
    """Return shape, sizes of the blocks and of nested blocks, and offset of a weight.

    Raises UnsupportedModel for other content.
    """
    try:
        state = json.loads(bytes(tensor.read().tolist()))
        shape = tuple(int(size) for size in state["shape"])
        sizes = int(state["blocksize"]), int(state.get("nested_blocksize", 1))
        offset = float(state.get("nested_offset", 0))
    except _STATE_ERRORS as exc:
        raise UnsupportedModel(
            f"the tensor `{tensor.name}` has no JSON object with `shape` and `blocksize`",
            hint=DAMAGED_HINT,
        ) from exc
    is_possible = min((*shape, *sizes)) >= 1 and max(sizes) <= _MAX_BLOCK and sizes[0] % 8 == 0
    if not is_possible or not math.isfinite(offset):
        raise UnsupportedModel(
            f"the tensor `{tensor.name}` states impossible sizes", hint=DAMAGED_HINT
        )
    return shape, sizes, offset


def _read_blocks(weight: _FourBitBlocks) -> Iterator[Tensor]:
    """Yield the values in order, in parts of whole blocks."""
    import torch

    table = weight.table.read_scales()
    codes, scales = weight.codes.values, weight.scales.values
    scale_nested = None if weight.nested is None else _load_nested(weight.nested)
    stored_block = weight.block // 2 // _STORAGE_BYTES[weight.codes.dtype]
    for part in split_rows(count_blocks(weight.size, weight.block), weight.block):
        stored = codes[part.start * stored_block : part.stop * stored_block]
        packed = stored.reshape(-1).view(torch.uint8)
        values = look_up(table, unpack_nibbles(packed, is_high_first=True))
        used = scales[part] if scale_nested is None else scale_nested(scales[part], part)
        values = values[: weight.size - part.start * weight.block]  # the last byte may have one
        yield values.mul_(used.repeat_interleave(weight.block)[: len(values)])


def _load_nested(nested: _NestedScales) -> Callable[[Tensor, slice], Tensor]:
    """Return the function from codes of scales to scales, for some blocks of a weight."""
    import torch

    table, outer = nested.table.read_scales(), nested.scales.read_scales()

    def scale(codes: Tensor, part: slice) -> Tensor:
        blocks = torch.arange(part.start, part.stop) // nested.block
        return look_up(table, codes) * outer[blocks] + nested.offset

    return scale


@dataclass(frozen=True, slots=True)
class BnbInt8Format(WeightFormat):
    """Weights in int8, whose largest value of each row, `SCB`, is stored as 127."""

    endings: ClassVar = {"": "", ".SCB": ".weight", ".weight_format": ".weight"}
    quantized_dtypes: ClassVar = {"I8"}

    @property
    def title(self) -> str:
        return "int8 of bitsandbytes"

    def decode(self, weight: QuantizedWeight) -> FloatWeight:
        values = weight.require_matrix("", ("I8",))
        maxima = weight.require(".SCB", ("F32",))
        shape = (values.shape[0], values.shape[1])
        check_shape(maxima, (shape[0],), shape)
        layout = weight.find(".weight_format")
        if layout is not None and bool(layout.read().any()):
            raise UnsupportedModel(
                f"the tensor `{layout.name}` states a layout for one kind of GPU",
                hint=UNQUANTIZED_HINT,
            )

        def build_grid() -> ScaleGrid:
            return build_block_grid(maxima.read_scales() / MAX_INT8, shape, ROW)

        return build_scaled_weight(shape, values.read_rows, build_grid)
