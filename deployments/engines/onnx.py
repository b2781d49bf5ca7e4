"""ONNX Runtime, on whichever execution providers the settings name."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import onnxruntime as ort

from deployments.artifacts.manifest import EngineOptions
from deployments.artifacts.types import Precision
from deployments.config import EncoderSettings, HardwareSettings
from deployments.engines.base import EngineInfo, GraphSpec, translate_errors
from deployments.engines.graph_io import OutputNames, check_inputs, feeds_of, split
from deployments.errors import EngineFailed
from deployments.machine import read_cpu_info
from deployments.messages import Batch, Outputs

CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"

# Calls with this graph id are neither captured nor replayed.
UNCAPTURED = "-1"
# How long threads that may spin do so: over the gaps within a pass, and that between two steps of a
# decoder. Longer, and idle threads would take the cores from everybody.
_SPINNING_US = "500"


class OnnxEngine:
    """An Engine over one ONNX Runtime session; any batch shape, memory allocated per pass."""

    def __init__(self, spec: GraphSpec, settings: EncoderSettings) -> None:
        self._head, self._mask_token = spec.head, spec.mask_token
        self._session: ort.InferenceSession | None = open_session(spec, settings)
        self._inputs = frozenset(i.name for i in self._session.get_inputs())
        self._outputs = output_names(self._session)
        self.info = EngineInfo(spec.compute_type, self._outputs.tokens is not None)

    def run(self, batch: Batch) -> Outputs:
        """One forward pass. Raises EngineFailed."""
        session = self._session
        if session is None:
            raise EngineFailed(f"{self.info.compute_type}: the engine is closed")
        feeds = feeds_of(batch, self._inputs, self._mask_token)
        wanted = self._outputs.wanted(batch)
        with translate_errors(self.info.compute_type):
            # By name: what is not asked for is not handed over.
            raw = np.asarray(session.run([wanted], feeds.arrays)[0], dtype=np.float32)
        return Outputs(split(self._head, raw, batch, feeds.mask_counts))

    def close(self) -> None:
        """Drop the session and its memory."""
        self._session = None


def output_names(session: ort.InferenceSession) -> OutputNames:
    """What the graph of an open session answers."""
    return OutputNames.of([output.name for output in session.get_outputs()])


def providers_for(spec: GraphSpec, settings: EncoderSettings) -> tuple[str, ...]:
    """The execution providers to run `spec` on, in order of preference."""
    return spec.options.providers or settings.providers


def missing_provider(providers: tuple[str, ...]) -> str | None:
    """The first of `providers` that this build of ONNX Runtime lacks."""
    available = ort.get_available_providers()
    return next((name for name in providers if name not in available), None)


def open_session(
    spec: GraphSpec, settings: EncoderSettings, *, captured: bool = False
) -> ort.InferenceSession:
    """A session over the graph, on exactly the providers asked for. Raises EngineFailed.

    With `captured`, CUDA passes that name a graph id are captured once and then replayed.
    """
    session = open_bare_session(
        spec.path, spec.options, settings, spec.precision, captured=captured
    )
    with translate_errors(spec.path.name):
        check_inputs({i.name for i in session.get_inputs()})
    return session


def open_bare_session(
    path: Path,
    how: EngineOptions,
    settings: HardwareSettings,
    precision: Precision,
    *,
    captured: bool = False,
) -> ort.InferenceSession:
    """As `open_session`, for a graph of any inputs."""
    providers = how.providers or settings.providers
    options = {
        CUDA: {"enable_cuda_graph": "1"} if captured else {},
        TENSORRT: {"trt_fp16_enable": "1"} if precision == "fp16" else {},
    }
    with translate_errors(path.name):
        session = ort.InferenceSession(
            path,
            sess_options=_session_options(how, settings, precision),
            providers=[(name, options.get(name, {})) for name in providers],
            disabled_optimizers=list(how.disabled_optimizers) or None,
            enable_fallback=0,
        )
        # A provider whose driver is missing is left out with no more than a warning.
        if idle := sorted(set(providers) - set(session.get_providers())):
            raise EngineFailed(f"`{idle[0]}` could not be started")
    return session


def graph_options(graph_id: str) -> ort.RunOptions:
    """Of a call that a capturing session keeps as the CUDA graph of that id, or replays."""
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", graph_id)
    return options


def _session_options(
    how: EngineOptions, settings: HardwareSettings, precision: Precision
) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = settings.intra_op_threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    spinning = "1" if how.spinning else "0"
    options.add_session_config_entry("session.intra_op.allow_spinning", spinning)
    options.add_session_config_entry("session.intra_op.spin_duration_us", _SPINNING_US)
    if read_cpu_info().overflows:
        options.add_session_config_entry("session.x64quantprecision", "1")  # slower, and right
    if precision == "bf16" and platform.machine() == "aarch64":
        options.add_session_config_entry("mlas.enable_gemm_fastmath_arm64_bfloat16", "1")
    # Off by default: the arena keeps the largest shape ever seen, per thread, 80 MB more for
    # MiniLM, and no faster (docs/performance.md). Without it memory stays flat.
    options.enable_cpu_mem_arena = how.arena
    options.log_severity_level = 3
    return options
