"""The engine torch: encoder programs with fused attention, and decoders, on GPUs and CPUs.

On a GPU, an encoder captures a CUDA graph for each of its buckets (capture.py). The CUDA
graphs of torch.compile are not used. Their state exists only in the first thread that compiles
(pytorch issue 123177). Each engine has its own thread, so a second compiled model could not be
opened.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
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
from deployments.engines.pytorch.capture import (
    CapturedCall,
    CaptureFailed,
    EngineGraphs,
    capture,
)
from deployments.engines.pytorch.capture_lock import CaptureLock, find_capture_lock
from deployments.engines.pytorch.devices import (
    clear_frames,
    missing_torch_device,
    release_modules,
    to_host,
    uses_cuda,
)
from deployments.engines.pytorch.program import input_names, read_program
from deployments.errors import EngineFailed

if TYPE_CHECKING:
    import torch

_CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class _DeviceProgram:
    """An encoder's torch program (program.py), loaded on a device."""

    module: Callable[..., torch.Tensor]
    inputs: tuple[str, ...]  # names, in the order of the module's parameters
    device: str

    def to_tensors(self, arrays: dict[str, NDArray[np.int64]]) -> list[torch.Tensor]:
        import torch

        return [torch.from_numpy(arrays[name]).to(self.device) for name in self.inputs]

    def compute(self, arrays: dict[str, NDArray[np.int64]]) -> NDArray[np.float32]:
        return to_host(self.module(*self.to_tensors(arrays)).float())


class _CapturedShape:
    """A program for the shape of one bucket, as a CUDA graph with tensors at fixed addresses."""

    def __init__(
        self,
        program: _DeviceProgram,
        bucket: Bucket,
        graphs: EngineGraphs,
        lock: CaptureLock,
    ) -> None:
        """Capture the program for `bucket`. Raises CaptureFailed.

        The warm-up calls before the capture compile a module of torch.compile.
        """
        self._program = program
        with lock.open_model():
            self._tensors = program.to_tensors(empty_arrays(program.inputs, bucket))
        self._output: torch.Tensor | None = None
        captured = capture(self._call, graphs, lock, waits=True)
        assert captured is not None  # None only if `waits` is False
        self._captured: CapturedCall = captured

    def compute(self, arrays: dict[str, NDArray[np.int64]]) -> NDArray[np.float32]:
        import torch

        for name, tensor in zip(self._program.inputs, self._tensors, strict=True):
            tensor.copy_(torch.from_numpy(arrays[name]))
        self._captured.replay()
        assert self._output is not None
        return to_host(self._output)

    def _call(self) -> None:
        # This reference reserves the output's memory: no other shape of the engine writes to it.
        self._output = self._program.module(*self._tensors).float()


class TorchEngine:
    """Encoder engine for one torch program (program.py).

    A batch is padded to the smallest bucket that fits. A larger batch runs unpadded and uncompiled,
    because compiling for its shape would block the encoder for a minute.
    """

    def __init__(self, spec: GraphSpec, settings: EncoderSettings) -> None:
        self.info = EngineInfo(compute_type=spec.compute_type)
        self._head, self._mask_token = spec.head, spec.mask_token
        self._device = _CUDA if uses_cuda(settings) else "cpu"
        self._buckets = tuple(Bucket(*sides) for sides in spec.options.buckets)
        self._program: _DeviceProgram | None = None
        # By bucket: a CUDA graph on a GPU, unless its capture fails, else the program, compiled if
        # `options.compile`.
        self._in_buckets: dict[Bucket, _DeviceProgram | _CapturedShape] = {}
        if spec.options.compile and not self._buckets:
            raise EngineFailed(f"{spec.path.name}: torch.compile needs buckets")
        self._lock = find_capture_lock(is_gpu=self._device == _CUDA)
        self._graphs = EngineGraphs()
        self._thread = EngineThread("torch")
        try:
            with translate_errors(spec.path.name):
                self._program = self._thread.call(self._load, spec, settings)
        except EngineFailed as exc:
            clear_frames(exc)
            self.close()
            raise

    def run(self, batch: Batch) -> Outputs:
        program = self._program
        if program is None:
            raise EngineFailed(f"{self.info.compute_type}: the engine is closed")
        feeds = build_feeds(batch, program.inputs, self._mask_token)
        with translate_errors(self.info.compute_type):
            raw = self._thread.call(self._pass, program, feeds)
        return Outputs(split(self._head, raw, batch, feeds.mask_counts))

    def close(self) -> None:
        self._thread.close()
        with self._lock.run_pass():
            self._program = None
            self._in_buckets.clear()
            self._graphs.drop()
        release_modules(self._device, self._lock)  # collects garbage, which may have graphs
        self._graphs.give_back_stream()

    def _load(self, spec: GraphSpec, settings: EncoderSettings) -> _DeviceProgram:
        import torch

        torch.set_num_threads(settings.intra_op_threads)
        with self._lock.open_model():
            module = read_program(spec.path, self._device)
        program = _DeviceProgram(module, input_names(module), self._device)
        in_buckets = program
        if spec.options.compile:
            # Beyond `recompile_limit` shapes, torch runs uncompiled code without a warning.
            limit = max(torch._dynamo.config.recompile_limit, len(self._buckets) + 1)
            torch._dynamo.config.recompile_limit = limit
            in_buckets = replace(program, module=torch.compile(module, dynamic=False))
        with torch.inference_mode():
            self._prepare_buckets(in_buckets, is_compiled=spec.options.compile)
        return program

    def _prepare_buckets(self, program: _DeviceProgram, *, is_compiled: bool) -> None:
        """Prepare every bucket: on a GPU capture the program, on the CPU compile it if requested.

        A module of torch.compile compiles in its first call of each shape, on a GPU before the
        capture.
        """
        for bucket in self._buckets:
            if self._device == _CUDA:
                with suppress(CaptureFailed):  # it is logged
                    shape = _CapturedShape(program, bucket, self._graphs, self._lock)
                    self._in_buckets[bucket] = shape
                    continue
            self._in_buckets[bucket] = program
            if is_compiled:
                with self._lock.open_model():
                    program.compute(empty_arrays(program.inputs, bucket))

    def _pass(self, program: _DeviceProgram, feeds: Feeds) -> NDArray[np.float32]:
        import torch

        bucket = smallest_fitting(self._buckets, feeds)
        with self._lock.run_pass(), torch.inference_mode():
            if bucket is None:
                return program.compute(feeds.arrays)
            return self._in_buckets[bucket].compute(pad(feeds, bucket))


def open_torch_decoder(
    spec: DecoderSpec, hardware: HardwareSettings, *, slots: int, context: int
) -> DecoderEngine:
    """Open a decoder through torch, on the CPU or on one or more GPUs.

    Raises EngineFailed for an encoder-decoder, and if the decoder cannot be opened.
    """
    from deployments.engines.pytorch.decoder import TorchDecoder
    from deployments.engines.pytorch.tensor_parallel_decoder import TensorParallelDecoder

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
