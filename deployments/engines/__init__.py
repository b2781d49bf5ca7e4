"""Engines: one file each, heavy imports only when chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from deployments.config import EncoderSettings
from deployments.engines.base import EncoderEngine, EngineInfo, GraphSpec
from deployments.errors import EngineFailed

__all__ = [
    "ENGINES",
    "EncoderEngine",
    "EngineInfo",
    "EngineKind",
    "GraphSpec",
    "can_run",
    "check_providers",
    "lacking",
    "open_engine",
]


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One way to run graphs."""

    package: str  # what must be installed to import it
    missing_requirement: Callable[
        [GraphSpec, EncoderSettings], str | None
    ]  # called only with the package there
    open: Callable[[GraphSpec, EncoderSettings], EncoderEngine]


def _onnxruntime_lacks(spec: GraphSpec, settings: EncoderSettings) -> str | None:
    from deployments.engines.onnx import missing_provider, providers_for

    missing = missing_provider(providers_for(spec, settings))
    return f"onnxruntime has no `{missing}` here" if missing else None


def _open_onnxruntime(spec: GraphSpec, settings: EncoderSettings) -> EncoderEngine:
    if spec.options.buckets:
        from deployments.engines.onnx_io_binding import IoBindingEngine

        return IoBindingEngine(spec, settings)
    from deployments.engines.onnx import OnnxEngine

    return OnnxEngine(spec, settings)


def _openvino_lacks(spec: GraphSpec, _settings: EncoderSettings) -> str | None:
    from deployments.engines.openvino import missing_precision

    return missing_precision(spec)


def _open_openvino(spec: GraphSpec, settings: EncoderSettings) -> EncoderEngine:
    from deployments.engines.openvino import OpenVinoEngine

    return OpenVinoEngine(spec, settings)


def _torch_lacks(_spec: GraphSpec, settings: EncoderSettings) -> str | None:
    from deployments.engines.torch_engine import missing_device

    return missing_device(settings)


def _open_torch(spec: GraphSpec, settings: EncoderSettings) -> EncoderEngine:
    from deployments.engines.torch_engine import TorchEngine

    return TorchEngine(spec, settings)


# Engines by the name that a manifest gives them.
ENGINES: Mapping[str, EngineKind] = {
    "onnxruntime": EngineKind("onnxruntime", _onnxruntime_lacks, _open_onnxruntime),
    "openvino": EngineKind("openvino", _openvino_lacks, _open_openvino),
    "torch": EngineKind("torch", _torch_lacks, _open_torch),
}


def missing_requirement(spec: GraphSpec, settings: EncoderSettings) -> str | None:
    """What this process lacks to run `spec` on `encoder`, as a sentence; None when it can."""
    kind = ENGINES[spec.engine]
    if find_spec(kind.package) is None:
        return f"the package `{kind.package}` is not installed"
    return kind.missing_requirement(spec, settings)


def can_run(spec: GraphSpec, settings: EncoderSettings) -> bool:
    """Whether this process has what it takes to run `spec` on `encoder`."""
    return missing_requirement(spec, settings) is None


def open_engine(spec: GraphSpec, settings: EncoderSettings) -> EncoderEngine:
    """The engine for one graph. Raises EngineFailed, also for what `missing_requirement` names."""
    if reason := missing_requirement(spec, settings):
        raise EngineFailed(f"{spec.path.name}: {reason}")
    return ENGINES[spec.engine].open(spec, settings)


def check_providers(settings: EncoderSettings) -> None:
    """Raise EngineFailed when this process cannot serve the encoder at all, whatever the model."""
    from deployments.engines.onnx import missing_provider

    if missing := missing_provider(settings.providers):
        raise EngineFailed(f"onnxruntime has no `{missing}` here")
