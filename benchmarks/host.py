"""What a figure cannot be read without: the machine, the versions, the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from deployments.processors import (
    UNKNOWN,
    installed_versions,
    this_processor,
    usable_cores,
)

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES_OF_INTEREST = (
    "hundredfold", "ray", "onnxruntime", "onnxruntime-gpu", "tokenizers", "numpy", "torch",
    "transformers", "openvino", "nncf", "uvloop", "httptools",
)  # fmt: skip


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
    processor = this_processor()
    return HostFacts(
        cpu_model=processor.name,
        cpu_flags=processor.flags,
        logical_cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        load_average=os.getloadavg()[0],
        system=platform.platform(),
        python=platform.python_version(),
        packages=installed_versions(PACKAGES_OF_INTEREST),
        commit=git_commit(REPOSITORY),
    )


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
