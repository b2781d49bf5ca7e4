"""Engines: one file each, heavy imports only when chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from deployments.config import LaneSettings
from deployments.engines.base import Engine, EngineInfo, GraphSpec
from deployments.errors import EngineFailed

__all__ = [
    "ENGINES",
    "Engine",
    "EngineInfo",
    "EngineKind",
    "GraphSpec",
    "check_lane",
    "lacking",
    "open_engine",
    "runs_here",
]


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One way to run graphs."""

    package: str  # what must be installed to import it
    lacking: Callable[[GraphSpec, LaneSettings], str | None]  # called only with the package there
    open: Callable[[GraphSpec, LaneSettings], Engine]


def _onnxruntime_lacks(spec: GraphSpec, lane: LaneSettings) -> str | None:
    from deployments.engines.onnx import missing_provider, providers_for

    missing = missing_provider(providers_for(spec, lane))
    return f"onnxruntime has no `{missing}` here" if missing else None


def _open_onnxruntime(spec: GraphSpec, lane: LaneSettings) -> Engine:
    if spec.options.buckets:
        from deployments.engines.onnx_io_binding import BoundEngine

        return BoundEngine(spec, lane)
    from deployments.engines.onnx import OnnxEngine

    return OnnxEngine(spec, lane)


def _openvino_lacks(spec: GraphSpec, _lane: LaneSettings) -> str | None:
    from deployments.engines.openvino import lacks_precision

    return lacks_precision(spec)


def _open_openvino(spec: GraphSpec, lane: LaneSettings) -> Engine:
    from deployments.engines.openvino import OpenVinoEngine

    return OpenVinoEngine(spec, lane)


def _torch_lacks(_spec: GraphSpec, lane: LaneSettings) -> str | None:
    from deployments.engines.torch_engine import lacks_device

    return lacks_device(lane)


def _open_torch(spec: GraphSpec, lane: LaneSettings) -> Engine:
    from deployments.engines.torch_engine import TorchEngine

    return TorchEngine(spec, lane)


# Engines by the name that a manifest gives them.
ENGINES: Mapping[str, EngineKind] = {
    "onnxruntime": EngineKind("onnxruntime", _onnxruntime_lacks, _open_onnxruntime),
    "openvino": EngineKind("openvino", _openvino_lacks, _open_openvino),
    "torch": EngineKind("torch", _torch_lacks, _open_torch),
}


def lacking(spec: GraphSpec, lane: LaneSettings) -> str | None:
    """What this process lacks to run `spec` on `lane`, as a sentence; None when it can."""
    kind = ENGINES[spec.engine]
    if find_spec(kind.package) is None:
        return f"the package `{kind.package}` is not installed"
    return kind.lacking(spec, lane)


def runs_here(spec: GraphSpec, lane: LaneSettings) -> bool:
    """Whether this process has what it takes to run `spec` on `lane`."""
    return lacking(spec, lane) is None


def open_engine(spec: GraphSpec, lane: LaneSettings) -> Engine:
    """The engine for one graph. Raises EngineFailed, also for what `lacking` names."""
    if reason := lacking(spec, lane):
        raise EngineFailed(f"{spec.path.name}: {reason}")
    return ENGINES[spec.engine].open(spec, lane)


def check_lane(lane: LaneSettings) -> None:
    """Raise EngineFailed when this process cannot serve the lane at all, whatever the model."""
    from deployments.engines.onnx import missing_provider

    if missing := missing_provider(lane.providers):
        raise EngineFailed(f"onnxruntime has no `{missing}` here")
