"""Check that the replicas that fit on a pod by their CPUs also fit by their memory.

A pod whose processes exceed `memory_gib` is killed with all its replicas. A replica evicts models
only when its model pool is full (`pool_bytes`). A pod must therefore have room for full pools of
all its replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from cluster.config_entries import ApplicationEntry
from cluster.kuberay.capacity import fits_on
from cluster.kuberay.overlay import WorkerGroup
from cluster.replica_resources import RAY_BYTES, ResourceDemand, measure_replicas

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

    The config must have passed the linter. Of models on GPUs only KV caches count that were
    offloaded to main memory.
    """
    applications = list(applications)
    for group in groups:
        fitting = tuple(
            _measure(demand, memory)
            for application in applications
            for demand, memory in measure_replicas(application, group.offloaded_models)
            if fits_on(demand, group)
        )
        fullest = _find_fullest(fitting, group.cpu * _MILLI, group.gpus * _MILLI)
        needed = RAY_BYTES + fullest.memory
        if needed > group.memory_gib << 30:
            replicas = ", ".join(f"{count} `{name}`" for name, count in fullest.counts if count)
            yield (
                f"a pod of worker group `{group.name}` has {group.memory_gib} GiB (`memory_gib`); "
                f"{replicas} fit on its CPUs and may take {needed / (1 << 30):.1f} GiB with Ray. "
                "Raise `memory_gib`, or lower `pool_bytes` and `tokenizer_pool_bytes` in `args`"
                + (", or `kv_cache_bytes` of `generators.gpu`" if group.offloaded_models else "")
            )


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
