"""How many graphs may be open at once, so that tuning never takes the memory of who serves."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, takewhile
from pathlib import Path

import psutil

from deployments.cgroups import ControlGroups
from deployments.manifest import Device
from deployments.tuning.driver import ask_driver

# What an open graph takes per byte of its files: weights, their copy in the order that the
# kernels read, and the largest pass.
_OPEN_PER_FILE = 3
# Of the free memory, what tuning may take; the rest is for replicas that start meanwhile.
_SHARE = 0.5
_MEBIBYTE = 1 << 20  # in which the driver counts


def free_bytes(device: Device) -> int:
    """Memory that this process may still take: the machine's, its control groups', the GPU's."""
    rooms: list[int] = [psutil.virtual_memory().available]
    group = ControlGroups.own().free_bytes()
    if group is not None:
        rooms.append(group)
    on_gpu = ask_driver("memory.free") if device is Device.GPU else ""
    if on_gpu.isdecimal():
        rooms.append(int(on_gpu) * _MEBIBYTE)
    return min(rooms)


def how_many_fit(graphs: Iterable[Path], room_bytes: int) -> int:
    """How many of the graphs, from the first on, may be open at once."""
    needed = accumulate(_OPEN_PER_FILE * _file_bytes(graph) for graph in graphs)
    return sum(1 for _ in takewhile(lambda total: total <= room_bytes * _SHARE, needed))


def _file_bytes(graph: Path) -> int:
    """The graph and the weights that lie beside it under its name."""
    return sum(path.stat().st_size for path in graph.parent.glob(f"{graph.name}*"))
