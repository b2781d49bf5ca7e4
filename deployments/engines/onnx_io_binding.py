"""ONNX Runtime with memory bound once per bucket; on CUDA, passes are captured as CUDA graphs.

A bucket is a shape to which batches are padded. A pass in a bucket allocates nothing and copies
only ids and outputs. On CUDA, the launch of one CUDA graph replaces hundreds of kernel launches.
The CPU provider runs the same code without capture.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from deployments.config import EncoderSettings
from deployments.engines.base import EngineInfo, GraphSpec, translate_errors
from deployments.engines.forward_pass import Batch, Outputs
from deployments.engines.graph_io import (
    Bucket,
    build_feeds,
    empty_arrays,
    pad,
    smallest_fitting,
    split,
    write_padded,
)
from deployments.engines.onnx import (
    CUDA,
    UNCAPTURED,
    graph_options,
    open_session,
    output_names,
    select_providers,
)
from deployments.engines.tensorrt import TENSORRT
from deployments.errors import EngineFailed


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Memory of one bucket for one pass."""

    staged: dict[str, NDArray[np.int64]]  # padded batch on the host
    inputs: dict[str, ort.OrtValue]  # on the device
    output: ort.OrtValue  # on the device
    binding: ort.IOBinding
    options: ort.RunOptions


class _BufferPool:
    """The buffers of one bucket. `acquire` waits until one of them is free."""

    def __init__(self) -> None:
        self._free: SimpleQueue[_Buffers] = SimpleQueue()

    def add(self, buffers: _Buffers) -> None:
        self._free.put(buffers)

    @contextmanager
    def acquire(self) -> Iterator[_Buffers]:
        buffers = self._free.get()
        try:
            yield buffers
        finally:
            self._free.put(buffers)


class IoBindingEngine:
    """Encoder engine that pads batches to buckets. Larger batches run without bound memory."""

    def __init__(self, spec: GraphSpec, settings: EncoderSettings) -> None:
        self._head, self._mask_token = spec.head, spec.mask_token
        first = select_providers(spec.options, settings)[0]
        captured = first == CUDA
        self._device = "cuda" if first in (CUDA, TENSORRT) else "cpu"
        self._compiles_shapes = first == TENSORRT
        # ONNX Runtime cannot capture or replay CUDA graphs of one session on several threads
        # at a time.
        self._session_lock: AbstractContextManager[object] = (
            threading.Lock() if captured else nullcontext()
        )
        session = open_session(spec, settings, "captured" if captured else "plain")
        self._inputs = frozenset(i.name for i in session.get_inputs())
        self._outputs = output_names(session)
        self.info = EngineInfo(spec.compute_type, self._outputs.tokens is not None)
        self._pools: dict[Bucket, _BufferPool] = {}
        with translate_errors(spec.path.name):
            for number, sides in enumerate(spec.options.buckets, start=1):
                bucket = Bucket(*sides)
                self._pools[bucket] = _BufferPool()
                for _ in range(1 if captured else settings.concurrent_passes):
                    graph_id = str(number) if captured else UNCAPTURED
                    buffers = self._bind(session, bucket, graph_id)
                    if captured:
                        self._run_bound(session, buffers)
                    self._pools[bucket].add(buffers)
        self._session: ort.InferenceSession | None = session

    def run(self, batch: Batch) -> Outputs:
        session = self._session
        if session is None:
            raise EngineFailed(f"{self.info.compute_type}: the engine is closed")
        pools = self._pools
        feeds = build_feeds(batch, self._inputs, self._mask_token)
        bucket = smallest_fitting(pools, feeds)
        output = self._outputs.select(batch)
        if bucket is None and self._compiles_shapes and len(batch.lengths) > 1:
            # TensorRT would compile a shape beyond the buckets for minutes, so split the batch.
            return Outputs([row for half in batch.halves() for row in self.run(half).items])
        with translate_errors(self.info.compute_type):
            if bucket is None or batch.unpooled:
                # Unpooled outputs are rare and large, so they have no bound buffers. Their inputs
                # are padded nevertheless: TensorRT spends seconds on every new shape, even on one
                # between two buckets.
                arrays = pad(feeds, bucket) if bucket else feeds.arrays
                raw = self._run_unbound(session, output, arrays)
            else:
                with pools[bucket].acquire() as buffers:
                    write_padded(buffers.staged, feeds)
                    raw = self._run_bound(session, buffers)
        return Outputs(split(self._head, raw, batch, feeds.mask_counts))

    def close(self) -> None:
        self._session = None
        self._pools = {}

    def _run_unbound(
        self, session: ort.InferenceSession, output: str, arrays: dict[str, NDArray[np.int64]]
    ) -> NDArray[np.float32]:
        with self._session_lock:
            outputs = session.run([output], arrays, graph_options(UNCAPTURED))
        return np.asarray(outputs[0], dtype=np.float32)

    def _run_bound(self, session: ort.InferenceSession, buffers: _Buffers) -> NDArray[np.float32]:
        with self._session_lock:
            for name, value in buffers.inputs.items():
                value.update_inplace(buffers.staged[name])
            session.run_with_iobinding(buffers.binding, buffers.options)
            # Always copy: on the CPU the array shares memory that the next pass overwrites.
            return np.array(buffers.output.numpy(), dtype=np.float32)

    def _bind(self, session: ort.InferenceSession, bucket: Bucket, graph_id: str) -> _Buffers:
        staged = empty_arrays(self._inputs, bucket)
        binding = session.io_binding()
        inputs = {}
        for name, array in staged.items():
            # Copy `array`: on the CPU the OrtValue would otherwise share its memory.
            inputs[name] = ort.OrtValue.ortvalue_from_numpy(array.copy(), self._device)
            binding.bind_ortvalue_input(name, inputs[name])
        # The shape of the output is still unknown: the first call allocates the output.
        binding.bind_output(self._outputs.output, self._device)
        with self._session_lock:
            session.run_with_iobinding(binding, graph_options(UNCAPTURED))
        (output,) = binding.get_outputs()
        binding.bind_ortvalue_output(self._outputs.output, output)
        return _Buffers(staged, inputs, output, binding, graph_options(graph_id))
