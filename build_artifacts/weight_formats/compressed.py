"""Weights of compressed-tensors: packed or plain integers, fp8 and NVFP4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from build_artifacts.checkpoints.checkpoint import DAMAGED_HINT
from build_artifacts.errors import UnsupportedModel
from build_artifacts.weight_formats.base import (
    CONFIG_HINT,
    SCALE_DTYPES,
    FileTensor,
    FloatWeight,
    QuantizedWeight,
    WeightFormat,
    check_shape,
)
from build_artifacts.weight_formats.fp8 import FP8_DTYPE, decode_fp8
from build_artifacts.weight_formats.nvfp4 import Nvfp4Names, decode_nvfp4
from build_artifacts.weight_formats.packing import WORD_BITS, unpack_words
from build_artifacts.weight_formats.scale_grid import (
    ScaleBlock,
    ScaleGrid,
    build_block_grid,
    build_scaled_weight,
    choose_block,
    count_blocks,
    read_groups,
)

if TYPE_CHECKING:
    from torch import Tensor

Storage = Literal["fp8", "int8", "packed", "nvfp4"]  # how a weight is stored
_NVFP4_NAMES = Nvfp4Names("_packed", "_scale", "_global_scale", is_divisor=True)


@dataclass(frozen=True, slots=True)
class CompressedFormat(WeightFormat):
    """Weights of one or several schemes. The types of a weight's tensors select its scheme.

    `blocks` has the possible scale blocks by storage and bits.
    """

    blocks: Mapping[tuple[Storage, int], tuple[ScaleBlock, ...]]
    endings: ClassVar = dict.fromkeys(
        ("", "_packed", "_scale", "_global_scale", "_zero_point", "_g_idx", "_shape"), ""
    )
    unused: ClassVar = (
        *(f".{each}_scale" for each in ("input", "output", "q", "k", "v")),
        *(f".{each}_zero_point" for each in ("input", "output", "q", "k", "v")),
        *(f".{each}_global_scale" for each in ("input", "output", "q", "k", "v")),
    )
    quantized_dtypes: ClassVar = {FP8_DTYPE, "I8"}

    @property
    def title(self) -> str:
        names = {"fp8": "fp8", "nvfp4": "NVFP4"}
        kinds = [names.get(storage, f"int{bits}") for storage, bits in self.blocks]
        return " and ".join(dict.fromkeys(kinds)) or "float types"

    def decode(self, weight: QuantizedWeight) -> FloatWeight:
        packed = weight.find("_packed")
        if packed is not None and packed.dtype == "U8":
            self._find_blocks("nvfp4", 4, packed)
            return decode_nvfp4(weight, _NVFP4_NAMES)
        if packed is not None:
            return self._decode_packed(weight)
        values = weight.require("", (FP8_DTYPE, "I8"))
        if values.dtype == FP8_DTYPE:
            return decode_fp8(weight, "_scale", self._find_blocks("fp8", 8, values))
        return self._decode_int8(weight, self._find_blocks("int8", 8, values))

    def _find_blocks(
        self, storage: Storage, bits: int, tensor: FileTensor
    ) -> tuple[ScaleBlock, ...]:
        blocks = self.blocks.get((storage, bits))
        if blocks is None:
            raise UnsupportedModel(
                f"the tensor `{tensor.name}` has the type {tensor.dtype}, but config.json states "
                "no quantization of this type",
                hint=CONFIG_HINT,
            )
        return blocks

    def _decode_int8(self, weight: QuantizedWeight, blocks: tuple[ScaleBlock, ...]) -> FloatWeight:
        values = weight.require_matrix("", ("I8",))
        scales = weight.require("_scale", SCALE_DTYPES)
        shape = (values.shape[0], values.shape[1])
        block = choose_block(scales, blocks, shape)
        zeros = weight.find("_zero_point", ("I8",))
        if zeros is not None:
            check_shape(zeros, scales.shape, shape)

        def build_grid() -> ScaleGrid:
            read = 0 if zeros is None else zeros.read().float()
            return build_block_grid(scales.read_scales(), shape, block, read)

        return build_scaled_weight(shape, values.read_rows, build_grid)

    def _decode_packed(self, weight: QuantizedWeight) -> FloatWeight:
        words = weight.require_matrix("_packed", ("I32",))
        scales = weight.require("_scale", SCALE_DTYPES)
        stored_shape = weight.require("_shape", ("I64", "I32"))
        check_shape(stored_shape, (2,), words.shape)
        rows, columns = (int(each) for each in stored_shape.read())
        shape = (rows, columns)
        bits = self._find_bits(words, shape)
        block = choose_block(scales, self._find_blocks("packed", bits, words), shape)
        zeros = weight.find("_zero_point", ("I32", "I8"))
        if zeros is not None and zeros.dtype == "I32":
            packed_rows = count_blocks(rows, WORD_BITS // bits)
            check_shape(zeros, (packed_rows, *scales.shape[1:]), shape)
        elif zeros is not None:
            check_shape(zeros, scales.shape, shape)
        order = weight.find("_g_idx", ("I32", "I64"))
        if order is not None:
            check_shape(order, (columns,), shape)

        def build_grid() -> ScaleGrid:
            read = _read_zeros(zeros, bits, rows)
            grid = build_block_grid(scales.read_scales(), shape, block, read)
            groups = None if order is None else read_groups(order, grid.scales.shape[-1])
            return grid if groups is None else grid._replace(columns=groups)

        return build_scaled_weight(shape, partial(_read_packed, words, bits, columns), build_grid)

    def _find_bits(self, words: FileTensor, shape: tuple[int, int]) -> int:
        """Return the bits of the first packed scheme that gives the packed weight this shape."""
        for storage, bits in self.blocks:
            expected = (shape[0], count_blocks(shape[1], WORD_BITS // bits))
            if storage == "packed" and words.shape == expected:
                return bits
        raise UnsupportedModel(
            f"the tensor `{words.name}` has the shape {list(words.shape)}, which is not that of a "
            f"weight of the shape {list(shape)} in the bits that config.json states",
            hint=DAMAGED_HINT,
        )


def _read_packed(words: FileTensor, bits: int, columns: int, _: int, part: slice) -> Tensor:
    return unpack_words(words.values[part], bits)[:, :columns].float()


def _read_zeros(zeros: FileTensor | None, bits: int, rows: int) -> Tensor | int:
    """Return what is subtracted from packed codes, which are integers plus half their number.

    Zeros are packed along the rows, or are plain integers.
    """
    half = 1 << (bits - 1)
    if zeros is None:
        return half
    if zeros.dtype == "I8":
        return zeros.read().float() + half
    return unpack_words(zeros.read().T, bits)[:, :rows].T.float()
