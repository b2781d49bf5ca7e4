"""Resources of each replica of a Serve config: CPUs, GPUs, bounds and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.config_entries import ApplicationEntry, DeploymentEntry
from cluster.serve_defaults import AUTO_MAX_REPLICAS
from deployments.artifacts.types import Device
from deployments.config import DEFAULT_POOL_BYTES, AppArgs, IngressUserConfig
from deployments.deployment_names import (
    ENCODER_DEPLOYMENTS,
    GENERATOR_DEPLOYMENTS,
    TOKENIZER,
)

REPLICA_BYTES = 350 << 20  # memory of a replica without models: Python, ONNX Runtime, Ray
# Memory of Ray and HAProxy on a host or in a pod: raylet, agents and Ray's object store.
RAY_BYTES = 1 << 30
# Label in Ray and Kubernetes that names the worker group of a pod.
POOL_LABEL = "hundredfold/pool"


@dataclass(frozen=True, slots=True)
class ResourceDemand:
    """Resources and replica bounds of one deployment."""

    name: str
    pool: str | None  # worker group in the deployment's label selector; None: any group
    min_replicas: int
    max_replicas: int
    cpus: float  # CPUs per replica
    gpus: float  # GPUs per replica

    @classmethod
    def of(cls, deployment: Mapping[str, Any]) -> ResourceDemand:
        """Read one item of `deployments`, which must have passed the linter."""
        options = deployment.get("ray_actor_options") or {}
        cpus = options.get("num_cpus")
        min_replicas, max_replicas = _replica_bounds(deployment)
        return cls(
            name=deployment["name"],
            pool=(options.get("label_selector") or {}).get(POOL_LABEL),
            min_replicas=min_replicas,
            max_replicas=max_replicas,
            cpus=1 if cpus is None else cpus,
            gpus=options.get("num_gpus") or 0,
        )


def measure_replicas(
    application: ApplicationEntry, offloaded_models: int
) -> Iterator[tuple[ResourceDemand, int]]:
    """Yield each deployment and the maximum bytes of one replica in main memory.

    `offloaded_models` is the number of models that were built with `--offload-kv-cache`.
    """
    for entry, pools in _list_pools(application, offloaded_models):
        yield ResourceDemand.of(entry.raw), REPLICA_BYTES + pools


def measure_builder(application: ApplicationEntry) -> int:
    """Return the maximum bytes of the process that builds pulled models; 0 without pulls."""
    for entry in application.ingresses():
        builds = IngressUserConfig.parse(entry.raw.get("user_config")).builds
        return builds.max_memory_bytes if builds.allow_pull else 0
    return 0


def _list_pools(
    application: ApplicationEntry, offloaded_models: int
) -> Iterator[tuple[DeploymentEntry, int]]:
    """Yield each deployment and the maximum bytes of its pools and buffers in main memory."""
    pools: Mapping[str, int] = {}
    if application.is_hundredfold:
        pools = _count_pools(AppArgs.parse(application.raw.get("args")), offloaded_models)
    for entry in application.deployments():
        held = pools.get(entry.name, 0)
        if entry.is_ingress:
            settings = IngressUserConfig.parse(entry.raw.get("user_config"))
            held = settings.cache.max_bytes + settings.limits.inflight_body_bytes
            held += settings.limits.inflight_response_bytes
        yield entry, held


def _count_pools(args: AppArgs, offloaded_models: int) -> dict[str, int]:
    pools = {TOKENIZER: args.tokenizer_pool_bytes}
    for device, encoder in args.encoders.items():
        pools[ENCODER_DEPLOYMENTS[device]] = args.tokenizer_pool_bytes
        if device is Device.CPU:
            models = encoder.pool_bytes or DEFAULT_POOL_BYTES
            pools[ENCODER_DEPLOYMENTS[device]] += models + encoder.lone_pass_bytes
    for device, generator in args.generators.items():
        models = generator.pool_bytes or DEFAULT_POOL_BYTES
        # Models on a GPU take main memory for offloaded KV caches only.
        offloaded = offloaded_models * generator.kv_cache_bytes
        pools[GENERATOR_DEPLOYMENTS[device]] = models if device is Device.CPU else offloaded
    return pools


def _replica_bounds(deployment: Mapping[str, Any]) -> tuple[int, int]:
    scaling = deployment.get("autoscaling_config") or {}
    fixed = deployment.get("num_replicas")
    if fixed == "auto" or scaling:
        default = AUTO_MAX_REPLICAS if fixed == "auto" else 1
        return int(scaling.get("min_replicas", 1)), int(scaling.get("max_replicas", default))
    return int(fixed or 1), int(fixed or 1)
