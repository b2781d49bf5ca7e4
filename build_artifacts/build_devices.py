"""Devices and engine settings that a build uses on this host."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from build_artifacts.presets import GPU_FP16, GPU_FP16_BOUND
from build_artifacts.recipes import BuildRecipe
from deployments.artifacts.types import Device
from deployments.config import EncoderSettings
from deployments.host.gpus import find_visible, read_gpus

_CUDA = "CUDAExecutionProvider"


@cache
def has_device(device: Device) -> bool:
    """Return whether this host can measure graphs for `device`.

    CUDA must run on the first visible GPU. The CUDA provider of ONNX Runtime alone proves nothing,
    because its package may be installed on a host without a usable GPU.
    """
    if device is Device.CPU:
        return True
    visible = find_visible(read_gpus())
    if not visible or visible[0].problem:
        return False  # before the import, so that hosts without a GPU do not import ONNX Runtime
    import onnxruntime

    return _CUDA in onnxruntime.get_available_providers()


def engine_settings(device: Device, threads: int) -> EncoderSettings:
    """Return settings with `threads` threads per forward pass, on the CPU if `device` is missing.

    ONNX Runtime's CPU provider also runs GPU graphs, only slowly. A host without a GPU can
    therefore check their accuracy.
    """
    if device is Device.CPU or not has_device(device):
        return EncoderSettings(intra_op_threads=threads)
    return EncoderSettings(intra_op_threads=threads, providers=(_CUDA,))


def fit_to_host(recipe: BuildRecipe) -> BuildRecipe:
    """Return the recipe with CUDA graphs if this host has a GPU, else the recipe itself.

    When an engine opens the graph, it runs a forward pass in each bucket (a shape with a CUDA
    graph). Without a GPU, the engine of the accuracy gate would do this on the CPU for minutes.
    """
    return with_cuda_graphs(recipe) if has_device(Device.GPU) else recipe


def with_cuda_graphs(recipe: BuildRecipe) -> BuildRecipe:
    """Return the recipe with CUDA graphs for GPU_FP16, if GPU_FP16 is its only GPU graph.

    A small forward pass then takes half the time. A forward pass of more than 4,096 tokens takes
    4 to 37 % longer (docs/performance.md#gpu).
    """
    if recipe.candidates_for(Device.GPU) != (GPU_FP16,):
        return recipe
    candidates = (GPU_FP16_BOUND if c is GPU_FP16 else c for c in recipe.candidates)
    return replace(recipe, candidates=tuple(candidates))
