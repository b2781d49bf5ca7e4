"""The engine transformers: decoder checkpoints as transformers runs them, on the CPU or GPUs."""

from __future__ import annotations

from importlib.util import find_spec

from deployments.config import HardwareSettings
from deployments.engines.base import EngineKind, EngineTarget
from deployments.engines.pytorch.devices import missing_torch_device, uses_cuda
from deployments.engines.pytorch.engine import open_torch_decoder


def _missing_requirement(target: EngineTarget, hardware: HardwareSettings) -> str | None:
    # transformers computes with quantized weights through bitsandbytes.
    if target.precision in ("int8", "nf4") and find_spec("bitsandbytes") is None:
        return "the package `bitsandbytes` is not installed"
    if target.options.attention == "flash":
        if find_spec("flash_attn") is None:
            return "the package `flash_attn` is not installed"
        if not uses_cuda(hardware):
            return "`flash_attn` computes on GPUs only"
    return missing_torch_device(target, hardware)


TRANSFORMERS = EngineKind(
    packages=("torch", "transformers", "accelerate"),
    missing_requirement=_missing_requirement,
    open_decoder=open_torch_decoder,
)
