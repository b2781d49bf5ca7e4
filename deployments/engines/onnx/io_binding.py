"""ONNX Runtime with memory that is bound at the start; on CUDA, passes are captured as CUDA graphs.

A bucket is a shape to which batches are padded. Each bucket has bound memory for every concurrent
pass. A pass in a bucket copies the batch to this memory, and the outputs from it. On CUDA, the
launch of one CUDA graph replaces hundreds of kernel launches. The CPU provider runs the same code
without capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from deployments.config import EncoderSettings
from deployments.engines.base import EngineInfo, GraphSpec, translate_errors
from deployments.engines.engine_thread import EngineThread
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
from deployments.engines.onnx.sessions import (
    CUDA,
    UNCAPTURED,
    graph_options,
    open_captured,
    open_session,
    output_names,
    select_providers,
    uses_gpu,
)
from deployments.engines.pytorch.capture_lock import find_capture_lock
from deployments.engines.tensorrt import TENSORRT
from deployments.errors import EngineFailed

_DEVICES = {CUDA: "cuda", TENSORRT: "cuda"}  # device of bound memory, by the first provider
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Bound memory for one pass in a bucket, the shape to which its batch is padded."""

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
    """Encoder engine that pads batches to buckets.

    Larger batches run without bound memory. With TensorRT they are first split until the parts fit
    or have one item. On CUDA, one thread opens, captures and runs the session (engine_thread.py).
    """

    def __init__(self, spec: GraphSpec, settings: EncoderSettings) -> None:
        self._head, self._mask_token = spec.head, spec.mask_token
        first = select_providers(spec.options, settings)[0]
        self._device = _DEVICES.get(first, "cpu")
        self._compiles_shapes = first == TENSORRT
        self._lock = find_capture_lock(is_gpu=uses_gpu(spec.options, settings))
        self._thread = EngineThread("onnxruntime") if first == CUDA else None
        self._pools: dict[Bucket, _BufferPool] = {}
        self._session: ort.InferenceSession | None = None
        try:
            self._session = self._call(self._open, spec, settings)
        except EngineFailed:
            self.close()
            raise

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
                # Unpooled outputs are rare and large, so they have no bound buffers. The batch is
                # padded nevertheless: TensorRT spends seconds on every new shape, even on a shape
                # between two buckets.
                arrays = pad(feeds, bucket) if bucket else feeds.arrays
                raw = self._call(self._run_unbound, session, output, arrays)
            else:
                with pools[bucket].acquire() as buffers:
                    write_padded(buffers.staged, feeds)
                    raw = self._call(self._run_bound, session, buffers, self._lock.run_pass())
        return Outputs(split(self._head, raw, batch, feeds.mask_counts))

    def close(self) -> None:
        with self._lock.run_pass():
            self._session = None
            self._pools = {}
        if self._thread is not None:
            self._thread.close()

    def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` on the thread of the engine, if it has one."""
        if self._thread is None:
            return function(*args, **kwargs)
        return self._thread.call(function, *args, **kwargs)

    def _open(self, spec: GraphSpec, settings: EncoderSettings) -> ort.InferenceSession:
        """Open the session and bind memory for each bucket. On CUDA, also capture the passes."""
        with self._lock.open_model():
            session, is_captured = self._open_session(spec, settings)
        self._inputs = frozenset(i.name for i in session.get_inputs())
        self._outputs = output_names(session)
        self.info = EngineInfo(spec.compute_type, self._outputs.tokens is not None)
        passes = settings.concurrent_passes if self._thread is None else 1
        # Without CUDA graphs, padding would cost time on CUDA and gain nothing.
        has_buckets = is_captured or self._thread is None
        with translate_errors(spec.path.name):
            for number, sides in enumerate(spec.options.buckets if has_buckets else (), start=1):
                bucket = Bucket(*sides)
                self._pools[bucket] = _BufferPool()
                for _ in range(passes):
                    with self._lock.open_model():
                        graph_id = str(number) if is_captured else UNCAPTURED
                        buffers = self._bind(session, bucket, graph_id)
                    if is_captured:
                        self._run_bound(session, buffers, self._lock.capture())
                    self._pools[bucket].add(buffers)
        return session

    def _open_session(
        self, spec: GraphSpec, settings: EncoderSettings
    ) -> tuple[ort.InferenceSession, bool]:
        """Open the session. Return it, and whether passes are captured as CUDA graphs."""
        if self._thread is None:
            return open_session(spec, settings), False
        return open_captured(spec.path.name, partial(open_session, spec, settings), "plain")

    def _run_unbound(
        self, session: ort.InferenceSession, output: str, arrays: dict[str, NDArray[np.int64]]
    ) -> NDArray[np.float32]:
        with self._lock.run_pass():
            outputs = session.run([output], arrays, graph_options(UNCAPTURED))
            return np.asarray(outputs[0], dtype=np.float32)

    def _run_bound(
        self,
        session: ort.InferenceSession,
        buffers: _Buffers,
        lock: AbstractContextManager[object],
    ) -> NDArray[np.float32]:
        with lock:
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
        session.run_with_iobinding(binding, graph_options(UNCAPTURED))
        (output,) = binding.get_outputs()
        binding.bind_ortvalue_output(self._outputs.output, output)
        return _Buffers(staged, inputs, output, binding, graph_options(graph_id))
