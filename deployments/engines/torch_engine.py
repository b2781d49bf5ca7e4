"""The engine torch: encoder programs in half precision with fused attention, and decoders.

Compiled code and CUDA graphs belong to the thread that created them, so an encoder engine uses one
thread (engine_thread.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deployments.config import EncoderSettings, HardwareSettings
from deployments.engines.base import (
    EngineInfo,
    EngineKind,
    GraphSpec,
    translate_errors,
)
from deployments.engines.capture_lock import find_capture_lock
from deployments.engines.decoder import DecoderEngine, DecoderSpec
from deployments.engines.engine_thread import EngineThread
from deployments.engines.forward_pass import Batch, Outputs
from deployments.engines.graph_io import (
    Bucket,
    Feeds,
    build_feeds,
    empty_arrays,
    pad,
    smallest_fitting,
    split,
)
from deployments.engines.torch_devices import (
    missing_torch_device,
    return_cached_memory,
    uses_cuda,
)
from deployments.engines.torch_program import input_names, read_program
from deployments.errors import EngineFailed

if TYPE_CHECKING:
    import torch

_CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class _LoadedProgram:
    """An encoder program on the device."""

    inputs: tuple[str, ...]  # in the order of the parameters
    module: Callable[..., torch.Tensor]
    in_buckets: Callable[..., torch.Tensor]  # for shapes of buckets; compiled if requested


class TorchEngine:
    """Encoder engine for one torch program (torch_program.py).

    A batch is padded to the smallest bucket that fits. A larger batch runs unpadded and uncompiled,
    because compiling for its shape would block the encoder for a minute.
    """

    def __init__(self, spec: GraphSpec, settings: EncoderSettings) -> None:
        self.info = EngineInfo(compute_type=spec.compute_type)
        self._head, self._mask_token = spec.head, spec.mask_token
        self._device = _CUDA if uses_cuda(settings) else "cpu"
        self._buckets = tuple(Bucket(*sides) for sides in spec.options.buckets)
        self._loaded: _LoadedProgram | None = None
        if spec.options.compile and not self._buckets:
            raise EngineFailed(f"{spec.path.name}: torch.compile needs buckets")
        self._lock = find_capture_lock(is_gpu=self._device == _CUDA)
        self._thread = EngineThread("torch")
        try:
            with translate_errors(spec.path.name):
                self._loaded = self._thread.call(self._load, spec, settings)
        except EngineFailed:
            self.close()
            raise

    def run(self, batch: Batch) -> Outputs:
        loaded = self._loaded
        if loaded is None:
            raise EngineFailed(f"{self.info.compute_type}: the engine is closed")
        feeds = build_feeds(batch, loaded.inputs, self._mask_token)
        with translate_errors(self.info.compute_type):
            raw = self._thread.call(self._pass, loaded, feeds)
        return Outputs(split(self._head, raw, batch, feeds.mask_counts))

    def close(self) -> None:
        self._thread.close()
        with self._lock.run_pass():
            self._loaded = None
            return_cached_memory(self._device)

    def _load(self, spec: GraphSpec, settings: EncoderSettings) -> _LoadedProgram:
        import torch

        torch.set_num_threads(settings.intra_op_threads)
        with self._lock.open_model():
            module = read_program(spec.path, self._device)
        inputs = input_names(module)
        if not spec.options.compile:
            return _LoadedProgram(inputs, module, module)
        # Beyond this number of compiled shapes, torch runs uncompiled code without a warning.
        limit = max(torch._dynamo.config.recompile_limit, len(self._buckets) + 1)
        torch._dynamo.config.recompile_limit = limit
        compiled = torch.compile(module, mode="reduce-overhead", dynamic=False)
        for bucket in self._buckets:
            arrays = empty_arrays(inputs, bucket)
            # CUDA graphs of torch.compile need three passes per shape: compile, capture, replay.
            for lock in (self._lock.open_model(), self._lock.capture(), self._lock.run_pass()):
                with lock:
                    self._compute(compiled, inputs, arrays)
        return _LoadedProgram(inputs, module, compiled)

    def _pass(self, loaded: _LoadedProgram, feeds: Feeds) -> NDArray[np.float32]:
        bucket = smallest_fitting(self._buckets, feeds)
        with self._lock.run_pass():
            if bucket is None:
                return self._compute(loaded.module, loaded.inputs, feeds.arrays)
            return self._compute(loaded.in_buckets, loaded.inputs, pad(feeds, bucket))

    def _compute(
        self,
        module: Callable[..., torch.Tensor],
        inputs: tuple[str, ...],
        arrays: dict[str, NDArray[np.int64]],
    ) -> NDArray[np.float32]:
        import torch

        with torch.inference_mode():
            tensors = [torch.from_numpy(arrays[name]).to(self._device) for name in inputs]
            return np.asarray(module(*tensors).float().cpu().numpy())


def open_torch_decoder(
    spec: DecoderSpec, hardware: HardwareSettings, *, slots: int, context: int
) -> DecoderEngine:
    """Open a decoder through torch, on the CPU or on one or more GPUs.

    Raises EngineFailed for an encoder-decoder, and if the decoder cannot be opened.
    """
    from deployments.engines.tensor_parallel_decoder import TensorParallelDecoder
    from deployments.engines.torch_decoder import TorchDecoder

    if spec.generation_config.encoder_decoder is not None:
        raise EngineFailed(f"{spec.path.name}: {spec.engine} does not run encoder-decoder models")
    is_single = spec.options.tensor_parallel_size == 1
    engine = TorchDecoder if is_single else TensorParallelDecoder
    return engine(spec, hardware, slots=slots, context=context)


TORCH = EngineKind(
    packages=("torch",),
    missing_requirement=missing_torch_device,
    open_encoder=TorchEngine,
    open_decoder=open_torch_decoder,
)
