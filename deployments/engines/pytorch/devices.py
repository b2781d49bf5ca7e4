"""CUDA devices of a replica, as torch sees them."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sysconfig
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deployments.artifacts.types import Precision
from deployments.config import HardwareSettings
from deployments.engines.base import EngineTarget
from deployments.engines.pytorch.capture_lock import CaptureLock
from deployments.error_causes import list_causes

if TYPE_CHECKING:
    import torch

log = logging.getLogger("ray.serve.hundredfold")


def missing_torch_device(target: EngineTarget, hardware: HardwareSettings) -> str | None:
    """Return why torch cannot run `target` on the devices of a replica, or None."""
    import torch

    if not uses_cuda(hardware):
        return None
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if target.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "this GPU has no bf16 instructions (compute capability below 8.0)"
    required, actual = target.options.tensor_parallel_size, torch.cuda.device_count()
    if actual < required:
        return f"the model needs {required} GPUs (tensor parallelism), the replica has {actual}"
    return _missing_build_tool() if target.options.compile else None


def _missing_build_tool() -> str | None:
    """Return what torch.compile lacks on a GPU, or None.

    On a GPU, torch.compile uses Triton. On first use, Triton builds C code against Python.
    """
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "torch.compile needs a C compiler on a GPU: install `gcc`"
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    if not header.is_file():
        return f"torch.compile needs `{header}` on a GPU: install the headers of Python"
    return None


def has_group_kernels(precision: Precision) -> bool:
    """Return whether torch multiplies groups of rows, as of experts, without waiting for the GPU.

    Elsewhere, the CPU reads the sizes of the groups first.
    https://github.com/pytorch/pytorch/issues/169970
    """
    if precision != "bf16" or find_spec("torch") is None:
        return False
    import torch

    if not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] in (9, 10)


def uses_cuda(hardware: HardwareSettings) -> bool:
    return any("CUDA" in provider for provider in hardware.providers)


def to_host(tensor: torch.Tensor) -> NDArray[np.float32]:
    """Return an fp32 tensor as an array. Waits until the device has computed the tensor."""
    return np.asarray(tensor.cpu().numpy())


def clear_frames(error: BaseException) -> None:
    """Drop the local variables of the calls that raised `error` or its causes.

    They refer to the modules of an engine that could not be opened, as long as `error` is handled.
    """
    for each in list_causes(error):
        traceback.clear_frames(each.__traceback__)


def release_modules(device: str, lock: CaptureLock) -> None:
    """Free the memory of the modules that the caller has dropped, for use by other libraries too.

    Modules refer to themselves, so only a garbage collection frees their weights. Replicas collect
    rarely (host/python_gc.py). On a GPU, torch then still caches the memory.
    """
    gc.collect()  # takes up to 0.15 s, so the caller does not hold the lock
    if device == "cuda":
        import torch

        with lock.run_pass():
            try:
                torch.cuda.empty_cache()
            except RuntimeError:
                # CUDA cannot be used any more. The error that caused this says more than this one,
                # which would hide it: callers close engines while they handle an error.
                log.warning("the cached memory of the GPU was not freed", exc_info=True)
