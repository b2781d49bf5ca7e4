"""What the ingress knows of the other deployments, refreshed in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from deployments.config import LaneSettings
from deployments.ingress.hardware import LaneState
from deployments.manifest import Device

log = logging.getLogger("ray.serve.hundredfold")

# Seconds between looks. A look costs 40 ms of CPU (Serve builds its whole status from validated
# models), so an ingress that has seen everything run looks rarely.
REFRESH_STARTING_S = 1.0
REFRESH_S = 10.0
TOKENIZER = "Tokenizer"
LANE_DEPLOYMENTS: Mapping[Device, str] = {Device.CPU: "CpuLane", Device.GPU: "GpuLane"}


@dataclass(frozen=True, slots=True)
class ClusterView:
    """One look at the cluster."""

    running: Mapping[str, int] = field(default_factory=dict)  # replicas by deployment name
    gpus: float = 0.0  # GPUs the cluster has


class LaneBoard:
    """The latest view; `states` has every configured lane. `look` blocks and runs in a thread."""

    def __init__(
        self, lanes: Mapping[Device, LaneSettings], look: Callable[[], ClusterView]
    ) -> None:
        self._lanes = lanes
        self._look = look
        self._view = ClusterView()
        self.states: Mapping[Device, LaneState] = self._states()

    def missing(self) -> list[str]:
        """What keeps requests without special wishes from being answered; empty when ready."""
        needed = {"tokenizer": TOKENIZER, "cpu lane": LANE_DEPLOYMENTS[Device.CPU]}
        return [
            f"no {what} is running"
            for what, name in needed.items()
            if not self._view.running.get(name)
        ]

    async def refresh(self) -> None:
        """Look once; a failed look keeps the former view."""
        try:
            self._view = await asyncio.to_thread(self._look)
        except Exception:
            log.warning("the cluster's state could not be read", exc_info=True)
        self.states = self._states()

    @contextlib.asynccontextmanager
    async def refreshing(self) -> AsyncIterator[LaneBoard]:
        """Keep the view fresh while the block runs."""
        await self.refresh()
        task = asyncio.ensure_future(self._refresh_for_ever())
        try:
            yield self
        finally:
            task.cancel()

    async def _refresh_for_ever(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_STARTING_S if self.missing() else REFRESH_S)
            await self.refresh()

    def _states(self) -> dict[Device, LaneState]:
        return {device: self._state(device) for device in self._lanes}

    def _state(self, device: Device) -> LaneState:
        has_hardware = device is not Device.GPU or self._view.gpus > 0
        return LaneState(
            available=self._lanes[device].available == "always" or has_hardware,
            running=self._view.running.get(LANE_DEPLOYMENTS[device], 0),
        )


def look_at_serve(app_name: str) -> ClusterView:
    """The view of a replica of `app_name`."""
    import ray
    from ray import serve
    from ray.serve.schema import ReplicaState

    app = serve.status().applications.get(app_name)
    deployments = {} if app is None else app.deployments
    running = {
        name: status.replica_states.get(ReplicaState.RUNNING, 0)
        for name, status in deployments.items()
    }
    return ClusterView(running, ray.cluster_resources().get("GPU", 0.0))
