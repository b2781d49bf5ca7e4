"""Whether the worker groups can hold what the deployments may grow to.

A replica that fits on no pod stays pending for ever, without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.kuberay.overlay import WorkerGroup

# The Ray and Kubernetes label that says which group a pod belongs to.
POOL_LABEL = "hundredfold/pool"


@dataclass(frozen=True, slots=True)
class ResourceDemand:
    """What one deployment asks for at its largest."""

    name: str
    pool: str | None  # the group it selects
    replicas: int
    cpus: float  # per replica
    gpus: float  # per replica

    @classmethod
    def of(cls, deployment: Mapping[str, Any]) -> ResourceDemand:
        """Read one item of `deployments`, as it is after linting."""
        options = deployment.get("ray_actor_options") or {}
        return cls(
            name=deployment["name"],
            pool=(options.get("label_selector") or {}).get(POOL_LABEL),
            replicas=_most_replicas(deployment),
            cpus=options.get("num_cpus", 1),
            gpus=options.get("num_gpus") or 0,
        )


def capacity_errors(
    deployments: Sequence[Mapping[str, Any]], groups: Sequence[WorkerGroup]
) -> Iterator[str]:
    """One sentence for each deployment or group that cannot work out."""
    held: dict[str, list[ResourceDemand]] = {group.name: [] for group in groups}
    for demand in map(ResourceDemand.of, deployments):
        homes = [group for group in groups if _fits(demand, group)]
        if len(homes) != 1:
            yield (
                f"a replica of `{demand.name}` fits on {len(homes)} worker groups, must be one: "
                f"set `label_selector: {{{POOL_LABEL}: GROUP}}` and check the pod's size"
            )
        for group in homes[:1]:
            held[group.name].append(demand)
    for group in groups:
        cpus = sum(d.replicas * d.cpus for d in held[group.name])
        gpus = sum(d.replicas * d.gpus for d in held[group.name])
        if cpus > group.max_replicas * group.cpu or gpus > group.max_replicas * group.gpus:
            yield (
                f"worker group `{group.name}` is too small: its deployments may grow to "
                f"{cpus:g} CPUs and {gpus:g} GPUs, {group.max_replicas} pods have "
                f"{group.max_replicas * group.cpu} and {group.max_replicas * group.gpus}"
            )


def _most_replicas(deployment: Mapping[str, Any]) -> int:
    scaling = deployment.get("autoscaling_config") or {}
    fixed = deployment.get("num_replicas")
    if fixed == "auto":
        return int(scaling.get("max_replicas", 100))  # Serve's own for `auto`
    return int(scaling.get("max_replicas", 1) if scaling else fixed or 1)


def _fits(demand: ResourceDemand, group: WorkerGroup) -> bool:
    selected = demand.pool in (None, group.name)
    return selected and demand.cpus <= group.cpu and demand.gpus <= group.gpus
