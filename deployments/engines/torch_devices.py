"""CUDA devices of a replica, as torch sees them."""

from __future__ import annotations

from deployments.config import HardwareSettings
from deployments.engines.base import EngineTarget


def missing_torch_device(target: EngineTarget, hardware: HardwareSettings) -> str | None:
    """Return why torch cannot run `target` on the devices of a replica, or None."""
    import torch

    if not uses_cuda(hardware):
        return None
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    required, actual = target.options.tensor_parallel_size, torch.cuda.device_count()
    if actual < required:
        return f"the model needs {required} GPUs (tensor parallelism), the replica has {actual}"
    return None


def uses_cuda(hardware: HardwareSettings) -> bool:
    return any("CUDA" in provider for provider in hardware.providers)


def return_cached_memory(device: str) -> None:
    """Return the free memory that torch keeps on a GPU. Other libraries cannot use it."""
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()
