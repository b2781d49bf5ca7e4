"""Which lane a request runs on: the policy, a pure function.

The `auto` policy, which weighs queue lengths against the tuned cost table, will be one more
branch of `choose_device`; today the caller decides, and the CPU is the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deployments.errors import HardwareUnavailable
from deployments.manifest import ArtifactManifest, Device


@dataclass(frozen=True, slots=True)
class LaneState:
    """What is known of a lane right now."""

    available: bool  # the cluster has, or can get, its hardware
    running: int  # replicas that can answer


def choose_device(
    wanted: Device | None, manifest: ArtifactManifest, lanes: Mapping[Device, LaneState]
) -> Device:
    """The lane for a request that wants `wanted` (None: no wish).

    Raises HardwareUnavailable when the lane is not there or the model has no graph for it.
    """
    device = wanted or Device.CPU
    lane = lanes.get(device)
    if lane is None or not lane.available:
        raise HardwareUnavailable(
            f"`{device}` was asked for, and this cluster has no {device} lane",
            field="options.use_gpu",
        )
    if manifest.candidate_for(device) is None:
        raise HardwareUnavailable(
            f"Model {manifest.id} was built without a graph for `{device}`",
            field="options.use_gpu",
        )
    return device
