"""State of the encoder and generator deployments."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deployments.artifacts.types import Device
from deployments.config import GeneratorSettings, HardwareSettings
from deployments.deployment_names import (
    ENCODER_DEPLOYMENTS,
    GENERATOR_DEPLOYMENTS,
    INGRESS,
    REQUIRED_FOR_READY,
    TOKENIZER,
)
from deployments.errors import ModelLoading
from deployments.ingress.devices.start_times import StartTimes
from deployments.registry import RegisteredModel

log = logging.getLogger("ray.serve.hundredfold")

# Seconds between reads of the status. A read costs 40 ms of CPU, because Serve builds its whole
# status from Pydantic models. REFRESH_STARTING_S applies while a replica starts or the cluster is
# not ready (`ClusterMonitor.missing`), REFRESH_S otherwise.
REFRESH_STARTING_S = 1.0
REFRESH_S = 10.0
STATUS_TIMEOUT_S = 1.0  # maximum seconds that a request waits for a read
# Age in seconds above which the state makes the server unready. By then about three reads in a row
# have failed, or a read hangs.
MAX_AGE_S = 3 * REFRESH_S
FAILING_STATUSES = ("UNHEALTHY", "DEPLOY_FAILED")


class ReplicaTarget(NamedTuple):
    """Desired replicas of a deployment and their bounds; all equal without autoscaling."""

    target: int
    min: int
    max: int


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The cluster at the time of one status read."""

    running: Mapping[str, int] = field(default_factory=dict)  # replicas by deployment name
    gpus: float = 0.0  # number of GPUs of the cluster
    failing: frozenset[str] = frozenset()  # deployments with one of FAILING_STATUSES
    starting: Mapping[str, int] = field(default_factory=dict)  # replicas by deployment, no zeros
    targets: Mapping[str, ReplicaTarget] = field(default_factory=dict)  # by deployment name
    # Whether Serve listed no deployments, because it imports the application or has failed to.
    # Until an import succeeds, Serve keeps the replicas of the one before.
    is_importing: bool = False


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """State of the encoder or generator deployment for one kind of device."""

    available: bool  # the cluster has the hardware for the deployment, or can add the hardware
    running: int  # replicas that can answer


class ClusterMonitor:
    """The latest state of every configured encoder and generator.

    `read_status` blocks and runs in a thread.
    """

    def __init__(
        self,
        encoders: Mapping[Device, HardwareSettings],
        read_status: Callable[[], ClusterSnapshot],
        generators: Mapping[Device, GeneratorSettings] | None = None,
    ) -> None:
        self._encoders = encoders
        self._generators = generators or {}
        self._read_status = read_status
        self._refreshing: asyncio.Future[None] | None = None
        self._starts = StartTimes()
        self.apply(ClusterSnapshot())

    def apply(self, snapshot: ClusterSnapshot) -> None:
        """Replace the snapshot, and derive the states of the deployments from it."""
        self._applied_s = time.monotonic()
        self.snapshot = snapshot
        self._starts.note(snapshot.starting, snapshot.running, self._applied_s)
        self.encoder_states = self._read_states(self._encoders, ENCODER_DEPLOYMENTS)
        self.generator_states = self._read_states(self._generators, GENERATOR_DEPLOYMENTS)

    def missing(self) -> list[str]:
        """List the reasons why the cluster is not ready. A ready cluster has none.

        A configured deployment without a running replica is a reason if requests without `options`
        need it. A GPU deployment without a replica is no reason: the CPU answers in its place, or
        the first request starts a replica. A state older than MAX_AGE_S is a reason too.
        """
        configured = {
            TOKENIZER,
            *(ENCODER_DEPLOYMENTS[device] for device in self._encoders),
            *(GENERATOR_DEPLOYMENTS[device] for device in self._generators),
        }
        missing = [
            f"no {kind} is running"
            for name, kind in REQUIRED_FOR_READY.items()
            if name in configured and not self.snapshot.running.get(name)
        ]
        if self.age_s > MAX_AGE_S:
            missing.append(
                f"the state of the cluster is {self.age_s:.0f} s old, the maximum is "
                f"{MAX_AGE_S:.0f} s: Ray Serve's controller does not answer"
            )
        return missing

    def count_ingress_replicas(self) -> int:
        """Return the number of running replicas of the Ingress, this replica included."""
        return max(1, self.snapshot.running.get(INGRESS, 1))

    def expect_start_s(self, model: RegisteredModel, device: Device) -> float:
        """Return the expected seconds that the first replica for `model` takes to start."""
        return self._starts.expect_s(name_deployment(model, device))

    async def refresh(self) -> None:
        """Read the status. Concurrent callers share one read.

        A failed read changes nothing. While Serve imports the application, the snapshot before
        stays, with the age of this read.
        """
        if self._refreshing is None:
            self._refreshing = asyncio.ensure_future(self._refresh())
        await asyncio.shield(self._refreshing)

    async def refresh_with_timeout(self) -> None:
        """Refresh for at most STATUS_TIMEOUT_S: a hanging controller must not block requests."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                await self.refresh()

    @property
    def age_s(self) -> float:
        """Seconds since the latest status was read."""
        return time.monotonic() - self._applied_s

    async def _refresh(self) -> None:
        try:
            snapshot = await asyncio.to_thread(self._read_status)
            self.apply(self.snapshot if snapshot.is_importing else snapshot)
        except Exception:
            log.warning("reading the cluster status failed", exc_info=True)
        finally:
            self._refreshing = None

    def states_for(self, model: RegisteredModel) -> Mapping[Device, DeploymentState]:
        """Return the states of the deployments that run `model`: the generators or the encoders."""
        return self.generator_states if model.is_generative else self.encoder_states

    def find_context_tokens(self, model: RegisteredModel) -> int:
        """Return the tokens of prompt and answer that the generators of all devices allow.

        For an encoder model, return the maximum length of a text.
        """
        generators = self._generators.values() if model.is_generative else ()
        limits = (settings.max_context_tokens for settings in generators)
        return min((model.manifest.max_tokens, *limits))

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
            is_starting = self.missing() or self.snapshot.starting
            await asyncio.sleep(REFRESH_STARTING_S if is_starting else REFRESH_S)
            await self.refresh()

    def _read_states(
        self, settings: Mapping[Device, HardwareSettings], names: Mapping[Device, str]
    ) -> Mapping[Device, DeploymentState]:
        return {
            device: self._read_state(device, hardware, names[device])
            for device, hardware in settings.items()
        }

    def _read_state(self, device: Device, settings: HardwareSettings, name: str) -> DeploymentState:
        # A deployment may fail to start because its engine cannot use a GPU that Ray sees. Requests
        # must not wait for such a GPU.
        usable_gpu = self.snapshot.gpus > 0 and name not in self.snapshot.failing
        available = device is Device.CPU or usable_gpu or settings.available == "always"
        return DeploymentState(available, self.snapshot.running.get(name, 0))


def read_serve_status(app_name: str) -> ClusterSnapshot:
    """Read the status of the deployments of `app_name`. Call it inside a replica of Ray Serve.

    `ray.serve.status` omits the autoscaling targets. This function therefore reads the document
    of Serve's REST API, from which `ray.serve.status` is derived.
    """
    import ray
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ReplicaState

    # UPDATING replicas (new `user_config`) and RECOVERING ones (new controller) also serve.
    serving = (ReplicaState.RUNNING, ReplicaState.UPDATING, ReplicaState.RECOVERING)
    app = _get_global_client().get_serve_details()["applications"].get(app_name, {})
    deployments = app.get("deployments", {})
    states = {
        name: [ReplicaState(replica["state"]) for replica in details["replicas"]]
        for name, details in deployments.items()
    }
    failing = frozenset(
        name for name, details in deployments.items() if details["status"] in FAILING_STATUSES
    )
    return ClusterSnapshot(
        is_importing=bool(app) and not deployments,
        running={name: sum(map(serving.__contains__, each)) for name, each in states.items()},
        gpus=ray.cluster_resources().get("GPU", 0.0),
        failing=failing,
        starting={
            name: count
            for name, each in states.items()
            if (count := each.count(ReplicaState.STARTING))
        },
        targets={name: _read_target(details) for name, details in deployments.items()},
    )


def _read_target(details: Mapping[str, Any]) -> ReplicaTarget:
    target = details["target_num_replicas"]
    scaling = details["deployment_config"].get("autoscaling_config")
    if not scaling:
        return ReplicaTarget(target, target, target)
    # `get_serve_details` omits values that equal Serve's default, which is 1 for both bounds.
    return ReplicaTarget(target, scaling.get("min_replicas", 1), scaling.get("max_replicas", 1))


def name_deployment(model: RegisteredModel, device: Device) -> str:
    return (GENERATOR_DEPLOYMENTS if model.is_generative else ENCODER_DEPLOYMENTS)[device]


def model_loading_error(
    monitor: ClusterMonitor, model: RegisteredModel, device: Device = Device.CPU
) -> ModelLoading:
    """Build the error for a model whose deployment has no running replica."""
    return ModelLoading(
        f"Model {model.ref.id} is currently loading",
        estimated_time_s=round(monitor.expect_start_s(model, device), 1),
    )
