"""Weights in NVFP4: values of four bits (E2M1), with scales in fp8 and one scale of these."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from build_artifacts.weight_formats.base import (
    SCALE_DTYPES,
    FileTensor,
    FloatWeight,
    QuantizedWeight,
    check_shape,
)
from build_artifacts.weight_formats.fp8 import FP8_DTYPE
from build_artifacts.weight_formats.packing import look_up, unpack_nibbles
from build_artifacts.weight_formats.scale_grid import (
    WHOLE,
    ScaleBlock,
    ScaleGrid,
    build_block_grid,
    build_scaled_weight,
    choose_block,
    count_blocks,
)

if TYPE_CHECKING:
    from torch import Tensor

# Values of the codes 0 to 7. The fourth bit is the sign.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK = ScaleBlock(1, 16)


class Nvfp4Names(NamedTuple):
    """Endings of a weight's tensors, and whether scales are divided by that of the weight."""

    codes: str
    scales: str
    weight_scale: str
    is_divisor: bool


def decode_nvfp4(weight: QuantizedWeight, names: Nvfp4Names) -> FloatWeight:
    packed = weight.require_matrix(names.codes, ("U8",))
    scales = weight.require_matrix(names.scales, (FP8_DTYPE,))
    common = weight.require(names.weight_scale, SCALE_DTYPES)
    shape = (packed.shape[0], 2 * packed.shape[1])
    check_shape(scales, (shape[0], count_blocks(shape[1], _BLOCK.columns)), shape)
    choose_block(common, (WHOLE,), shape)

    def build_grid() -> ScaleGrid:
        factor = common.read_scales().reshape(())
        read = scales.read_scales()
        scaled = read / factor if names.is_divisor else read * factor
        return build_block_grid(scaled, shape, _BLOCK)

    return build_scaled_weight(shape, partial(_read_values, packed), build_grid)


def _read_values(packed: FileTensor, _: int, part: slice) -> Tensor:
    import torch

    table = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)])
    codes = unpack_nibbles(packed.values[part], is_high_first=False)
    return look_up(table, codes)
