"""Result files, and tables for the console and the documentation."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import psutil

from benchmarks.common.errors import BenchmarkError
from deployments.errors import ServeError
from deployments.files import write_atomically
from deployments.host.machine import (
    UNKNOWN,
    installed_versions,
    read_cpu_info,
    schedules_sessions,
    usable_cores,
)
from deployments.terminal.console import format_table
from deployments.tuning.costs import Shape

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "docs" / "results"  # published measurements
PACKAGES_OF_INTEREST = (
    "hundredfold", "ray", "onnxruntime", "onnxruntime-gpu", "tokenizers", "numpy", "torch",
    "transformers", "openvino", "nncf", "uvloop", "httptools",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInfo:
    """Hardware and software of the host that ran a measurement."""

    cpu_model: str
    cpu_flags: tuple[str, ...]
    logical_cores: int
    usable_cores: int  # number of cores that affinity mask and cgroup leave to this process
    memory_bytes: int
    load_average: float  # number of runnable processes, average of the last minute
    # Whether the kernel gives each process session (setsid) an equal share of the cores. If so, the
    # load generator, in a session of its own, may take half of the cores from the server.
    schedules_sessions: bool
    system: str
    python: str
    packages: Mapping[str, str]
    commit: str  # ends with "-dirty" if the work tree has uncommitted changes

    @property
    def short(self) -> str:
        commit, dash, dirty = self.commit.partition("-")
        return f"{self.cpu_model}, {self.usable_cores} cores, commit {commit[:12]}{dash}{dirty}"


def read_host_info() -> HostInfo:
    processor = read_cpu_info()
    return HostInfo(
        cpu_model=processor.name,
        cpu_flags=processor.flags,
        logical_cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        load_average=os.getloadavg()[0],
        schedules_sessions=schedules_sessions(),
        system=platform.platform(),
        python=platform.python_version(),
        packages=installed_versions(PACKAGES_OF_INTEREST),
        commit=git_commit(REPOSITORY),
    )


def git_commit(repository: Path) -> str:
    """Return the checked-out commit, with the suffix `-dirty` if there are uncommitted changes.

    Return `unknown` if `repository` is not the root of a checkout. An installed copy may lie in the
    checkout of another project, whose commit does not identify this code.
    """
    try:
        if _git(repository, "rev-parse", "--show-prefix"):
            return UNKNOWN
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
    """Command, start time and host of a run. Every result file contains them."""

    benchmark: str
    command: str
    seed: int
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    host: HostInfo = field(default_factory=read_host_info)
    incomplete: str = ""  # why the run ended early; empty: it ran to its end

    @property
    def stem(self) -> str:
        """File name without suffix: benchmark and start time."""
        started = datetime.fromisoformat(self.started)
        return f"{self.benchmark}-{started:%Y%m%d-%H%M%S}"


def start_run(benchmark: str, command: str, seed: int) -> RunMetadata:
    """Return the metadata of a run that starts now.

    Log a note if the result file will name no commit, if the machine is busy, or if the kernel
    shares the cores equally among process sessions.
    """
    run = RunMetadata(benchmark=benchmark, command=command, seed=seed)
    if run.host.commit == UNKNOWN:
        log_progress("note: no git checkout; the result file names no commit")
    if run.host.load_average > BUSY_LOAD_PER_CORE * run.host.usable_cores:
        log_progress(
            f"note: load average {run.host.load_average:.1f}; rates of a busy machine are too low"
        )
    if run.host.schedules_sessions:
        log_progress(
            "note: sched_autogroup_enabled=1: a load generator on this host may take half of the "
            "cores from the server"
        )
    return run


@dataclass(frozen=True, slots=True)
class Table:
    """One table of a result file. `columns` is the header. Every row has one cell per column."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def text(self) -> str:
        """Aligned columns for the console."""
        return format_table([self.columns, *self.rows], align_right=True)

    @property
    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def read_table(path: Path, name: str) -> Table:
    """Read one table of a result file. Raises BenchmarkError if the file or table is missing."""
    try:
        tables = orjson.loads(path.read_bytes())["tables"]
        (table,) = [Table(**entry) for entry in tables if entry["name"] == name]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise BenchmarkError(
            f"`{path.name}` has no table `{name}`: {exc!r}",
            hint="name a file of docs/results and one of its tables in the marker",
        ) from exc
    return table


def _write_result(out: Path, run: RunMetadata, results: Any, tables: Sequence[Table]) -> Path:
    path = out / f"{run.stem}.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(path, encode_result(run, results, tables))
    except OSError as exc:
        raise BenchmarkError(
            f"cannot write `{path}`: {exc.strerror}", hint="name another directory with --out DIR"
        ) from exc
    return path


def publish(
    arguments: argparse.Namespace,
    run: RunMetadata,
    results: Any,
    tables: Sequence[Table],
    *,
    text: str | None = None,
    notes: Iterable[str] = (),
) -> None:
    """Write `<out>/<stem>.json` with the keys `run`, `tables` and `results`, and print the result.

    With `--json`, print the file. Otherwise print `text`, or the tables if `text` is None, and then
    the notes. `arguments` include the options of `add_run_options`. `results` may hold dataclasses,
    arrays and shapes. Raises BenchmarkError if the file cannot be written.
    """
    path = _write_result(arguments.out, run, results, tables)
    if arguments.json:
        print(path.read_text(encoding="utf-8"), end="", flush=True)
    else:
        shown = "\n\n".join(table.text for table in tables) if text is None else text
        print("\n".join((shown, *notes)), flush=True)
    if run.incomplete:
        log_progress(f"note: the results are incomplete: {run.incomplete}")
    log_progress(f"wrote {path}")


@contextmanager
def publish_at_end(
    run: RunMetadata, publish_results: Callable[[RunMetadata], None]
) -> Iterator[None]:
    """Call `publish_results` with `run` after the block, even if it fails or is interrupted.

    Then `run` has the reason in the field `incomplete`, and the error is raised again.
    """
    try:
        yield
    except BaseException as exc:
        reason = exc.message if isinstance(exc, ServeError) else repr(exc)
        publish_results(replace(run, incomplete=reason))
        raise
    publish_results(run)


def encode_result(run: RunMetadata, results: Any, tables: Sequence[Table]) -> bytes:
    """Return the content of a result file: indented JSON."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    content = {"run": run, "tables": tables, "results": results}
    return orjson.dumps(content, default=_encode_shape, option=options)


def _encode_shape(value: Any) -> str:
    if isinstance(value, Shape):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def log_progress(text: str) -> None:
    """Print to stderr, so that stdout holds only the result."""
    print(text, file=sys.stderr, flush=True)


def format_number(value: float, digits: int = 0) -> str:
    return f"{value:,.{digits}f}"


def format_counts(counts: Mapping[str, int]) -> str:
    """Return a cell such as `2 x 429, 1 x no_answer`; `0` without counts."""
    return ", ".join(f"{count} x {what}" for what, count in counts.items()) or "0"
