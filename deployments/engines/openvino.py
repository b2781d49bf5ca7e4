"""OpenVINO on the CPU, reading ONNX graphs.

It reads plain exports, the `Attention` of opset 23 and ONNX Runtime's fused operators. Static
int8 (QuantizeLinear, DequantizeLinear) becomes int8 kernels; dynamic int8 (DynamicQuantizeLinear,
MatMulInteger) does not, and runs slower than fp32.
"""

from __future__ import annotations

import sys
from functools import cache
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from deployments.config import LaneSettings
from deployments.engines.base import EngineInfo, GraphSpec
from deployments.engines.border import failures_of
from deployments.engines.buckets import Bucket, padded, smallest_holding
from deployments.engines.heads import check_inputs, feeds_of, split
from deployments.errors import EngineFailed
from deployments.messages import Batch, Outputs

if TYPE_CHECKING:
    import openvino

DEVICE = "CPU"
# Kernels are kept per shape, some with their own copy of the weights. OpenVINO's own bound of
# 5,000 a stream let a MiniLM int8 graph grow to 3 GB within 400 shapes; a shape needs about 15.
_KERNELS = 500
_KERNELS_PER_SHAPE = 32


class OpenVinoEngine:
    """An Engine over one compiled model; as many passes at once as the lane runs, others wait.

    Batches are padded up to the smallest bucket that holds them, a larger one runs as it is:
    every shape that is new costs OpenVINO about as much time as the pass itself. The options of
    ONNX Runtime mean nothing here.
    """

    def __init__(self, spec: GraphSpec, lane: LaneSettings) -> None:
        self.info = EngineInfo(compute_type=spec.compute_type)
        self._head, self._mask_token = spec.head, spec.mask_token
        self._buckets = tuple(Bucket(*sides) for sides in spec.options.buckets)
        with failures_of(spec.path.name):
            core = _core()
            compiled = core.compile_model(
                core.read_model(spec.path), DEVICE, _configuration(spec, lane)
            )
            self._inputs = frozenset(i.any_name for i in compiled.inputs)
            check_inputs(self._inputs)
            self._idle: SimpleQueue[openvino.InferRequest] | None = SimpleQueue()
            for _ in range(lane.runs):
                self._idle.put(compiled.create_infer_request())

    def run(self, batch: Batch) -> Outputs:
        """One forward pass. Raises EngineFailed."""
        idle = self._idle
        if idle is None:
            raise EngineFailed(f"{self.info.compute_type}: the engine is closed")
        feeds = feeds_of(batch, self._inputs, self._mask_token)
        bucket = smallest_holding(self._buckets, feeds)
        arrays = padded(feeds, bucket) if bucket else feeds.arrays
        request = idle.get()
        try:
            with failures_of(self.info.compute_type):
                answers = request.infer(arrays, share_inputs=True)
                raw = np.asarray(answers[0], dtype=np.float32)
        finally:
            idle.put(request)
        return Outputs(split(self._head, raw, batch, feeds.mask_counts))

    def close(self) -> None:
        """Drop the compiled model and its memory."""
        self._idle = None


def lacks_precision(spec: GraphSpec) -> str | None:
    """Why this CPU cannot compute as `spec` asks; None when it can."""
    if spec.precision == "bf16" and "BF16" not in _capabilities():
        return "this CPU has no bf16 instructions"
    return None


def _capabilities() -> tuple[str, ...]:
    return tuple(_core().get_property(DEVICE, "OPTIMIZATION_CAPABILITIES"))


def _wants_bf16(spec: GraphSpec) -> bool:
    return spec.precision == "bf16" or (
        spec.options.float_rest == "bf16" and "BF16" in _capabilities()
    )


def _configuration(spec: GraphSpec, lane: LaneSettings) -> dict[str, Any]:
    return {
        # Named, because the default is bf16 wherever the CPU has it, whatever the graph says.
        "INFERENCE_PRECISION_HINT": "bf16" if _wants_bf16(spec) else "f32",
        # Of all streams together; a stream is what one pass runs on.
        "INFERENCE_NUM_THREADS": lane.threads_per_run * lane.runs,
        "NUM_STREAMS": lane.runs,
        # Pinned threads of several replicas would meet on the same cores.
        "ENABLE_CPU_PINNING": False,
        "CPU_RUNTIME_CACHE_CAPACITY": max(_KERNELS, _KERNELS_PER_SHAPE * len(spec.options.buckets)),
    }


@cache
def _core() -> openvino.Core:
    keep_to_ourselves()
    import openvino

    return openvino.Core()


def keep_to_ourselves() -> None:
    """Keep OpenVINO and NNCF from reporting their use to a web service; call before importing.

    They leave a client id in the home directory, too, unless the package that does it is missing.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
