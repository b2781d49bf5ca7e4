"""Check that the worker groups have enough pods for the replicas of all deployments.

Ray reports no error for a replica that fits on no pod. The replica stays pending forever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cluster.kuberay.overlay import WorkerGroup
from cluster.replica_resources import POOL_LABEL, ResourceDemand
from deployments.artifacts.types import Device
from deployments.config import AppArgs

_ROUNDING = 1e-9  # tolerance in CPUs and GPUs, so that five replicas of 0.2 CPUs fill one CPU


def find_capacity_errors(
    deployments: Sequence[Mapping[str, Any]], groups: Sequence[WorkerGroup]
) -> Iterator[str]:
    """Yield a message for each deployment that does not fit on exactly one worker group.

    Also yield messages for groups with too few pods for their deployments.
    """
    demands_by_group: dict[str, list[ResourceDemand]] = {group.name: [] for group in groups}
    for demand in map(ResourceDemand.of, deployments):
        matching_groups = [group for group in groups if fits_on(demand, group)]
        if len(matching_groups) != 1:
            yield (
                f"a replica of `{demand.name}` fits on {len(matching_groups)} worker groups, must "
                f"be 1: set `label_selector: {{{POOL_LABEL}: GROUP}}` and check the pod size"
            )
        for group in matching_groups[:1]:
            demands_by_group[group.name].append(demand)
    for group in groups:
        demands = demands_by_group[group.name]
        for bound in ("min_replicas", "max_replicas"):
            needed = count_pods(group, [(d, getattr(d, bound)) for d in demands])
            available = getattr(group, bound)
            if needed > available:
                yield (
                    f"worker group `{group.name}` is too small: the {bound} of its deployments "
                    f"need {needed} pods, the {bound} of the group is {available}. Raise it"
                )


def find_gpu_memory_errors(args: AppArgs, groups: Sequence[WorkerGroup]) -> Iterator[str]:
    """Yield a message for each group whose GPUs have less memory than `args` requires."""
    settings = args.generators.get(Device.GPU)
    for group in groups:
        if not group.gpus or group.gpu_memory_gib is None:
            continue
        card = group.gpu_memory_gib << 30
        budget = args.gpu_memory if args.gpu_memory > 1 else args.gpu_memory * card
        if budget > card:
            yield (
                f"`args.gpu_memory` is {budget:.0f} bytes; a GPU of worker group `{group.name}` "
                f"has {card}"
            )
        elif settings is not None and settings.kv_cache_bytes > budget:
            yield (
                f"`args.generators.gpu.kv_cache_bytes` is {settings.kv_cache_bytes}; `gpu_memory` "
                f"leaves {budget:.0f} bytes on a GPU of worker group `{group.name}`"
            )


def count_pods(group: WorkerGroup, replicas: Sequence[tuple[ResourceDemand, int]]) -> int:
    """Count the pods that the replicas need: largest first, each on the first pod with room."""
    sizes = [(d.cpus, d.gpus) for d, count in replicas for _ in range(count)]
    free: list[tuple[float, float]] = []  # free (CPUs, GPUs) of each pod
    for cpus, gpus in sorted(sizes, reverse=True):
        needed_cpus, needed_gpus = cpus - _ROUNDING, gpus - _ROUNDING
        fitting = (i for i, pod in enumerate(free) if pod[0] > needed_cpus and pod[1] > needed_gpus)
        index = next(fitting, None)
        if index is None:
            free.append((group.cpu - cpus, group.gpus - gpus))
        else:
            free[index] = (free[index][0] - cpus, free[index][1] - gpus)
    return len(free)


def fits_on(demand: ResourceDemand, group: WorkerGroup) -> bool:
    """Return whether a replica may run on a pod of `group` and fits on an empty one."""
    selected = demand.pool in (None, group.name)
    return selected and demand.cpus <= group.cpu and demand.gpus <= group.gpus
