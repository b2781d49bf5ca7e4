"""State of the encoder and generator deployments, and the device of a request.

The caller chooses the device and the CPU is the default. A policy that weighs queue lengths against
the tuned cost table would be one more branch of `choose_device`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from deployments.artifacts.manifest import ArtifactManifest
from deployments.artifacts.types import Device
from deployments.config import HardwareSettings
from deployments.errors import HardwareUnavailable, ModelLoading
from deployments.ingress.http.request_options import RequestOptions
from deployments.registry import RegisteredModel

log = logging.getLogger("ray.serve.hundredfold")

# s between reads of the status. A read costs 40 ms of CPU, because Serve builds its whole status
# from validated models. The longer interval applies once every required deployment runs.
REFRESH_STARTING_S = 1.0
REFRESH_S = 10.0
STATUS_TIMEOUT_S = 1.0
# s after which the state says nothing any more: three reads failed or hang.
MAX_AGE_S = 3 * REFRESH_S
# s, reported to clients: start of a process, imports, graphs.
ESTIMATED_START_S = 20.0
INGRESS = "Ingress"
TOKENIZER = "Tokenizer"
FAILING_STATUSES = ("UNHEALTHY", "DEPLOY_FAILED")
ENCODER_DEPLOYMENTS: Mapping[Device, str] = {Device.CPU: "CpuEncoder", Device.GPU: "GpuEncoder"}
GENERATOR_DEPLOYMENTS: Mapping[Device, str] = {
    Device.CPU: "CpuGenerator",
    Device.GPU: "GpuGenerator",
}


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The cluster at the time of one status read."""

    running: Mapping[str, int] = field(default_factory=dict)  # replicas by deployment name
    gpus: float = 0.0  # GPUs of the cluster
    failing: frozenset[str] = frozenset()  # deployments whose replicas do not start


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """An encoder or generator deployment of one device."""

    available: bool  # the cluster has its hardware, or can get it
    running: int  # replicas that can answer


class ClusterMonitor:
    """The latest state of every configured encoder and generator.

    `read_status` blocks and runs in a thread.
    """

    def __init__(
        self,
        encoders: Mapping[Device, HardwareSettings],
        read_status: Callable[[], ClusterSnapshot],
        generators: Mapping[Device, HardwareSettings] | None = None,
    ) -> None:
        self._encoders = encoders
        self._generators = generators or {}
        self._read_status = read_status
        self._refreshing: asyncio.Future[None] | None = None
        self.apply(ClusterSnapshot())

    def apply(self, snapshot: ClusterSnapshot) -> None:
        """Replace the state."""
        self._applied_s = time.monotonic()
        self._snapshot = snapshot
        self.states = self._read_states(self._encoders, ENCODER_DEPLOYMENTS)
        self.generator_states = self._read_states(self._generators, GENERATOR_DEPLOYMENTS)

    def missing(self) -> list[str]:
        """List what default requests lack, and that the state is too old; empty when ready."""
        required = {"tokenizer": TOKENIZER, "cpu encoder": ENCODER_DEPLOYMENTS[Device.CPU]}
        if Device.CPU in self._generators:
            required["cpu generator"] = GENERATOR_DEPLOYMENTS[Device.CPU]
        missing = [
            f"no {kind} is running"
            for kind, name in required.items()
            if not self._snapshot.running.get(name)
        ]
        age_s = time.monotonic() - self._applied_s
        if age_s > MAX_AGE_S:
            missing.append(
                f"the state of the cluster is {age_s:.0f} s old, the maximum is {MAX_AGE_S:.0f} s: "
                "Ray Serve's controller does not answer"
            )
        return missing

    def count_ingress_replicas(self) -> int:
        """Return the running replicas of the Ingress, this one included."""
        return max(1, self._snapshot.running.get(INGRESS, 1))

    async def refresh(self) -> None:
        """Read the status once. Concurrent callers share one read; a failed one changes nothing."""
        if self._refreshing is None:
            self._refreshing = asyncio.ensure_future(self._refresh())
        await asyncio.shield(self._refreshing)

    async def refresh_with_timeout(self) -> None:
        """Refresh for at most STATUS_TIMEOUT_S: a hanging controller must not block requests."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                await self.refresh()

    async def _refresh(self) -> None:
        try:
            self.apply(await asyncio.to_thread(self._read_status))
        except Exception:
            log.warning("reading the cluster status failed", exc_info=True)
        finally:
            self._refreshing = None

    def states_for(self, model: RegisteredModel) -> Mapping[Device, DeploymentState]:
        """Return the generators for a generative model, else the encoders."""
        return self.generator_states if model.is_generative else self.states

    @contextlib.asynccontextmanager
    async def refreshing(self) -> AsyncIterator[ClusterMonitor]:
        """Refresh the state periodically while the block runs."""
        await self.refresh()
        task = asyncio.ensure_future(self._refresh_periodically())
        try:
            yield self
        finally:
            task.cancel()

    async def _refresh_periodically(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_STARTING_S if self.missing() else REFRESH_S)
            await self.refresh()

    def _read_states(
        self, settings: Mapping[Device, HardwareSettings], names: Mapping[Device, str]
    ) -> Mapping[Device, DeploymentState]:
        return {
            device: self._read_state(device, hardware, names[device])
            for device, hardware in settings.items()
        }

    def _read_state(self, device: Device, settings: HardwareSettings, name: str) -> DeploymentState:
        # The engine may be unable to use a GPU that Ray sees; waiting would not help then.
        usable_gpu = self._snapshot.gpus > 0 and name not in self._snapshot.failing
        available = device is Device.CPU or usable_gpu or settings.available == "always"
        return DeploymentState(available, self._snapshot.running.get(name, 0))


def read_serve_status(app_name: str) -> ClusterSnapshot:
    """Read the status of the deployments of `app_name` inside a replica."""
    import ray
    from ray import serve
    from ray.serve.schema import ReplicaState

    # Replicas that take a new `user_config`, or that a new controller finds, serve too.
    serving = (ReplicaState.RUNNING, ReplicaState.UPDATING, ReplicaState.RECOVERING)
    app = serve.status().applications.get(app_name)
    deployments = {} if app is None else app.deployments
    running = {
        name: sum(status.replica_states.get(state, 0) for state in serving)
        for name, status in deployments.items()
    }
    failing = frozenset(
        name for name, status in deployments.items() if status.status in FAILING_STATUSES
    )
    return ClusterSnapshot(running, ray.cluster_resources().get("GPU", 0.0), failing)


class DeviceChoice(NamedTuple):
    """The device of a request; `fallback` repeats it when `use_gpu` could not be met."""

    device: Device
    fallback: Device | None = None


def choose_device(
    options: RequestOptions,
    manifest: ArtifactManifest,
    states: Mapping[Device, DeploymentState],
) -> DeviceChoice:
    """Choose the requested device, by default the CPU.

    `use_gpu` is a hint: without a GPU the CPU computes. Raises HardwareUnavailable when a required
    device has no deployment or the model has no graph for it.
    """
    device = options.device or Device.CPU
    error = _check_device(device, manifest, states)
    if error is None:
        return DeviceChoice(device)
    if options.requires_device or _check_device(Device.CPU, manifest, states) is not None:
        raise error
    return DeviceChoice(Device.CPU, fallback=Device.CPU)


def _check_device(
    device: Device, manifest: ArtifactManifest, states: Mapping[Device, DeploymentState]
) -> HardwareUnavailable | None:
    state = states.get(device)
    if state is None or not state.available:
        return HardwareUnavailable(
            f"this cluster runs no model on `{device}`. Set `options.use_gpu` to another value or "
            "omit it.",
            field="options.use_gpu",
        )
    if manifest.candidate_for(device) is None:
        return HardwareUnavailable(
            f"Model {manifest.id} has no graph for `{device}`. Set `options.use_gpu` to another "
            "value or omit it.",
            field="options.use_gpu",
        )
    return None


def model_loading_error(model_id: str) -> ModelLoading:
    """Build the error for a model that no running replica has."""
    return ModelLoading(
        f"Model {model_id} is currently loading", estimated_time_s=ESTIMATED_START_S
    )
