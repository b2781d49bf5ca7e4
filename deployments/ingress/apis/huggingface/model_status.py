"""`/status/{id}`: whether a model is loaded, where, and how far its build is."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from deployments.artifacts.types import Device
from deployments.builds.estimates import BuildStatus
from deployments.builds.record import BuildState
from deployments.builds.sources import hide_directory
from deployments.ingress.apis.shared.model_list import is_loaded, running_devices
from deployments.ingress.devices.cluster_state import ClusterMonitor
from deployments.registry import RegisteredModel


class ModelStatus(BaseModel):
    """Status of a model. huggingface_hub reads the first four keys."""

    model_config = ConfigDict(frozen=True)

    loaded: bool
    state: Literal["Loaded", "Loadable", "Error"]
    compute_type: Any = "cpu"
    framework: str = "transformers"
    build: BuildStatus


def describe_served(
    model: RegisteredModel, monitor: ClusterMonitor, build: BuildStatus | None
) -> ModelStatus:
    """Describe a model that requests can use.

    `build` may be the build of a newer version. If it is None, the status reports a finished build
    of the served version.
    """
    loaded = is_loaded(model, monitor)
    on_gpu = Device.GPU in running_devices(model, monitor)
    ready = BuildStatus(
        id=model.ref.id,
        state=BuildState.READY,
        percent=100,
        estimated_time=0.0,
        source=hide_directory(model.manifest.source.ref),
        version=model.ref.version,
    )
    return ModelStatus(
        loaded=loaded,
        state="Loaded" if loaded else "Loadable",
        compute_type={"gpu": {"gpu": "cuda", "count": 1}} if on_gpu else "cpu",
        build=build or ready,
    )


def describe_unserved(build: BuildStatus) -> ModelStatus:
    """Describe a model that has a build but no served version."""
    state: Literal["Error", "Loadable"] = "Loadable"
    if build.state is BuildState.FAILED:
        state = "Error"
    return ModelStatus(loaded=False, state=state, build=build)
