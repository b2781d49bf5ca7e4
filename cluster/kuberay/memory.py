"""Check that the replicas that fit on a pod by their CPUs also fit by their memory.

A pod whose processes exceed `memory_gib` is killed with all its replicas. A replica evicts models
only when its model pool is full (`pool_bytes`). A pod must therefore have room for full pools of
all its replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from cluster.config_entries import ApplicationEntry, DeploymentEntry
from cluster.kuberay.capacity import ResourceDemand, fits_on
from cluster.kuberay.overlay import WorkerGroup
from deployments.artifacts.types import Device
from deployments.config import DEFAULT_POOL_BYTES, AppArgs, IngressUserConfig
from deployments.deployment_names import (
    ENCODER_DEPLOYMENTS,
    GENERATOR_DEPLOYMENTS,
    INGRESS,
    TOKENIZER,
)

REPLICA_BYTES = 350 << 20  # memory of a replica without models: Python, ONNX Runtime, Ray
POD_BYTES = 1 << 30  # memory of raylet, agents, HAProxy and Ray's object store
_MILLI = 1000  # CPUs and GPUs are counted in thousandths, so that fractions add up exactly


class _ReplicaSize(NamedTuple):
    """Resources of one replica of a deployment, and the maximum number of replicas."""

    name: str
    max_replicas: int
    milli_cpus: int
    milli_gpus: int
    memory: int  # maximum bytes of one replica


class _FullPod(NamedTuple):
    """Replicas that fit on one pod by CPUs and GPUs. Comparisons order full pods by memory."""

    memory: int  # bytes of all replicas
    counts: tuple[tuple[str, int], ...]  # (deployment, number of replicas)


def find_memory_errors(
    applications: Iterable[ApplicationEntry], groups: Sequence[WorkerGroup]
) -> Iterator[str]:
    """Yield a message for each group whose pods may get replicas that exceed `memory_gib`.

    The config must have passed the linter. The models of GPU deployments do not count, because they
    are in the memory of the GPU.
    """
    sizes = [
        (demand, _measure(demand, memory))
        for application in applications
        for demand, memory in measure_replicas(application)
    ]
    for group in groups:
        fitting = tuple(size for demand, size in sizes if fits_on(demand, group))
        fullest = _find_fullest(fitting, group.cpu * _MILLI, group.gpus * _MILLI)
        needed = POD_BYTES + fullest.memory
        if needed > group.memory_gib << 30:
            replicas = ", ".join(f"{count} `{name}`" for name, count in fullest.counts if count)
            yield (
                f"a pod of worker group `{group.name}` has {group.memory_gib} GiB (`memory_gib`); "
                f"{replicas} fit on its CPUs and may take {needed / (1 << 30):.1f} GiB with Ray. "
                "Raise `memory_gib`, or lower `pool_bytes` and `tokenizer_pool_bytes` in `args`"
            )


def measure_replicas(application: ApplicationEntry) -> Iterator[tuple[ResourceDemand, int]]:
    """Yield each deployment and the maximum bytes of one replica in main memory."""
    for entry, pools in _list_pools(application):
        yield ResourceDemand.of(entry.raw), REPLICA_BYTES + pools


def measure_builder(application: ApplicationEntry) -> int:
    """Return the maximum bytes of the process that builds pulled models; 0 without pulls."""
    for entry in application.deployments():
        if application.is_hundredfold and entry.name == INGRESS:
            builds = IngressUserConfig.parse(entry.raw.get("user_config")).builds
            return builds.max_memory_bytes if builds.allow_pull else 0
    return 0


def _list_pools(application: ApplicationEntry) -> Iterator[tuple[DeploymentEntry, int]]:
    """Yield each deployment and the maximum bytes of its pools and buffers in main memory."""
    pools: Mapping[str, int] = {}
    if application.is_hundredfold:
        pools = _count_pools(AppArgs.parse(application.raw.get("args")))
    for entry in application.deployments():
        held = pools.get(entry.name, 0)
        if application.is_hundredfold and entry.name == INGRESS:
            settings = IngressUserConfig.parse(entry.raw.get("user_config"))
            held = settings.cache.max_bytes + settings.limits.inflight_body_bytes
            held += settings.limits.inflight_response_bytes
        yield entry, held


def _count_pools(args: AppArgs) -> dict[str, int]:
    pools = {TOKENIZER: args.tokenizer_pool_bytes}
    for device, encoder in args.encoders.items():
        pools[ENCODER_DEPLOYMENTS[device]] = args.tokenizer_pool_bytes
        if device is Device.CPU:
            models = encoder.pool_bytes or DEFAULT_POOL_BYTES
            pools[ENCODER_DEPLOYMENTS[device]] += models + encoder.lone_pass_bytes
    for device, generator in args.generators.items():
        models = generator.pool_bytes or DEFAULT_POOL_BYTES
        pools[GENERATOR_DEPLOYMENTS[device]] = models if device is Device.CPU else 0
    return pools


def _measure(demand: ResourceDemand, memory: int) -> _ReplicaSize:
    return _ReplicaSize(
        name=demand.name,
        max_replicas=demand.max_replicas,
        milli_cpus=round(demand.cpus * _MILLI),
        milli_gpus=round(demand.gpus * _MILLI),
        memory=memory,
    )


def _find_fullest(sizes: tuple[_ReplicaSize, ...], milli_cpus: int, milli_gpus: int) -> _FullPod:
    """Find the set of replicas with the most memory that fits on a pod by CPUs and GPUs."""

    @cache
    def fill(index: int, free_cpus: int, free_gpus: int) -> _FullPod:
        if index == len(sizes):
            return _FullPod(0, ())
        size, fullest = sizes[index], _FullPod(-1, ())
        for count in range(size.max_replicas + 1):
            cpus = free_cpus - count * size.milli_cpus
            gpus = free_gpus - count * size.milli_gpus
            if cpus < 0 or gpus < 0:
                break
            rest = fill(index + 1, cpus, gpus)
            counts = ((size.name, count), *rest.counts)
            fullest = max(fullest, _FullPod(rest.memory + count * size.memory, counts))
        return fullest

    return fill(0, milli_cpus, milli_gpus)
