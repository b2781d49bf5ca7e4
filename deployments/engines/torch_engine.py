"""Torch, for the GPU encoder: half precision, fused attention, optionally compiled.

Compiled code and CUDA graphs belong to the thread that made them (pytorch issue 123177), so an
engine does everything on one thread of its own; on a GPU two passes at once gain nothing anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deployments.config import EncoderSettings
from deployments.engines.base import EngineInfo, GraphSpec, translate_errors
from deployments.engines.graph_io import (
    Bucket,
    Feeds,
    empty_arrays,
    feeds_of,
    padded,
    smallest_fitting,
    split,
)
from deployments.engines.torch_program import input_names, read_program
from deployments.errors import EngineFailed
from deployments.messages import Batch, Outputs

if TYPE_CHECKING:
    import torch

# What torch.compile's CUDA graphs need per shape: warm up, record, replay.
_WARMING_PASSES = 3


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A program on the device."""

    inputs: tuple[str, ...]  # in the order the module takes them
    module: Callable[..., torch.Tensor]
    in_buckets: Callable[..., torch.Tensor]  # the same, compiled where that was asked for


class TorchEngine:
    """An Engine over one torch program (see torch_program).

    Batches are padded up to the smallest bucket that holds them; a larger batch runs as it is,
    and never compiled, because compiling for its shape would stop the encoder for a minute.
    """

    def __init__(self, spec: GraphSpec, settings: EncoderSettings) -> None:
        self.info = EngineInfo(compute_type=spec.compute_type)
        self._head, self._mask_token = spec.head, spec.mask_token
        self._device = _device(settings)
        self._buckets = tuple(Bucket(*sides) for sides in spec.options.buckets)
        self._loaded: _Loaded | None = None
        if spec.options.compile and not self._buckets:
            raise EngineFailed(f"{spec.path.name}: torch.compile needs buckets")
        self._thread = ThreadPoolExecutor(1, "torch")
        try:
            with translate_errors(spec.path.name):
                self._loaded = self._thread.submit(self._load, spec, settings).result()
        except EngineFailed:
            self.close()
            raise

    def run(self, batch: Batch) -> Outputs:
        """One forward pass. Raises EngineFailed."""
        loaded = self._loaded
        if loaded is None:
            raise EngineFailed(f"{self.info.compute_type}: the engine is closed")
        feeds = feeds_of(batch, loaded.inputs, self._mask_token)
        with translate_errors(self.info.compute_type):
            raw = self._thread.submit(self._pass, loaded, feeds).result()
        return Outputs(split(self._head, raw, batch, feeds.mask_counts))

    def close(self) -> None:
        """Drop the module and its memory."""
        self._thread.shutdown()
        self._loaded = None

    def _load(self, spec: GraphSpec, settings: EncoderSettings) -> _Loaded:
        import torch

        torch.set_num_threads(settings.intra_op_threads)
        module = read_program(spec.path, self._device)
        inputs = input_names(module)
        if not spec.options.compile:
            return _Loaded(inputs, module, module)
        # Beyond the limit torch falls back to running uncompiled, without a word.
        limit = max(torch._dynamo.config.recompile_limit, len(self._buckets) + 1)
        torch._dynamo.config.recompile_limit = limit
        compiled = torch.compile(module, mode="reduce-overhead", dynamic=False)
        for bucket in self._buckets:
            for _ in range(_WARMING_PASSES):
                self._answer(compiled, inputs, empty_arrays(inputs, bucket))
        return _Loaded(inputs, module, compiled)

    def _pass(self, loaded: _Loaded, feeds: Feeds) -> NDArray[np.float32]:
        bucket = smallest_fitting(self._buckets, feeds)
        if bucket is None:
            return self._answer(loaded.module, loaded.inputs, feeds.arrays)
        return self._answer(loaded.in_buckets, loaded.inputs, padded(feeds, bucket))

    def _answer(
        self,
        module: Callable[..., torch.Tensor],
        inputs: tuple[str, ...],
        arrays: dict[str, NDArray[np.int64]],
    ) -> NDArray[np.float32]:
        import torch

        with torch.inference_mode():
            tensors = [torch.from_numpy(arrays[name]).to(self._device) for name in inputs]
            return np.asarray(module(*tensors).float().cpu().numpy())


def missing_device(settings: EncoderSettings) -> str | None:
    """Why torch cannot run on the encoder's device; None when it can."""
    import torch

    if _device(settings) == "cuda" and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None


def _device(settings: EncoderSettings) -> str:
    return "cuda" if any("CUDA" in provider for provider in settings.providers) else "cpu"
