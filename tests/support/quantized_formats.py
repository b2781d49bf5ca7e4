"""Weights of a checkpoint in each format that is converted, quantized from float weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.integer_weights import (
    IntegerWeight,
    pack_awq,
    pack_compressed,
    pack_gptq,
    quantize_groups,
)
from tests.support.quantized_checkpoints import QuantizedTensors, quantize_weights

_BLOCK = 64  # values with a scale, of bitsandbytes
_NVFP4_GROUP = 16
_NVFP4_SCALE = 2.0**-8
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class TestedFormat(NamedTuple):
    """How a format stores a weight, and what config.json states about it."""

    __test__ = False

    quantize: Callable[[str, Tensor], QuantizedTensors]
    quantization: Mapping[str, Any]
    dtype: torch.dtype = torch.bfloat16


def _name(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name.removesuffix('weight')}{end}": tensor for end, tensor in tensors.items()}


def _quantize_integers(
    pack: Callable[[IntegerWeight], Mapping[str, Tensor]], dtype: torch.dtype, **options: Any
) -> Callable[[str, Tensor], QuantizedTensors]:
    def quantize(name: str, weight: Tensor) -> QuantizedTensors:
        integers = quantize_groups(weight, dtype=dtype, **options)
        return QuantizedTensors(_name(name, pack(integers)), integers.compute(dtype))

    return quantize


def _quantize_int8(name: str, weight: Tensor) -> QuantizedTensors:
    """Quantize rows to int8, with the largest value of each at 127."""
    maxima = weight.float().abs().amax(1)
    codes = (weight.float() * 127 / maxima[:, None]).round().to(torch.int8)
    layout = torch.tensor(0, dtype=torch.uint8)
    stored = _name(name, {"weight": codes, "SCB": maxima, "weight_format": layout})
    return QuantizedTensors(stored, (codes * (maxima / 127)[:, None]).bfloat16())


def _quantize_nf4(name: str, weight: Tensor) -> QuantizedTensors:
    """Quantize blocks to 16 quantiles of the normal distribution, scaled to their largest value."""
    quantiles = torch.special.ndtri(torch.linspace(0.03, 0.97, 16))
    table = quantiles / quantiles.max()
    blocks = weight.float().reshape(-1, _BLOCK)
    scales = blocks.abs().amax(1)
    codes = (blocks[..., None] / scales[:, None, None] - table).abs().argmin(-1)
    pairs = codes.reshape(-1, 2)
    state = {"quant_type": "nf4", "blocksize": _BLOCK, "shape": list(weight.shape)}
    stored = {
        "weight": (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8),
        "weight.absmax": scales,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode())).to(
            torch.uint8
        ),
    }
    values = (table[codes] * scales[:, None]).reshape(weight.shape)
    return QuantizedTensors(_name(name, stored), values.bfloat16())


def _quantize_nvfp4(name: str, weight: Tensor) -> QuantizedTensors:
    """Quantize to E2M1 as Model Optimizer does: the scale of the weight multiplies the others."""
    groups = weight.float().reshape(len(weight), -1, _NVFP4_GROUP)
    scales = (groups.abs().amax(-1) / 6 / _NVFP4_SCALE).to(torch.float8_e4m3fn)
    factors = scales.float()[..., None] * _NVFP4_SCALE
    codes = (groups[..., None] / factors[..., None] - _E2M1).abs().argmin(-1)
    pairs = codes.reshape(len(weight), -1, 2)
    stored = {
        "weight": (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8),
        "weight_scale": scales,
        "weight_scale_2": torch.tensor(_NVFP4_SCALE),
        "input_scale": torch.tensor(0.1),
    }
    values = (_E2M1[codes] * factors).reshape(weight.shape)
    return QuantizedTensors(_name(name, stored), values.bfloat16())


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
FORMATS: Mapping[str, TestedFormat] = {
    "gptq": TestedFormat(
        _quantize_integers(pack_gptq, torch.float16, bits=4, size=32), _GPTQ, torch.float16
    ),
    "gptq-8-reordered": TestedFormat(
        _quantize_integers(
            lambda weight: pack_gptq(weight, 0), torch.bfloat16, bits=8, size=32, is_reordered=True
        ),
        _GPTQ | {"bits": 8, "desc_act": True, "checkpoint_format": "gptq_v2"},
    ),
    "awq": TestedFormat(
        _quantize_integers(pack_awq, torch.float16, bits=4, size=32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
        torch.float16,
    ),
    "compressed-int4": TestedFormat(
        _quantize_integers(
            lambda weight: pack_compressed(weight, has_zeros=True), torch.bfloat16, bits=4, size=32
        ),
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4}},
        },
    ),
    "modelopt-nvfp4": TestedFormat(
        _quantize_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    ),
    "bnb-nf4": TestedFormat(_quantize_nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "bnb-int8": TestedFormat(
        _quantize_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}
    ),
}


def quantize_format(directory: Path, name: str, **options: Any) -> dict[str, Tensor]:
    """Put the weights of a checkpoint in the format `name`. Return the values of all tensors."""
    tested = FORMATS[name]
    return quantize_weights(
        directory, tested.quantize, tested.quantization, dtype=tested.dtype, **options
    )
