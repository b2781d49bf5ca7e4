"""Weights of NVIDIA's Model Optimizer: fp8 and NVFP4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from build_artifacts.errors import UnsupportedModel
from build_artifacts.weight_formats.base import (
    UNQUANTIZED_HINT,
    FloatWeight,
    QuantizedWeight,
    WeightFormat,
)
from build_artifacts.weight_formats.fp8 import FP8_DTYPE, decode_fp8
from build_artifacts.weight_formats.nvfp4 import Nvfp4Names, decode_nvfp4
from build_artifacts.weight_formats.scale_grid import ROW, WHOLE

# Algorithms in the config. A weight of each has one of two layouts, which its type tells.
MODELOPT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4")
_NVFP4_NAMES = Nvfp4Names("", "_scale", "_scale_2", is_divisor=False)
_INPUT_FACTORS = ".pre_quant_scale"


@dataclass(frozen=True, slots=True)
class ModeloptFormat(WeightFormat):
    """Weights in fp8 with a scale for the weight or each row, and weights in NVFP4."""

    algorithm: str
    endings: ClassVar = {"": "", "_scale": "", "_scale_2": "", _INPUT_FACTORS: ".weight"}
    unused: ClassVar = (".input_scale", ".output_scale", ".k_scale", ".v_scale")
    quantized_dtypes: ClassVar = {FP8_DTYPE, "U8"}

    @property
    def title(self) -> str:
        return f"{self.algorithm} of Model Optimizer"

    def decode(self, weight: QuantizedWeight) -> FloatWeight:
        if (factors := weight.find(_INPUT_FACTORS)) is not None:
            raise UnsupportedModel(
                f"the checkpoint multiplies inputs by `{factors.name}`, which cannot be built",
                hint=UNQUANTIZED_HINT,
            )
        values = weight.require("", (FP8_DTYPE, "U8"))
        if values.dtype == FP8_DTYPE:
            return decode_fp8(weight, "_scale", (WHOLE, ROW))
        return decode_nvfp4(weight, _NVFP4_NAMES)
