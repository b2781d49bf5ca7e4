"""The processor of this machine, and what of it this process may use."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from deployments.cgroups import ControlGroups

_CPU_INFO = Path("/proc/cpuinfo")
UNKNOWN = "unknown"

# Instructions that decide which kernels run, by Linux's names for them (x86 and arm64).
DECIDING_FLAGS = (
    "avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile", "amx_int8",
    "amx_bf16", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Processor:
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


def this_processor() -> Processor:
    """The processor this process runs on."""
    return read_processor(_CPU_INFO.read_text() if _CPU_INFO.is_file() else "")


def read_processor(cpu_info: str) -> Processor:
    """The first processor in the text of /proc/cpuinfo."""
    first = cpu_info.partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines() if ":" in line)
    facts = {name.strip(): value.strip() for name, _, value in pairs}
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    numbers = (facts.get(key, "") for key in ("cpu family", "model", "stepping", "CPU part"))
    return Processor(
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
