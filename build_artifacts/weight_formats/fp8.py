"""Weights in fp8 (E4M3) with scales: transformers' own format, FBGEMM's and AutoFP8's."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from build_artifacts.errors import UnsupportedModel
from build_artifacts.weight_formats.base import (
    SCALE_DTYPES,
    UNQUANTIZED_HINT,
    FloatWeight,
    QuantizedWeight,
    WeightFormat,
    shape_error,
)
from build_artifacts.weight_formats.scale_grid import (
    ROW,
    WHOLE,
    ScaleBlock,
    ScaleGrid,
    build_block_grid,
    build_scaled_weight,
    choose_block,
    count_blocks,
    index_blocks,
)

if TYPE_CHECKING:
    from torch import Tensor

FP8_DTYPE = "F8_E4M3"  # name of the type in safetensors files
_FP8_SCALE_DTYPES = (*SCALE_DTYPES, "F8_E8M0")
_GATE_UP = "gate_up_proj"  # part of the name of a weight that is both projections of experts
_INVERSE, _DIRECT = "_scale_inv", "_scale"


@dataclass(frozen=True, slots=True)
class Fp8Format(WeightFormat):
    """Weights that are fp8 values times their scales. All scales multiply, also `_scale_inv`.

    `block` is that of `weight_scale_inv`. A `weight_scale`, of FBGEMM or AutoFP8, belongs to a row
    or to the weight.
    """

    block: ScaleBlock
    endings: ClassVar = {"": "", _INVERSE: "", _DIRECT: ""}
    unused: ClassVar = (
        *(".activation_scale", "_activation_scale", ".input_scale", ".output_scale"),
        *(".input_scale_ub", ".k_scale", ".v_scale", ".kv_scale"),
    )
    quantized_dtypes: ClassVar = {FP8_DTYPE}

    @property
    def title(self) -> str:
        return "fp8"

    def decode(self, weight: QuantizedWeight) -> FloatWeight:
        if weight.find(_INVERSE) is None and weight.find(_DIRECT) is not None:
            return decode_fp8(weight, _DIRECT, (WHOLE, ROW))
        return _decode_experts(weight, self.block) or decode_fp8(weight, _INVERSE, (self.block,))


def decode_fp8(weight: QuantizedWeight, ending: str, blocks: Collection[ScaleBlock]) -> FloatWeight:
    """Return the weight of one matrix. `ending` is that of its scales."""
    values = weight.require_matrix("", (FP8_DTYPE,))
    scales = weight.require(ending, _FP8_SCALE_DTYPES)
    rows, columns = values.shape
    block = choose_block(scales, blocks, (rows, columns))

    def build_grid() -> ScaleGrid:
        return build_block_grid(scales.read_scales(), (rows, columns), block)

    return build_scaled_weight(values.shape, values.read_rows, build_grid)


def _decode_experts(weight: QuantizedWeight, block: ScaleBlock) -> FloatWeight | None:
    """Return a weight with a matrix for each expert, or None for a weight of another shape.

    Gate and up projection of an expert in one matrix may have blocks of their own. Raises
    UnsupportedModel for scales with two readings.
    """
    values = weight.require("", (FP8_DTYPE,))
    if len(values.shape) != 3:
        return None
    scales = weight.require(_INVERSE, _FP8_SCALE_DTYPES)
    experts, rows, columns = values.shape
    width = count_blocks(columns, block.columns)
    whole = (experts, count_blocks(rows, block.rows), width)
    halves = (experts, 2 * count_blocks(rows // 2, block.rows), width) if rows % 2 == 0 else whole
    is_one_per_expert = block == WHOLE and scales.shape in ((), (1,), (experts,))
    if scales.shape not in (whole, halves) and not is_one_per_expert:
        raise shape_error(scales, whole, values.shape)
    are_halves_other = rows % 2 == 0 and rows // 2 % (block.rows or 1) != 0
    if _GATE_UP in weight.name and scales.shape == whole == halves and are_halves_other:
        raise UnsupportedModel(
            f"the scales `{scales.name}` may belong to blocks of the whole weight, or of its gate "
            "and its up projection",
            hint=UNQUANTIZED_HINT,
        )
    has_halves = scales.shape == halves != whole
    count = halves if has_halves else whole

    def build_grid() -> ScaleGrid:
        read = scales.read_scales()
        return ScaleGrid(
            scales=(read.expand(experts) if is_one_per_expert else read).reshape(count),
            rows=_index_halves(rows, block.rows) if has_halves else index_blocks(rows, block.rows),
            columns=index_blocks(columns, block.columns),
        )

    return build_scaled_weight(values.shape, values.read_rows, build_grid)


def _index_halves(rows: int, block: int | None) -> Tensor:
    """Return the block of each row, for blocks that start again at the second half of the rows."""
    import torch

    half = index_blocks(rows // 2, block)
    return torch.cat([half, half + count_blocks(rows // 2, block)])
