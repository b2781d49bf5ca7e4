"""Which encoder a request runs on: the policy, a pure function.

The `auto` policy, which weighs queue lengths against the tuned cost table, will be one more
branch of `choose_device`; today the caller decides, and the CPU is the default.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import Device
from deployments.config import HardwareSettings
from deployments.errors import HardwareUnavailable
from deployments.registry import RegisteredModel

log = logging.getLogger("ray.serve.hundredfold")

# Seconds between looks. A look costs 40 ms of CPU (Serve builds its whole status from validated
# models), so an ingress that has seen everything run looks rarely.
REFRESH_STARTING_S = 1.0
REFRESH_S = 10.0
STATUS_TIMEOUT_S = 1.0
TOKENIZER = "Tokenizer"
FAILING_STATUSES = ("UNHEALTHY", "DEPLOY_FAILED")
ENCODER_DEPLOYMENTS: Mapping[Device, str] = {Device.CPU: "CpuEncoder", Device.GPU: "GpuEncoder"}
GENERATOR_DEPLOYMENTS: Mapping[Device, str] = {
    Device.CPU: "CpuGenerator",
    Device.GPU: "GpuGenerator",
}


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """One look at the cluster."""

    running: Mapping[str, int] = field(default_factory=dict)  # replicas by deployment name
    gpus: float = 0.0  # GPUs the cluster has
    failing: frozenset[str] = frozenset()  # deployments whose replicas do not start


class ClusterMonitor:
    """The latest view of every configured encoder and generator. `look` blocks: it gets a thread."""

    def __init__(
        self,
        encoders: Mapping[Device, HardwareSettings],
        look: Callable[[], ClusterSnapshot],
        generators: Mapping[Device, HardwareSettings] | None = None,
    ) -> None:
        self._encoders = encoders
        self._generators = generators or {}
        self._look = look
        self._view = ClusterSnapshot()
        self._looking: asyncio.Future[None] | None = None
        self._note_states()

    def missing(self) -> list[str]:
        """What keeps requests without special wishes from being answered; empty when ready."""
        needed = {"tokenizer": TOKENIZER, "cpu encoder": ENCODER_DEPLOYMENTS[Device.CPU]}
        if Device.CPU in self._generators:
            needed["cpu generator"] = GENERATOR_DEPLOYMENTS[Device.CPU]
        return [
            f"no {what} is running"
            for what, name in needed.items()
            if not self._view.running.get(name)
        ]

    async def refresh(self) -> None:
        """Look once; a failed look keeps the former view. Who comes meanwhile shares the look."""
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._refresh())
        await asyncio.shield(self._looking)

    async def refresh_with_timeout(self) -> None:
        """As `refresh`, for as long as a request may wait for it: a controller may hang."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                await self.refresh()

    async def _refresh(self) -> None:
        try:
            self._view = await asyncio.to_thread(self._look)
        except Exception:
            log.warning("the cluster's state could not be read", exc_info=True)
        finally:
            self._looking = None
        self._note_states()

    def states_for(self, model: RegisteredModel) -> Mapping[Device, DeploymentState]:
        """What may answer for a model: the generators, or the encoders."""
        return self.generator_states if model.is_generative else self.states

    @contextlib.asynccontextmanager
    async def refreshing(self) -> AsyncIterator[ClusterMonitor]:
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

    def _note_states(self) -> None:
        self.states = self._states(self._encoders, ENCODER_DEPLOYMENTS)
        self.generator_states = self._states(self._generators, GENERATOR_DEPLOYMENTS)

    def _states(
        self, settings: Mapping[Device, HardwareSettings], names: Mapping[Device, str]
    ) -> Mapping[Device, DeploymentState]:
        return {device: self._state(device, own, names[device]) for device, own in settings.items()}

    def _state(self, device: Device, settings: HardwareSettings, name: str) -> DeploymentState:
        # A GPU that Ray sees and our engine cannot use is no encoder, and waiting would not help.
        usable_gpu = self._view.gpus > 0 and name not in self._view.failing
        available = device is Device.CPU or usable_gpu or settings.available == "always"
        return DeploymentState(available, self._view.running.get(name, 0))


def read_serve_status(app_name: str) -> ClusterSnapshot:
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
    failing = frozenset(
        name for name, status in deployments.items() if status.status in FAILING_STATUSES
    )
    return ClusterSnapshot(running, ray.cluster_resources().get("GPU", 0.0), failing)


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """What is known of an encoder right now."""

    available: bool  # the cluster has, or can get, its hardware
    running: int  # replicas that can answer


def choose_device(
    wanted: Device | None, manifest: ArtifactManifest, encoders: Mapping[Device, DeploymentState]
) -> Device:
    """The encoder for a request that wants `wanted` (None: no wish).

    Raises HardwareUnavailable when the encoder is not there or the model has no graph for it.
    """
    device = wanted or Device.CPU
    encoder = encoders.get(device)
    if encoder is None or not encoder.available:
        raise HardwareUnavailable(
            f"`{device}` was asked for, and this cluster has no {device} encoder",
            field="options.use_gpu",
        )
    if manifest.candidate_for(device) is None:
        raise HardwareUnavailable(
            f"Model {manifest.id} was built without a graph for `{device}`",
            field="options.use_gpu",
        )
    return device
