"""ONNX Runtime with memory bound once per bucket, captured as one CUDA graph where there is CUDA.

A pass in a bucket allocates nothing and copies only ids in and answers out; on CUDA its hundreds
of kernel launches become one. The CPU provider runs the same code without capture.
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
from deployments.engines.graph_io import (
    Bucket,
    empty_arrays,
    feeds_of,
    fill,
    padded,
    smallest_fitting,
    split,
)
from deployments.engines.onnx import (
    CUDA,
    TENSORRT,
    UNCAPTURED,
    graph_options,
    open_session,
    output_names,
    providers_for,
)
from deployments.errors import EngineFailed
from deployments.messages import Batch, Outputs


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Memory of one bucket for one pass at a time."""

    staged: dict[str, NDArray[np.int64]]  # where a batch is padded, on the host
    inputs: dict[str, ort.OrtValue]  # on the device
    output: ort.OrtValue  # on the device
    binding: ort.IOBinding
    options: ort.RunOptions


class _BufferPool:
    """The buffers of one bucket; who finds none free waits."""

    def __init__(self) -> None:
        self._free: SimpleQueue[_Buffers] = SimpleQueue()

    def add(self, buffers: _Buffers) -> None:
        self._free.put(buffers)

    @contextmanager
    def taken(self) -> Iterator[_Buffers]:
        buffers = self._free.get()
        try:
            yield buffers
        finally:
            self._free.put(buffers)


class IoBindingEngine:
    """An Engine that pads batches up to buckets; a batch larger than all of them runs unbound."""

    def __init__(self, spec: GraphSpec, settings: EncoderSettings) -> None:
        self._head, self._mask_token = spec.head, spec.mask_token
        first = providers_for(spec, settings)[0]
        captured = first == CUDA
        self._device = "cuda" if first in (CUDA, TENSORRT) else "cpu"
        # ONNX Runtime neither captures nor replays on several threads of one session.
        self._turn: AbstractContextManager[object] = threading.Lock() if captured else nullcontext()
        session = open_session(spec, settings, captured=captured)
        self._inputs = frozenset(i.name for i in session.get_inputs())
        self._outputs = output_names(session)
        self.info = EngineInfo(spec.compute_type, self._outputs.tokens is not None)
        self._lines: dict[Bucket, _BufferPool] = {}
        with translate_errors(spec.path.name):
            for number, sides in enumerate(spec.options.buckets, start=1):
                bucket = Bucket(*sides)
                self._lines[bucket] = _BufferPool()
                for _ in range(1 if captured else settings.concurrent_passes):
                    graph_id = str(number) if captured else UNCAPTURED
                    buffers = self._bind(session, bucket, graph_id)
                    if captured:
                        self._pass(session, buffers)
                    self._lines[bucket].add(buffers)
        self._session: ort.InferenceSession | None = session

    def run(self, batch: Batch) -> Outputs:
        """One forward pass, in the smallest bucket that holds the batch. Raises EngineFailed."""
        session = self._session
        if session is None:
            raise EngineFailed(f"{self.info.compute_type}: the engine is closed")
        lines = self._lines
        feeds = feeds_of(batch, self._inputs, self._mask_token)
        bucket = smallest_fitting(lines, feeds)
        wanted = self._outputs.wanted(batch)
        with translate_errors(self.info.compute_type):
            if bucket is None or batch.unpooled:
                # Vectors of tokens are rare and large, so nothing is bound for them. Padded all
                # the same: TensorRT spends seconds on every shape that it has not met.
                arrays = padded(feeds, bucket) if bucket else feeds.arrays
                raw = self._unbound(session, wanted, arrays)
            else:
                with lines[bucket].taken() as buffers:
                    fill(buffers.staged, feeds)
                    raw = self._pass(session, buffers)
        return Outputs(split(self._head, raw, batch, feeds.mask_counts))

    def close(self) -> None:
        """Drop the session and its memory."""
        self._session = None
        self._lines = {}

    def _unbound(
        self, session: ort.InferenceSession, output: str, arrays: dict[str, NDArray[np.int64]]
    ) -> NDArray[np.float32]:
        with self._turn:
            answers = session.run([output], arrays, graph_options(UNCAPTURED))
        return np.asarray(answers[0], dtype=np.float32)

    def _pass(self, session: ort.InferenceSession, buffers: _Buffers) -> NDArray[np.float32]:
        with self._turn:
            for name, value in buffers.inputs.items():
                value.update_inplace(buffers.staged[name])
            session.run_with_iobinding(buffers.binding, buffers.options)
            # A copy in any case: on the CPU the array is the very memory of the next pass.
            return np.array(buffers.output.numpy(), dtype=np.float32)

    def _bind(self, session: ort.InferenceSession, bucket: Bucket, graph_id: str) -> _Buffers:
        staged = empty_arrays(self._inputs, bucket)
        binding = session.io_binding()
        inputs = {}
        for name, array in staged.items():
            # Of a copy: on the CPU the value is the very memory of the array.
            inputs[name] = ort.OrtValue.ortvalue_from_numpy(array.copy(), self._device)
            binding.bind_ortvalue_input(name, inputs[name])
        # How large the answer is, the graph says by answering once into memory of its own choice.
        binding.bind_output(self._outputs.answer, self._device)
        with self._turn:
            session.run_with_iobinding(binding, graph_options(UNCAPTURED))
        (output,) = binding.get_outputs()
        binding.bind_ortvalue_output(self._outputs.answer, output)
        return _Buffers(staged, inputs, output, binding, graph_options(graph_id))
