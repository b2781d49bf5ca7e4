"""NVIDIA GPUs of this host, and whether the pinned CUDA packages run on them.

This module imports the standard library only, because `cluster/installation.py` uses it before
anything is installed.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

log = logging.getLogger("ray.serve.hundredfold")

VISIBLE_GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"  # read by CUDA, written by Ray
# CUDA's order of GPUs. "PCI_BUS_ID" is the order of nvidia-smi; by default CUDA sorts by speed.
DEVICE_ORDER_VARIABLE, BUS_ORDER = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
MEBIBYTE = 1 << 20  # unit of nvidia-smi
# onnxruntime-gpu and torch of constraints.txt need CUDA 13: a driver of the 580 series or later and
# a Turing GPU or later. https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/
MIN_DRIVER_SERIES = 580
MIN_COMPUTE_CAPABILITY = (7, 5)
_TIMEOUT_S = 30  # seconds after which a call of nvidia-smi fails
_FIELDS = "name,driver_version,memory.total,compute_cap,uuid"
_DRIVER_DIRECTORY = Path("/proc/driver/nvidia")
_DEVICE_FILE = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. Empty values are unknown: without nvidia-smi only name and driver can be read."""

    name: str
    driver: str  # such as "580.159.03"
    memory_bytes: int = 0
    compute_capability: tuple[int, int] = (0, 0)
    uuid: str = ""

    @property
    def capability_text(self) -> str:
        """The compute capability, such as "9.0"; empty if unknown."""
        major, minor = self.compute_capability
        return f"{major}.{minor}" if (major, minor) > (0, 0) else ""

    @property
    def has_old_driver(self) -> bool:
        return 0 < int(self.driver.partition(".")[0] or 0) < MIN_DRIVER_SERIES

    @property
    def problem(self) -> str | None:
        """The reason why the CUDA packages do not run on this GPU; None if no reason is known."""
        if self.has_old_driver:
            needed = f"it needs {MIN_DRIVER_SERIES} or later"
            return f"driver {self.driver} is too old for CUDA 13: {needed}"
        if (0, 0) < self.compute_capability < MIN_COMPUTE_CAPABILITY:
            major, minor = MIN_COMPUTE_CAPABILITY
            return f"compute capability {self.capability_text}; CUDA 13 needs {major}.{minor}"
        return None


def order_by_bus() -> None:
    """Let CUDA order the GPUs as nvidia-smi does, unless the user has set another order.

    Otherwise an index in CUDA_VISIBLE_DEVICES would name one GPU for CUDA and another one here. The
    call must precede the first use of CUDA in this process.
    """
    os.environ.setdefault(DEVICE_ORDER_VARIABLE, BUS_ORDER)


def read_gpus(
    driver_directory: Path = _DRIVER_DIRECTORY, device_file: Path = _DEVICE_FILE
) -> tuple[Gpu, ...]:
    """Return the GPUs of this host in the order of the driver; empty without a driver.

    Return () if this process may not use the `device_file` of the driver.
    """
    gpus = tuple(map(_parse_line, query_gpus(_FIELDS)))
    return gpus or _read_driver_files(driver_directory, device_file)


def find_visible(
    gpus: Sequence[Gpu], environment: Mapping[str, str] = os.environ
) -> tuple[Gpu, ...]:
    """Return those of the host's `gpus` that CUDA shows to this process, in the order of CUDA."""
    names = environment.get(VISIBLE_GPUS_VARIABLE)
    if names is None:
        return tuple(gpus)
    visible: list[Gpu] = []
    for name in names.split(","):
        gpu = _find_named(name.strip(), gpus)
        if gpu is None:  # CUDA ends the list at the first invalid entry, such as -1
            break
        visible.append(gpu)
    return tuple(visible[: len(gpus)])  # one GPU may have several MIG instances


def _find_named(name: str, gpus: Sequence[Gpu]) -> Gpu | None:
    """Return the GPU with the index or UUID `name`, whose end may be missing; None if invalid."""
    if name.isdecimal():
        return gpus[int(name)] if int(name) < len(gpus) else None
    if not gpus or not name.startswith(("GPU-", "MIG-")):
        return None
    named = (gpu for gpu in gpus if gpu.uuid.startswith(name))
    if name.startswith("GPU-") and all(gpu.uuid for gpu in gpus):
        return next(named, None)
    # The GPU of a MIG instance is unknown, and without nvidia-smi every UUID. CUDA 13 runs on all
    # GPUs with MIG, so take one on which it runs.
    fit = (gpu for gpu in gpus if gpu.problem is None)
    return next(chain(named, fit), gpus[0])


@dataclass(frozen=True, slots=True)
class VisibleGpu:
    """A GPU that CUDA shows to this process."""

    uuid: str
    memory_bytes: int


def read_visible_gpus() -> tuple[VisibleGpu, ...]:
    """Return the GPUs that CUDA shows to this process.

    Return () if nvidia-smi does not list all of them with their memory, as for MIG instances.
    """
    found = query_visible_gpus("memory.total")
    if not all(memory.isdecimal() for memory in found.values()):
        return ()
    return tuple(VisibleGpu(uuid, int(memory) * MEBIBYTE) for uuid, memory in found.items())


def query_visible_gpus(fields: str) -> Mapping[str, str]:
    """Return `fields` of the GPUs that CUDA shows to this process, by UUID, in the order of CUDA.

    Return {} if nvidia-smi does not list all of them, as for MIG instances.
    Ray names the GPUs of a replica in CUDA_VISIBLE_DEVICES, by index or UUID. nvidia-smi ignores
    this variable and lists all GPUs.
    """
    known: dict[str, tuple[str, str]] = {}
    for line in query_gpus(f"index,uuid,{fields}"):
        index, uuid, values = (*(part.strip() for part in line.split(",", 2)), "", "")[:3]
        known[index] = known[uuid] = uuid, values
    names = os.environ.get(VISIBLE_GPUS_VARIABLE)
    if names is None:
        return dict(known.values())
    gpus = [known.get(name.strip()) for name in names.split(",") if name.strip()]
    return dict(gpu for gpu in gpus if gpu is not None) if None not in gpus else {}


def query_gpus(fields: str) -> tuple[str, ...]:
    """Return `fields` from `nvidia-smi --query-gpu`, one line per GPU; empty if unavailable."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    command = [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as exc:
        log.warning("%s failed to query %s: %s", tool, fields, exc)
        return ()
    return tuple(line.strip() for line in result.stdout.splitlines() if line.strip())


def _parse_line(line: str) -> Gpu:
    """Parse one line of nvidia-smi. A value that the GPU does not report is `[N/A]`."""
    values = (*(part.strip() for part in line.split(",")), *[""] * 4)
    name, driver, memory, compute, uuid = values[:5]
    major, _, minor = compute.partition(".")
    return Gpu(
        name=name,
        driver=driver if re.fullmatch(r"[\d.]+", driver) else "",
        memory_bytes=int(memory) * MEBIBYTE if memory.isdecimal() else 0,
        compute_capability=(int(major), int(minor)) if (major + minor).isdecimal() else (0, 0),
        uuid=uuid,
    )


def _read_driver_files(directory: Path, device_file: Path) -> tuple[Gpu, ...]:
    """Read name and driver version from the kernel module, for containers without nvidia-smi.

    Containers without a GPU see these files too, but not the device files.
    """
    if not os.access(device_file, os.R_OK | os.W_OK):
        return ()
    try:
        version = (directory / "version").read_text(encoding="utf-8")
        cards = [path.read_text(encoding="utf-8") for path in directory.glob("gpus/*/information")]
    except OSError:
        return ()
    driver = re.search(r"\b\d{3,}\.[\d.]+", version)
    names = [re.search(r"^Model:\s*(.+)$", card, re.MULTILINE) for card in cards]
    return tuple(
        Gpu(name=name[1] if name else "NVIDIA GPU", driver=driver[0] if driver else "")
        for name in names
    )
