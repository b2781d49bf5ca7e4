"""CPU, cgroup limits and library versions of this process (Linux, cgroups v1 and v2)."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from math import ceil
from pathlib import Path, PurePosixPath

_CPU_INFO = Path("/proc/cpuinfo")
_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
UNKNOWN = "unknown"

# Instruction sets that decide which compute kernels an engine selects, by their names in
# /proc/cpuinfo (x86 and arm64).
KERNEL_FLAGS = (
    "avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile", "amx_int8",
    "amx_bf16", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """Model and instruction sets of a CPU."""

    name: str
    generation: str  # distinguishes CPUs that clouds sell under one name
    flags: tuple[str, ...]  # subset of KERNEL_FLAGS
    machine: str = platform.machine()

    @property
    def int8_overflows(self) -> bool:
        """Whether sums of uint8 x int8 products overflow: x86 without VNNI sums them in 16 bits.

        https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html
        """
        return self.machine == "x86_64" and not {"avx512_vnni", "avx_vnni"} & set(self.flags)


def read_cpu_info() -> CpuInfo:
    """Read the CPU of this machine from /proc/cpuinfo, if the file exists."""
    return parse_cpu_info(_CPU_INFO.read_text() if _CPU_INFO.is_file() else "")


def parse_cpu_info(cpu_info: str) -> CpuInfo:
    """Parse the first processor in the text of /proc/cpuinfo."""
    first = cpu_info.partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    numbers = (fields.get(key, "") for key in ("cpu family", "model", "stepping", "CPU part"))
    return CpuInfo(
        name=fields.get("model name") or platform.processor() or platform.machine() or UNKNOWN,
        generation="-".join(number for number in numbers if number),
        flags=tuple(flag for flag in KERNEL_FLAGS if flag in flags),
    )


def usable_cores() -> int:
    """Return the number of cores that this process may use, by CPU affinity and cgroup quota."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, ControlGroups.own().cores() or cores))


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of `packages`; omit packages that are not installed."""
    versions: dict[str, str] = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def advise_install(extras: str) -> str:
    """Return advice to install `extras`, with the compiler for CUDA where its engine is installed.

    The extras for the CPU bring `onnxruntime`, which overwrites files of `onnxruntime-gpu`. An
    editable installation stays editable.
    """
    if installed_versions(("onnxruntime-gpu",)):
        extras = extras.replace("build,cpu", "gpu-build")
    options = "-c constraints.txt"
    with suppress(metadata.PackageNotFoundError):
        if is_from_checkout(metadata.distribution("hundredfold")):
            options += " -e"
    return f"run `pip install {options} '.[{extras}]'` in the checkout"


def is_from_checkout(distribution: metadata.Distribution) -> bool:
    """Return whether Python imports a distribution's modules from its checkout.

    https://packaging.python.org/specifications/direct-url/
    """
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    return bool(origin.get("dir_info", {}).get("editable"))


_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The cgroups of one process.

    `paths` maps controllers to directories; the key "" stands for cgroups v2.

    A parent group may have a lower limit. Every group up to the visible root is therefore read, and
    the smallest limit applies.
    """

    root: Path
    paths: Mapping[str, str]

    @classmethod
    def own(cls) -> ControlGroups:
        """Return the groups of this process, without limits if the system has no cgroups."""
        text = _MEMBERSHIP.read_text(encoding="utf-8") if _MEMBERSHIP.is_file() else ""
        return cls(_ROOT, parse_membership(text))

    def cores(self) -> int | None:
        """Return the CPU quota in cores, rounded up; None without a limit."""
        quotas = [quota for group in self._groups("cpu") if (quota := _cores(group)) is not None]
        return ceil(min(quotas)) if quotas else None

    def free_bytes(self) -> int | None:
        """Return the memory below the limit that is still available; None without a limit."""
        groups = map(_available_bytes, self._groups("memory"))
        available = [size for size in groups if size is not None]
        return max(0, min(available)) if available else None

    def oom_kills(self) -> int:
        """Return how many processes of this group the kernel has killed for lack of memory."""
        counts = map(_oom_kills, self._groups("memory"))
        return next((count for count in counts if count is not None), 0)

    def has_cpu_weight(self) -> bool:
        """Return whether a control group of this process has its own weight for CPU time."""
        is_in_v1_group = self.paths.get("cpu", "/") != "/"
        return is_in_v1_group or any((group / "cpu.weight").exists() for group in self._groups(""))

    def _groups(self, controller: str) -> Iterator[Path]:
        for name in (controller, ""):
            if name in self.paths:
                own = PurePosixPath(self.paths[name].lstrip("/"))
                yield from (self.root / name / path for path in (own, *own.parents))


def parse_membership(text: str) -> Mapping[str, str]:
    """Parse the text of /proc/<pid>/cgroup. Return the directory of each controller."""
    lines = (line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2)
    return {name: path for _, names, path in lines for name in names.split(",")}


def _cores(group: Path) -> float | None:
    quota, _, period = _read_text(group / "cpu.max").partition(" ")
    quota = quota or _read_text(group / "cpu.cfs_quota_us")
    period = period or _read_text(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _available_bytes(group: Path) -> int | None:
    limit = _read_text(group / "memory.max") or _read_text(group / "memory.limit_in_bytes")
    used = _read_text(group / "memory.current") or _read_text(group / "memory.usage_in_bytes")
    if not limit.isdigit() or not used.isdigit():
        return None
    # The used memory includes page cache. Add it back, because the kernel frees it on demand.
    fields = dict(line.split(" ", 1) for line in _read_text(group / "memory.stat").splitlines())
    cached = fields.get("total_inactive_file") or fields.get("inactive_file") or "0"
    return int(limit) - int(used) + int(cached)


def _oom_kills(group: Path) -> int | None:
    text = _read_text(group / "memory.events") or _read_text(group / "memory.oom_control")
    fields = dict(line.split(" ", 1) for line in text.splitlines())
    return int(fields["oom_kill"]) if "oom_kill" in fields else None


def _read_text(path: Path) -> str:
    """Read a small file of the kernel; empty if it does not exist."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def schedules_sessions() -> bool:
    """Return whether each process session gets an equal share of the cores (man 7 sched).

    Linux does so for processes without a control group of their own.
    """
    return _read_text(_AUTOGROUP) == "1" and not ControlGroups.own().has_cpu_weight()
