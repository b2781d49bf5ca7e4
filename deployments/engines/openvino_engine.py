"""The engine OpenVINO: encoders on the CPU, from ONNX graphs.

OpenVINO supports plain exports, `Attention` of opset 23 and the fused operators of ONNX Runtime.
Static int8 (QuantizeLinear, DequantizeLinear) uses int8 kernels. Dynamic int8
(DynamicQuantizeLinear, MatMulInteger) does not use them and is slower than fp32.
"""

from __future__ import annotations

import sys
import threading
from functools import cache
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from deployments.config import EncoderSettings, HardwareSettings
from deployments.engines.base import (
    EngineInfo,
    EngineKind,
    EngineTarget,
    GraphSpec,
    translate_errors,
)
from deployments.engines.forward_pass import Batch, Outputs
from deployments.engines.graph_io import (
    Bucket,
    OutputNames,
    build_feeds,
    check_inputs,
    pad,
    smallest_fitting,
    split,
)
from deployments.errors import EngineFailed

if TYPE_CHECKING:
    import openvino

Requests: TypeAlias = "SimpleQueue[openvino.InferRequest]"  # idle infer requests of one model

DEVICE = "CPU"
# The kernel cache holds _KERNELS_PER_SHAPE kernels per bucket, at least _MIN_CACHED_KERNELS. One
# shape of MiniLM needs about 15. OpenVINO caches kernels per shape, some with a copy of weights.
# With its default of 5,000 per stream, those of a MiniLM int8 graph took 3 GB after 400 shapes.
_MIN_CACHED_KERNELS = 500
_KERNELS_PER_SHAPE = 32


class OpenVinoEngine:
    """Encoder engine for one graph, with `concurrent_passes` infer requests; further passes wait.

    A batch is padded to the smallest bucket that fits, because preparing a new shape takes about as
    long as the pass. A larger batch runs unpadded. OpenVINO computes and copies every output of a
    model. A second model, compiled on first use, therefore computes the unpooled outputs.
    """

    def __init__(self, spec: GraphSpec, settings: EncoderSettings) -> None:
        self._spec, self._settings = spec, settings
        self._buckets = tuple(Bucket(*sides) for sides in spec.options.buckets)
        self._compile_lock = threading.Lock()
        with translate_errors(spec.path.name):
            model = _core().read_model(spec.path)
            self._inputs = frozenset(i.any_name for i in model.inputs)
            check_inputs(self._inputs)
            self._outputs = OutputNames.of([o.any_name for o in model.outputs])
            self.info = EngineInfo(spec.compute_type, self._outputs.tokens is not None)
            output = self._outputs.output
            # Idle requests by output name; None once the engine is closed.
            self._idle: dict[str, Requests] | None = {output: self._compile(model, output)}

    def run(self, batch: Batch) -> Outputs:
        idle = self._idle
        if idle is None:
            raise EngineFailed(f"{self.info.compute_type}: the engine is closed")
        feeds = build_feeds(batch, self._inputs, self._spec.mask_token)
        bucket = smallest_fitting(self._buckets, feeds)
        arrays = pad(feeds, bucket) if bucket else feeds.arrays
        requests = self._get_requests(idle, self._outputs.select(batch))
        request = requests.get()
        try:
            with translate_errors(self.info.compute_type):
                outputs = request.infer(arrays, share_inputs=True)
                raw = np.asarray(outputs[0], dtype=np.float32)
        finally:
            requests.put(request)
        return Outputs(split(self._spec.head, raw, batch, feeds.mask_counts))

    def close(self) -> None:
        self._idle = None

    def _get_requests(self, idle: dict[str, Requests], output: str) -> Requests:
        """Return the queue of idle requests for `output`.

        Compiles the model of this output on first use. Raises EngineFailed if that fails.
        """
        if output in idle:  # without the lock, which another thread may hold for seconds
            return idle[output]
        with self._compile_lock, translate_errors(self._spec.path.name):
            if output not in idle:
                idle[output] = self._compile(_core().read_model(self._spec.path), output)
            return idle[output]

    def _compile(self, model: openvino.Model, output: str) -> Requests:
        """Compile `model` with `output` as its only output."""
        for result in model.get_results():
            if output not in result.get_output_tensor(0).names:
                model.remove_result(result)
        compiled = _core().compile_model(model, DEVICE, _build_config(self._spec, self._settings))
        requests: Requests = SimpleQueue()
        for _ in range(self._settings.concurrent_passes):
            requests.put(compiled.create_infer_request())
        return requests


def missing_precision(target: EngineTarget, _hardware: HardwareSettings) -> str | None:
    """Return why this CPU does not support the precision, or None."""
    if target.precision == "bf16" and "BF16" not in _capabilities():
        return "this CPU has no bf16 instructions"
    return None


def _capabilities() -> tuple[str, ...]:
    return tuple(_core().get_property(DEVICE, "OPTIMIZATION_CAPABILITIES"))


def _uses_bf16(spec: GraphSpec) -> bool:
    return spec.precision == "bf16" or (
        spec.options.inference_precision == "bf16" and "BF16" in _capabilities()
    )


def _build_config(spec: GraphSpec, settings: EncoderSettings) -> dict[str, Any]:
    return {
        # Set explicitly: the default is bf16 on every CPU that supports it.
        "INFERENCE_PRECISION_HINT": "bf16" if _uses_bf16(spec) else "f32",
        # The threads of all streams together. A stream runs one pass at a time.
        "INFERENCE_NUM_THREADS": settings.intra_op_threads * settings.concurrent_passes,
        "NUM_STREAMS": settings.concurrent_passes,
        # With pinning, the threads of several replicas would share the same cores.
        "ENABLE_CPU_PINNING": False,
        "CPU_RUNTIME_CACHE_CAPACITY": max(
            _MIN_CACHED_KERNELS, _KERNELS_PER_SHAPE * len(spec.options.buckets)
        ),
    }


@cache
def _core() -> openvino.Core:
    disable_telemetry()
    import openvino

    return openvino.Core()


def disable_telemetry() -> None:
    """Disable the telemetry of OpenVINO and NNCF, if they are not imported yet.

    The telemetry would also write a client id to the home directory. OpenVINO and NNCF run without
    telemetry if the package `openvino_telemetry` cannot be imported.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]


OPENVINO = EngineKind(
    packages=("openvino",), missing_requirement=missing_precision, open_encoder=OpenVinoEngine
)
