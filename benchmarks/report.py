"""Results as files, and as words for people."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from benchmarks.errors import BenchmarkError
from benchmarks.host import HostFacts, host_facts

DEFAULT_OUT = Path("benchmark-results")
BUSY_LOAD_PER_CORE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What every result file carries beside its figures."""

    benchmark: str
    command: str
    seed: int
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    host: HostFacts = field(default_factory=host_facts)

    @property
    def stem(self) -> str:
        """File name without its ending: the benchmark and when it started."""
        when = datetime.fromisoformat(self.started)
        return f"{self.benchmark}-{when:%Y%m%d-%H%M%S}"


def start_run(benchmark: str, command: str, seed: int) -> RunFacts:
    """The facts of a run that begins now; says so when the machine is not idle."""
    run = RunFacts(benchmark=benchmark, command=command, seed=seed)
    if run.host.load_average > BUSY_LOAD_PER_CORE * run.host.usable_cores:
        say(f"note: load average {run.host.load_average:.1f}; this machine can do better when idle")
    return run


def write_result(out: Path, run: RunFacts, figures: Any) -> Path:
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


def say(text: str) -> None:
    """Progress, on stderr, so that stdout holds the result only."""
    print(text, file=sys.stderr, flush=True)


def number(value: float, digits: int = 0) -> str:
    """A figure with thousands separated."""
    return f"{value:,.{digits}f}"
