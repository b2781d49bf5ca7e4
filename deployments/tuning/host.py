"""What kind of machine this is, as far as the speed of a graph depends on it."""

from __future__ import annotations

import hashlib
import logging
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from itertools import accumulate, takewhile
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

from deployments.artifacts.types import Device
from deployments.machine import ControlGroups, installed_versions, read_cpu_info, usable_cores

log = logging.getLogger("ray.serve.hundredfold")

_TIMEOUT_S = 30


def query_gpu(fields: str) -> str:
    """The values of `fields`, as `nvidia-smi --query-gpu` knows them; empty where it tells none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    asked = [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as exc:
        log.warning("%s does not tell %s of the GPU: %s", tool, fields, exc)
        return ""
    return told.stdout.partition("\n")[0].strip()


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
    on_gpu = query_gpu("memory.free") if device is Device.GPU else ""
    if on_gpu.isdecimal():
        rooms.append(int(on_gpu) * _MEBIBYTE)
    return min(rooms)


def count_fitting(graphs: Iterable[Path], available_bytes: int) -> int:
    """How many of the graphs, from the first on, may be open at once."""
    needed = accumulate(_OPEN_PER_FILE * _file_bytes(graph) for graph in graphs)
    return sum(1 for _ in takewhile(lambda total: total <= available_bytes * _SHARE, needed))


def _file_bytes(graph: Path) -> int:
    """The graph and the weights that lie beside it under its name."""
    return sum(path.stat().st_size for path in graph.parent.glob(f"{graph.name}*"))


# The packages that may provide an engine.
_PACKAGES = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "openvino": ("openvino",),
    "torch": ("torch",),
}


class Host(BaseModel):
    """One kind of host. Equal hosts share their measurements."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Device
    name: str  # of the CPU, or of the GPU and its driver
    generation: str
    flags: tuple[str, ...]
    cores: int  # that this process may use

    @property
    def fingerprint(self) -> str:
        """Names the directory of what was measured here: 12 hex digits."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]


@cache
def read_host(device: Device) -> Host:
    """The host this process runs on, as one that computes on `device`."""
    processor = read_cpu_info()
    return Host(
        device=device,
        name=(query_gpu("name,driver_version") if device is Device.GPU else "") or processor.name,
        generation=processor.generation,
        flags=processor.flags,
        cores=usable_cores(),
    )


def engine_versions(engines: Iterable[str]) -> dict[str, str]:
    """The version of each of `engines` that is installed here."""
    found = {}
    for engine in sorted(set(engines)):
        for package, version in installed_versions(_PACKAGES[engine]).items():
            found[engine] = f"{package} {version}"
    return found
