"""How a build runs graphs on the machine it has."""

from __future__ import annotations

from deployments.artifacts.types import Device
from deployments.config import EncoderSettings

_CUDA = "CUDAExecutionProvider"


def has_device(device: Device) -> bool:
    """Whether this machine can tell how fast a graph for `device` is."""
    if device is Device.CPU:
        return True
    import onnxruntime

    return _CUDA in onnxruntime.get_available_providers()


def engine_settings(device: Device, threads: int) -> EncoderSettings:
    """An encoder of `threads` threads a pass on `device`, or on the CPU where the device is missing.

    A graph for the GPU computes the same numbers on the CPU provider, only slowly.
    """
    if device is Device.CPU or not has_device(device):
        return EncoderSettings(intra_op_threads=threads)
    return EncoderSettings(intra_op_threads=threads, providers=(_CUDA,))
