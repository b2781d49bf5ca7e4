"""The table of engines. To add an engine, write one file and add one line to `ENGINES`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from deployments.config import EncoderSettings, HardwareSettings
from deployments.engines.base import (
    EncoderEngine,
    EngineInfo,
    EngineKind,
    EngineTarget,
    GraphSpec,
)
from deployments.engines.onnx.engine import ONNXRUNTIME
from deployments.engines.openvino_engine import OPENVINO
from deployments.engines.pytorch.engine import TORCH
from deployments.engines.pytorch.transformers_engine import TRANSFORMERS
from deployments.engines.split_batches import SplittingEngine
from deployments.errors import RequirementMissing

__all__ = [
    "ENGINES",
    "EncoderEngine",
    "EngineInfo",
    "EngineKind",
    "EngineTarget",
    "GraphSpec",
    "check_providers",
    "missing_requirement",
    "open_engine",
]

# The keys are the engine names in manifests.
ENGINES: Mapping[str, EngineKind] = {
    "onnxruntime": ONNXRUNTIME,
    "openvino": OPENVINO,
    "torch": TORCH,
    "transformers": TRANSFORMERS,
}


def missing_requirement(target: EngineTarget, hardware: HardwareSettings) -> str | None:
    """Return a sentence that names what this process lacks to run `target`, or None.

    A GraphSpec runs as an encoder, any other target as a decoder.
    """
    kind = ENGINES.get(target.engine)
    if kind is None:
        return f"the engine `{target.engine}` is unknown; known are {', '.join(sorted(ENGINES))}"
    is_encoder = isinstance(target, GraphSpec)
    if (kind.open_encoder if is_encoder else kind.open_decoder) is None:
        return f"{target.engine} does not run {'encoder' if is_encoder else 'generative'} models"
    for package in kind.packages:
        if find_spec(package) is None:
            return f"the package `{package}` is not installed"
    return kind.missing_requirement(target, hardware)


def open_engine(spec: GraphSpec, settings: EncoderSettings) -> EncoderEngine:
    """Open the graph of an encoder. Raises RequirementMissing, or EngineFailed if that fails."""
    if reason := missing_requirement(spec, settings):
        raise RequirementMissing(f"{spec.path.name}: {reason}")
    open_encoder = ENGINES[spec.engine].open_encoder
    if open_encoder is None:
        raise AssertionError("bug: missing_requirement accepts an engine without encoders")
    engine = open_encoder(spec, settings)
    return engine if spec.max_pass_tokens is None else SplittingEngine(engine, spec.max_pass_tokens)


def check_providers(settings: EncoderSettings) -> None:
    """Raise RequirementMissing if ONNX Runtime lacks a provider that `settings` names."""
    from deployments.engines.onnx.sessions import missing_provider

    if missing := missing_provider(settings.providers):
        raise RequirementMissing(f"onnxruntime has no `{missing}` here")
