"""What its control groups leave a process of the machine's cores and memory (Linux, v1 and v2).

A container's own view hides the groups above it, so a limit is looked for in every group from the
process's own up to the root, and the tightest counts.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from math import ceil
from pathlib import Path, PurePosixPath

_CPU_INFO = Path("/proc/cpuinfo")
UNKNOWN = "unknown"

# Instructions that decide which kernels run, by Linux's names for them (x86 and arm64).
DECIDING_FLAGS = (
    "avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile", "amx_int8",
    "amx_bf16", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """One kind of CPU."""

    name: str
    generation: str  # tells apart what clouds sell under one name
    flags: tuple[str, ...]  # those of DECIDING_FLAGS it has
    machine: str = platform.machine()

    @property
    def overflows(self) -> bool:
        """Whether products of uint8 and int8 overflow, which x86 adds in 16 bits without VNNI.

        https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html
        """
        return self.machine == "x86_64" and not {"avx512_vnni", "avx_vnni"} & set(self.flags)


def read_cpu_info() -> CpuInfo:
    """The processor this process runs on."""
    return parse_cpu_info(_CPU_INFO.read_text() if _CPU_INFO.is_file() else "")


def parse_cpu_info(cpu_info: str) -> CpuInfo:
    """The first processor in the text of /proc/cpuinfo."""
    first = cpu_info.partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines() if ":" in line)
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    numbers = (facts.get(key, "") for key in ("cpu family", "model", "stepping", "CPU part"))
    return CpuInfo(
        name=facts.get("model name") or platform.processor() or platform.machine() or UNKNOWN,
        generation="-".join(number for number in numbers if number),
        flags=tuple(flag for flag in DECIDING_FLAGS if flag in flags),
    )


def usable_cores() -> int:
    """Cores this process may keep busy: by affinity, and by its control groups' quotas."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, ControlGroups.own().cores() or cores))


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The groups of one process: by controller its directory, "" for the one tree of version 2."""

    root: Path
    paths: Mapping[str, str]

    @classmethod
    def own(cls) -> ControlGroups:
        """Those of this process; without any limit where there are no control groups."""
        told = _MEMBERSHIP.read_text(encoding="utf-8") if _MEMBERSHIP.is_file() else ""
        return cls(_ROOT, read_membership(told))

    def cores(self) -> int | None:
        """Cores that may be kept busy, rounded up; None without a limit."""
        shares = [share for group in self._groups("cpu") if (share := _cores(group)) is not None]
        return ceil(min(shares)) if shares else None

    def free_bytes(self) -> int | None:
        """Memory that may still be taken; None without a limit."""
        rooms = [room for group in self._groups("memory") if (room := _room(group)) is not None]
        return max(0, min(rooms)) if rooms else None

    def _groups(self, controller: str) -> Iterator[Path]:
        for name in (controller, ""):
            if name in self.paths:
                own = PurePosixPath(self.paths[name].lstrip("/"))
                yield from (self.root / name / path for path in (own, *own.parents))


def read_membership(text: str) -> Mapping[str, str]:
    """The text of /proc/<pid>/cgroup as a directory per controller."""
    lines = (line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2)
    return {name: path for _, names, path in lines for name in names.split(",")}


def _cores(group: Path) -> float | None:
    quota, _, period = _told(group / "cpu.max").partition(" ")
    quota = quota or _told(group / "cpu.cfs_quota_us")
    period = period or _told(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _room(group: Path) -> int | None:
    limit = _told(group / "memory.max") or _told(group / "memory.limit_in_bytes")
    used = _told(group / "memory.current") or _told(group / "memory.usage_in_bytes")
    if not limit.isdigit() or not used.isdigit():
        return None
    # Files that were read stay in memory until somebody needs it; they count as used.
    facts = dict(line.split(" ", 1) for line in _told(group / "memory.stat").splitlines())
    cached = facts.get("total_inactive_file") or facts.get("inactive_file") or "0"
    return int(limit) - int(used) + int(cached)


def _told(path: Path) -> str:
    """What a file of a group says; empty where there is no such file."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
