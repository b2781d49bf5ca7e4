"""Properties of this host that determine the speed of graphs and how many fit in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from itertools import accumulate, takewhile
from pathlib import Path

import psutil

from deployments.artifacts.types import Device, FrozenModel
from deployments.engines import ENGINES
from deployments.host.gpus import MEBIBYTE, query_gpus, query_visible_gpus
from deployments.host.machine import ControlGroups, installed_versions, read_cpu_info, usable_cores

# Memory of an open graph per byte of its files: the weights, their repacked copy for the kernels
# and the activations of the largest forward pass.
_OPEN_BYTES_PER_FILE_BYTE = 3
# Maximum share of the free memory for tuning. The rest is for replicas that start meanwhile.
_MAX_SHARE = 0.5


def free_bytes(device: Device) -> int:
    """Return the free bytes: the minimum of host, control groups and, for a GPU, the GPU."""
    limits: list[int] = [psutil.virtual_memory().available]
    group = ControlGroups.own().free_bytes()
    if group is not None:
        limits.append(group)
    on_gpu = _query_own_gpu("memory.free") if device is Device.GPU else ""
    if on_gpu.isdecimal():
        limits.append(int(on_gpu) * MEBIBYTE)
    return min(limits)


def _query_own_gpu(fields: str) -> str:
    """Return `fields` of the GPU that engines use: the first that CUDA shows to this process.

    nvidia-smi does not list some of these GPUs, such as MIG instances. In their place, return the
    fields of the host's first GPU. Return "" if the host has no GPU.
    """
    lines = query_visible_gpus(fields).values() or query_gpus(fields)
    return next(iter(lines), "")


def count_fitting(graphs: Iterable[Path], available_bytes: int) -> int:
    """Count the leading graphs that may be open at once in half of `available_bytes`."""
    needed = accumulate(_OPEN_BYTES_PER_FILE_BYTE * _file_bytes(graph) for graph in graphs)
    return sum(1 for _ in takewhile(lambda total: total <= available_bytes * _MAX_SHARE, needed))


def _file_bytes(graph: Path) -> int:
    """Return the size of the graph and of its weight files, which start with its name."""
    return sum(path.stat().st_size for path in graph.parent.glob(f"{graph.name}*"))


class Host(FrozenModel):
    """One kind of host. Equal hosts share their cost tables."""

    device: Device
    name: str  # name of the CPU, or of the GPU and its driver
    generation: str
    flags: tuple[str, ...]
    cores: int  # cores that this process may use

    @property
    def fingerprint(self) -> str:
        """Name of the directory with the host's cost tables: 12 hex digits."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]


@cache
def read_host(device: Device) -> Host:
    """Describe the host of this process for computation on `device`."""
    cpu = read_cpu_info()
    return Host(
        device=device,
        name=(_query_own_gpu("name,driver_version") if device is Device.GPU else "") or cpu.name,
        generation=cpu.generation,
        flags=cpu.flags,
        cores=usable_cores(),
    )


def read_engine_versions(engines: Iterable[str]) -> dict[str, str]:
    """Return the package versions of each of `engines` that is installed."""
    versions = {}
    for engine in sorted(ENGINES.keys() & set(engines)):
        kind = ENGINES[engine]
        if installed := installed_versions(kind.distributions or kind.packages):
            versions[engine] = ", ".join(f"{name} {version}" for name, version in installed.items())
    return versions
