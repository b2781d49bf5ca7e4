"""Weights in fp8, made from weights in float types, and their values by another way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from tests.support.quantized_checkpoints import (
    QuantizedTensors,
    is_quantized,
    quantize_weights,
)

FP8_MAX = 448.0

Blocks = tuple[int, int] | None  # rows and columns with a common scale; None: the whole matrix


def iterate_blocks(weight: Tensor, size: Blocks) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Yield the places and the views of the blocks of a matrix."""
    rows, columns = size or tuple(weight.shape)
    for i, row in enumerate(range(0, weight.shape[0], rows)):
        for j, column in enumerate(range(0, weight.shape[1], columns)):
            yield (i, j), weight[row : row + rows, column : column + columns]


def quantize_matrix(
    weight: Tensor, size: Blocks, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return the fp8 values and the scales, [block rows, block columns] of `dtype`."""
    rows, columns = size or tuple(weight.shape)
    scales = torch.empty(
        math.ceil(weight.shape[0] / rows), math.ceil(weight.shape[1] / columns), dtype=dtype
    )
    values = weight.detach().float().clone()
    for place, block in iterate_blocks(values, size):
        scales[place] = block.abs().max() / FP8_MAX
        block.div_(scales[place].float()).clamp_(-FP8_MAX, FP8_MAX)
    return values.to(torch.float8_e4m3fn), scales


def dequantize_matrix(values: Tensor, scales: Tensor, size: Blocks) -> Tensor:
    """Return the values in bf16, computed one block after the other."""
    result = values.float()
    for place, block in iterate_blocks(result, size):
        block.mul_(scales[place].float())
    return result.to(torch.bfloat16)


def quantize_checkpoint(
    directory: Path,
    size: Blocks,
    *,
    dtype: torch.dtype = torch.float32,
    selects: Callable[[str, Tensor], bool] = is_quantized,
) -> dict[str, Tensor]:
    """Put the weights of a checkpoint in fp8, in transformers' format. Return its values in bf16.

    Without `size`, the scale is a scalar, and each weight has a scale of activations beside it.
    """

    def quantize(name: str, weight: Tensor) -> QuantizedTensors:
        values, scales = quantize_matrix(weight, size, dtype)
        stored = {name: values, f"{name}_scale_inv": scales if size else scales.reshape(())}
        if size is None:
            stored[name.replace(".weight", ".activation_scale")] = torch.tensor(0.5, dtype=dtype)
        return QuantizedTensors(stored, dequantize_matrix(values, scales, size))

    scheme = "dynamic" if size else "static"
    block_size = None if size is None else list(size)
    quantization = {"activation_scheme": scheme, "weight_block_size": block_size}
    return quantize_weights(
        directory, quantize, quantization | {"quant_method": "fp8"}, selects=selects
    )
