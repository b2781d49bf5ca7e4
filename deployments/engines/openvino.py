"""OpenVINO on the CPU, reading ONNX graphs.

It reads plain exports, the `Attention` of opset 23 and ONNX Runtime's fused operators. Static
int8 (QuantizeLinear, DequantizeLinear) becomes int8 kernels; dynamic int8 (DynamicQuantizeLinear,
MatMulInteger) does not, and runs slower than fp32.
"""

from __future__ import annotations

import sys
import threading
from functools import cache
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from deployments.config import EncoderSettings
from deployments.engines.base import EngineInfo, GraphSpec, translate_errors
from deployments.engines.graph_io import (
    Bucket,
    OutputNames,
    check_inputs,
    feeds_of,
    padded,
    smallest_fitting,
    split,
)
from deployments.errors import EngineFailed
from deployments.messages import Batch, Outputs

if TYPE_CHECKING:
    import openvino

Requests: TypeAlias = "SimpleQueue[openvino.InferRequest]"  # to one compiled model, not in use

DEVICE = "CPU"
# Kernels are kept per shape, some with their own copy of the weights. OpenVINO's own bound of
# 5,000 a stream let a MiniLM int8 graph grow to 3 GB within 400 shapes; a shape needs about 15.
_KERNELS = 500
_KERNELS_PER_SHAPE = 32


class OpenVinoEngine:
    """An Engine over one compiled model; as many passes at once as the encoder runs, others wait.

    Batches are padded up to the smallest bucket that holds them, a larger one runs as it is:
    every shape that is new costs OpenVINO about as much time as the pass itself. The options of
    ONNX Runtime mean nothing here. OpenVINO computes and copies all that a model answers, so the
    vectors of tokens have a model of their own, compiled when they are first asked for.
    """

    def __init__(self, spec: GraphSpec, settings: EncoderSettings) -> None:
        self._spec, self._settings = spec, settings
        self._buckets = tuple(Bucket(*sides) for sides in spec.options.buckets)
        self._compiling = threading.Lock()
        with translate_errors(spec.path.name):
            model = _core().read_model(spec.path)
            self._inputs = frozenset(i.any_name for i in model.inputs)
            check_inputs(self._inputs)
            self._outputs = OutputNames.of([o.any_name for o in model.outputs])
            self.info = EngineInfo(spec.compute_type, self._outputs.tokens is not None)
            answering = self._compiled(model, self._outputs.answer)
            self._idle: dict[str, Requests] | None = {self._outputs.answer: answering}

    def run(self, batch: Batch) -> Outputs:
        """One forward pass. Raises EngineFailed."""
        idle = self._idle
        if idle is None:
            raise EngineFailed(f"{self.info.compute_type}: the engine is closed")
        feeds = feeds_of(batch, self._inputs, self._spec.mask_token)
        bucket = smallest_fitting(self._buckets, feeds)
        arrays = padded(feeds, bucket) if bucket else feeds.arrays
        requests = self._requests(idle, self._outputs.wanted(batch))
        request = requests.get()
        try:
            with translate_errors(self.info.compute_type):
                answers = request.infer(arrays, share_inputs=True)
                raw = np.asarray(answers[0], dtype=np.float32)
        finally:
            requests.put(request)
        return Outputs(split(self._spec.head, raw, batch, feeds.mask_counts))

    def close(self) -> None:
        """Drop what was compiled and its memory."""
        self._idle = None

    def _requests(self, idle: dict[str, Requests], output: str) -> Requests:
        """What answers `output`, compiled now if nobody asked before. Raises EngineFailed."""
        if output in idle:  # without the lock: compiling takes seconds, and others need not wait
            return idle[output]
        with self._compiling, translate_errors(self._spec.path.name):
            if output not in idle:
                idle[output] = self._compiled(_core().read_model(self._spec.path), output)
            return idle[output]

    def _compiled(self, model: openvino.Model, output: str) -> Requests:
        """Requests to `model`, of which only `output` is left."""
        for result in model.get_results():
            if output not in result.get_output_tensor(0).names:
                model.remove_result(result)
        compiled = _core().compile_model(model, DEVICE, _configuration(self._spec, self._settings))
        requests: Requests = SimpleQueue()
        for _ in range(self._settings.concurrent_passes):
            requests.put(compiled.create_infer_request())
        return requests


def missing_precision(spec: GraphSpec) -> str | None:
    """Why this CPU cannot compute as `spec` asks; None when it can."""
    if spec.precision == "bf16" and "BF16" not in _capabilities():
        return "this CPU has no bf16 instructions"
    return None


def _capabilities() -> tuple[str, ...]:
    return tuple(_core().get_property(DEVICE, "OPTIMIZATION_CAPABILITIES"))


def _wants_bf16(spec: GraphSpec) -> bool:
    return spec.precision == "bf16" or (
        spec.options.inference_precision == "bf16" and "BF16" in _capabilities()
    )


def _configuration(spec: GraphSpec, settings: EncoderSettings) -> dict[str, Any]:
    return {
        # Named, because the default is bf16 wherever the CPU has it, whatever the graph says.
        "INFERENCE_PRECISION_HINT": "bf16" if _wants_bf16(spec) else "f32",
        # Of all streams together; a stream is what one pass runs on.
        "INFERENCE_NUM_THREADS": settings.intra_op_threads * settings.concurrent_passes,
        "NUM_STREAMS": settings.concurrent_passes,
        # Pinned threads of several replicas would meet on the same cores.
        "ENABLE_CPU_PINNING": False,
        "CPU_RUNTIME_CACHE_CAPACITY": max(_KERNELS, _KERNELS_PER_SHAPE * len(spec.options.buckets)),
    }


@cache
def _core() -> openvino.Core:
    disable_telemetry()
    import openvino

    return openvino.Core()


def disable_telemetry() -> None:
    """Keep OpenVINO and NNCF from reporting their use to a web service; call before importing.

    They leave a client id in the home directory, too, unless the package that does it is missing.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
