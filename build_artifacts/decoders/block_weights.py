"""Weights as integers in blocks that share a scale, for MatMuls and for mixtures of experts.

ONNX Runtime's operators multiply these weights by activations rounded to int8, also in blocks. The
blocks are symmetric, so nodes have no zero points.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from build_artifacts.types import FloatArray

Bits = Literal[4, 8]

BLOCK_SIZE = 32  # values of a weight column that share a scale
INT8_ACCURACY_LEVEL = 4  # ONNX Runtime's `accuracy_level` for int8 products
# Operators of a mixture of experts, with float and with integer weights, and the indices of the
# weights among the inputs of EXPERTS. A bias may follow each of them.
EXPERTS, QUANTIZED_EXPERTS = "MoE", "QMoE"
EXPERT_WEIGHT_INPUTS = (2, 4)


class QuantizedBlocks(NamedTuple):
    """Quantized weight [K, N], stored by column in ceil(K / 32) blocks."""

    packed: NDArray[np.uint8]  # [N, blocks, bytes per block]
    scales: FloatArray  # [N, blocks]


def quantize_weight(weight: FloatArray, bits: Bits) -> QuantizedBlocks:
    """Quantize a weight [K, N]."""
    from onnxruntime.quantization.matmul_nbits_quantizer import (
        DefaultWeightOnlyQuantConfig,
        DefaultWeightOnlyQuantizer,
    )

    config = DefaultWeightOnlyQuantConfig(block_size=BLOCK_SIZE, is_symmetric=True, bits=bits)
    packed, scales, _ = DefaultWeightOnlyQuantizer(config).qbits_block_quant(
        np.ascontiguousarray(weight)
    )
    return QuantizedBlocks(packed, scales.reshape(packed.shape[:2]))


def has_whole_blocks(shape: Sequence[int]) -> bool:
    """Return whether the weights of experts, [experts, N, K], can be quantized."""
    return shape[-1] % BLOCK_SIZE == 0


def quantize_experts(weights: FloatArray, bits: Bits) -> QuantizedBlocks:
    """Quantize the weights of experts, [experts, N, K]: [experts, N, bytes], [experts, N, blocks].

    K must be a multiple of 32.
    """
    experts, rows, size = weights.shape
    packed = np.empty((experts, rows, size * bits // 8), np.uint8)
    scales = np.empty((experts, rows, size // BLOCK_SIZE), np.float32)
    for index, weight in enumerate(weights):
        blocks = quantize_weight(weight.T, bits)
        packed[index] = blocks.packed.reshape(rows, -1)
        scales[index] = blocks.scales
    return QuantizedBlocks(packed, scales)


def expert_attributes(bits: Bits) -> dict[str, Any]:
    """Return the attributes of QUANTIZED_EXPERTS that EXPERTS does not have."""
    return {
        "expert_weight_bits": bits,
        "block_size": BLOCK_SIZE,
        "accuracy_level": INT8_ACCURACY_LEVEL,
    }
