"""Engines: one file each, heavy imports only when chosen."""

from __future__ import annotations

from pathlib import Path

from deployments.config import LaneSettings
from deployments.engines.base import Engine, EngineInfo
from deployments.manifest import Candidate

__all__ = ["Engine", "EngineInfo", "check_lane", "open_engine"]


def check_lane(lane: LaneSettings) -> None:
    """Raise EngineFailed when this process cannot serve the lane at all, whatever the model."""
    from deployments.engines.onnx import check_providers

    check_providers(lane.providers)


def open_engine(directory: Path, candidate: Candidate, lane: LaneSettings) -> Engine:
    """The engine for one sealed candidate. Raises EngineFailed."""
    from deployments.engines.onnx import OnnxEngine

    info = EngineInfo(compute_type=f"{candidate.device}-{candidate.precision}")
    return OnnxEngine(
        directory / candidate.graph,
        info,
        providers=lane.providers,
        threads=lane.threads_per_run,
        disabled_optimizers=candidate.disabled_optimizers,
    )
