"""How a build runs graphs on the machine it has."""

from __future__ import annotations

from deployments.artifacts.manifest import Device
from deployments.config import LaneSettings

_CUDA = "CUDAExecutionProvider"


def is_present(device: Device) -> bool:
    """Whether this machine can tell how fast a graph for `device` is."""
    if device is Device.CPU:
        return True
    import onnxruntime

    return _CUDA in onnxruntime.get_available_providers()


def lane_for(device: Device, threads: int) -> LaneSettings:
    """A lane of `threads` threads a pass on `device`, or on the CPU where the device is missing.

    A graph for the GPU computes the same numbers on the CPU provider, only slowly.
    """
    if device is Device.CPU or not is_present(device):
        return LaneSettings(threads_per_run=threads)
    return LaneSettings(threads_per_run=threads, providers=(_CUDA,))
