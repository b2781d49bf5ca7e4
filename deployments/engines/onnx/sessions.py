"""Sessions of ONNX Runtime: execution providers, threads, CUDA graphs and memory."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Literal

import onnxruntime as ort

from deployments.artifacts.manifest import EngineOptions
from deployments.artifacts.types import Precision
from deployments.config import EncoderSettings, HardwareSettings
from deployments.engines.base import GraphSpec, translate_errors
from deployments.engines.graph_io import OutputNames, check_inputs
from deployments.engines.onnx.memory import share_arena
from deployments.engines.tensorrt import (
    TENSORRT,
    build_tensorrt_options,
    load_tensorrt_libraries,
)
from deployments.errors import EngineFailed, RequirementMissing
from deployments.host.machine import read_cpu_info

log = logging.getLogger("ray.serve.hundredfold")

CUDA = "CUDAExecutionProvider"

# CUDA graph id of calls that are neither captured nor replayed.
UNCAPTURED = "-1"
# Microseconds that idle threads spin, enough for the gaps within a pass and between two decode
# steps. A longer time would take cores from other processes.
_SPINNING_US = "500"
# The mode "balanced" divides an operator into at least 16 blocks per thread. On two cores decode
# steps took 1 to 16 % less time, with equal logits. Encoders gained nothing.
_BLOCKS = "16"
# "captured": CUDA records the first call with each graph id and replays the record in later calls.
# "balanced": a thread that is done takes the next block of the operator, so that no thread waits
# for a slow thread. "plain": neither of these, and no thread spins after a call.
SessionMode = Literal["plain", "captured", "balanced"]
# By default each allocation of CUDA's arena is twice as large as the last one. That suits passes of
# any shape. A KV cache and passes of fixed shapes need only what they request.
_EXACT = {"arena_extend_strategy": "kSameAsRequested"}
_CUDA_OPTIONS: Mapping[SessionMode, Mapping[str, str]] = {
    "plain": {},
    "captured": {"enable_cuda_graph": "1", **_EXACT},
    "balanced": _EXACT,
}


def output_names(session: ort.InferenceSession) -> OutputNames:
    """Return the names of the outputs that an encoder engine uses."""
    return OutputNames.of([output.name for output in session.get_outputs()])


def select_providers(options: EngineOptions, hardware: HardwareSettings) -> tuple[str, ...]:
    """Return the execution providers of a graph with `options`, in order of preference."""
    return options.providers or hardware.providers


def uses_gpu(options: EngineOptions, hardware: HardwareSettings) -> bool:
    """Return whether a graph with `options` runs on a GPU."""
    return not {CUDA, TENSORRT}.isdisjoint(select_providers(options, hardware))


def missing_provider(providers: tuple[str, ...]) -> str | None:
    """Return the first of `providers` that this build of ONNX Runtime lacks, or None."""
    available = ort.get_available_providers()
    return next((name for name in providers if name not in available), None)


def open_session(
    spec: GraphSpec, settings: EncoderSettings, mode: SessionMode = "plain"
) -> ort.InferenceSession:
    """Open a session and check its inputs.

    Raises EngineFailed for an unknown input, and as `open_bare_session` does.
    """
    session = open_bare_session(
        spec.path, spec.options, settings, spec.precision, mode=mode, host_folder=spec.host_folder
    )
    with translate_errors(spec.path.name):
        check_inputs({i.name for i in session.get_inputs()})
    return session


def open_captured(
    name: str, open_: Callable[[SessionMode], ort.InferenceSession], otherwise: SessionMode
) -> tuple[ort.InferenceSession, bool]:
    """Open a session that captures CUDA graphs. Return it and True.

    If CUDA cannot capture the graph, return a session of the mode `otherwise` and False. One cause
    is an operator that runs on the host. Raises EngineFailed if neither session can be opened.
    """
    try:
        return open_("captured"), True
    except EngineFailed as exc:
        log.info("%s: no CUDA graphs: %s", name, exc.message)
    return open_(otherwise), False


def open_bare_session(
    path: Path,
    engine_options: EngineOptions,
    settings: HardwareSettings,
    precision: Precision,
    *,
    mode: SessionMode = "plain",
    host_folder: Path | None = None,
) -> ort.InferenceSession:
    """Open a session without a check of the graph's inputs.

    A provider stores compiled files in `host_folder`; None: it stores nothing. Raises EngineFailed
    if the graph cannot be opened, RequirementMissing if one of the providers does not start.
    """
    providers = select_providers(engine_options, settings)
    if uses_gpu(engine_options, settings):
        _load_cuda_libraries()
    options = {CUDA: _CUDA_OPTIONS[mode]}
    with translate_errors(path.name):
        if TENSORRT in providers:
            load_tensorrt_libraries()
            options[TENSORRT] = build_tensorrt_options(
                path, precision, engine_options.buckets, host_folder
            )
        session = ort.InferenceSession(
            path,
            sess_options=_build_session_options(engine_options, settings, precision, mode),
            providers=[(name, options.get(name, {})) for name in providers],
            disabled_optimizers=list(engine_options.disabled_optimizers) or None,
            enable_fallback=0,
        )
        # ONNX Runtime skips a provider whose driver is missing, and only logs a warning.
        if idle := sorted(set(providers) - set(session.get_providers())):
            raise RequirementMissing(
                f"{path.name}: `{idle[0]}` did not start; check its driver and libraries"
            )
    return session


@cache
def _load_cuda_libraries() -> None:
    """Load CUDA and cuDNN from the PyPI packages that the extra `cuda` installs.

    The dynamic linker does not search site-packages. Without these packages the function loads the
    libraries of the system.
    """
    ort.preload_dlls()


def graph_options(graph_id: str) -> ort.RunOptions:
    """Return the options of a call that captures or replays the CUDA graph `graph_id`.

    With UNCAPTURED, the call does neither.
    """
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", graph_id)
    return options


def _build_session_options(
    engine_options: EngineOptions,
    settings: HardwareSettings,
    precision: Precision,
    mode: SessionMode,
) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = settings.intra_op_threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    spinning = "1" if engine_options.spinning else "0"
    options.add_session_config_entry("session.intra_op.allow_spinning", spinning)
    options.add_session_config_entry("session.intra_op.spin_duration_us", _SPINNING_US)
    if mode == "plain":
        # The gaps between encoder passes are long, and other processes need the cores meanwhile.
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if mode == "balanced":
        options.add_session_config_entry("session.dynamic_block_base", _BLOCKS)
    if read_cpu_info().int8_overflows:
        options.add_session_config_entry(
            "session.x64quantprecision", "1"
        )  # slower, but int8 sums do not overflow
    if precision == "bf16" and platform.machine() == "aarch64":
        options.add_session_config_entry("mlas.enable_gemm_fastmath_arm64_bfloat16", "1")
    share_arena()
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.log_severity_level = 3
    return options
