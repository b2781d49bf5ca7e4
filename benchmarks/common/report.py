"""Results as files, and as words for people."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import psutil

from benchmarks.common.errors import BenchmarkError
from deployments.machine import (
    UNKNOWN,
    installed_versions,
    read_cpu_info,
    usable_cores,
)

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES_OF_INTEREST = (
    "hundredfold", "ray", "onnxruntime", "onnxruntime-gpu", "tokenizers", "numpy", "torch",
    "transformers", "openvino", "nncf", "uvloop", "httptools",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInfo:
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


def read_host_info() -> HostInfo:
    """The facts of this process's machine."""
    processor = read_cpu_info()
    return HostInfo(
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


DEFAULT_OUT = Path("benchmark-results")
BUSY_LOAD_PER_CORE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetadata:
    """What every result file carries beside its figures."""

    benchmark: str
    command: str
    seed: int
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    host: HostInfo = field(default_factory=read_host_info)

    @property
    def stem(self) -> str:
        """File name without its ending: the benchmark and when it started."""
        when = datetime.fromisoformat(self.started)
        return f"{self.benchmark}-{when:%Y%m%d-%H%M%S}"


def start_run(benchmark: str, command: str, seed: int) -> RunMetadata:
    """The facts of a run that begins now; says so when the machine is not idle."""
    run = RunMetadata(benchmark=benchmark, command=command, seed=seed)
    if run.host.load_average > BUSY_LOAD_PER_CORE * run.host.usable_cores:
        log_progress(
            f"note: load average {run.host.load_average:.1f}; this machine can do better when idle"
        )
    return run


def write_result(out: Path, run: RunMetadata, figures: Any) -> Path:
    """`<out>/<stem>.json`: the run's facts, then its figures (dataclasses and arrays are fine)."""
    path = out / f"{run.stem}.json"
    options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    try:
        out.mkdir(parents=True, exist_ok=True)
        path.write_bytes(orjson.dumps({"run": run, "figures": figures}, option=options))
    except OSError as exc:
        raise BenchmarkError(
            f"cannot write `{path}`: {exc.strerror}", hint="name another directory with --out DIR"
        ) from exc
    return path


def log_progress(text: str) -> None:
    """BuildProgress, on stderr, so that stdout holds the result only."""
    print(text, file=sys.stderr, flush=True)


def number(value: float, digits: int = 0) -> str:
    """A figure with thousands separated."""
    return f"{value:,.{digits}f}"
