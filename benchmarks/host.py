"""What a figure cannot be read without: the machine, the versions, the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
CPU_INFO = Path("/proc/cpuinfo")
FLAGS_OF_INTEREST = (
    "avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile", "amx_int8",
    "amx_bf16", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip
PACKAGES_OF_INTEREST = (
    "hundredfold", "ray", "onnxruntime", "onnxruntime-gpu", "tokenizers", "numpy", "torch",
    "transformers", "uvloop", "httptools",
)  # fmt: skip
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Where and with what something was measured."""

    cpu_model: str
    cpu_flags: tuple[str, ...]
    logical_cores: int
    usable_cores: int  # what this process may run on
    memory_bytes: int
    load_average: float  # runnable processes over the minute before
    system: str
    python: str
    packages: Mapping[str, str]
    commit: str  # "-dirty" at its end: with changes that are in no commit

    @property
    def short(self) -> str:
        """One line for plots and tables."""
        commit, dash, dirty = self.commit.partition("-")
        return f"{self.cpu_model}, {self.usable_cores} cores, commit {commit[:12]}{dash}{dirty}"


def host_facts() -> HostFacts:
    """The facts of this process's machine."""
    info = parse_cpu_info(CPU_INFO.read_text() if CPU_INFO.is_file() else "")
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return HostFacts(
        cpu_model=info.get("model name") or platform.processor() or UNKNOWN,
        cpu_flags=tuple(flag for flag in FLAGS_OF_INTEREST if flag in flags),
        logical_cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        load_average=os.getloadavg()[0],
        system=platform.platform(),
        python=platform.python_version(),
        packages=installed_versions(PACKAGES_OF_INTEREST),
        commit=git_commit(REPOSITORY),
    )


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def parse_cpu_info(text: str) -> dict[str, str]:
    """The first processor of /proc/cpuinfo."""
    first = text.partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def installed_versions(names: tuple[str, ...]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit(repository: Path) -> str:
    """The commit checked out in `repository`; `unknown` outside of git."""
    try:
        commit = _git(repository, "rev-parse", "HEAD")
        changes = _git(repository, "status", "--porcelain")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return f"{commit}-dirty" if changes else commit


def _git(repository: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
