"""Private memory of the processes of a server over a run: in total, and of each process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import linear_regression, median

import psutil

from benchmarks.common.report import Table
from benchmarks.servers.process_kinds import KINDS, read_command, read_private_bytes

MIB = 1 << 20
OTHERS = "others"  # processes of no kind that is killed
MIN_SAMPLES = 6  # a process with fewer samples ended before its growth could be measured


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Private memory of all processes of the server at one time."""

    elapsed_s: float
    mib: float
    processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KindGrowth:
    """Growth of the processes of one kind while they lived."""

    kind: str
    processes: int  # number of processes that lived long enough to be measured
    longest_s: float  # longest time between the first and the last sample of a process
    mib_per_min: float  # median over the processes


@dataclass(slots=True)
class ProcessMemory:
    """Samples of one process: the time in s, and the MiB."""

    kind: str
    times_s: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)

    def add(self, elapsed_s: float, mib: float) -> None:
        self.times_s.append(elapsed_s)
        self.mib.append(mib)

    @property
    def mib_per_min(self) -> float:
        """Slope over the second half of the samples. The first half is warm-up."""
        half = len(self.mib) // 2
        return linear_regression(self.times_s[half:], self.mib[half:]).slope * 60


class MemoryLog:
    """The samples of a run."""

    def __init__(self) -> None:
        self.totals: list[MemorySample] = []
        self._lives: dict[psutil.Process, ProcessMemory] = {}

    def read(self, processes: Iterable[psutil.Process], elapsed_s: float) -> None:
        """Read the memory of the processes of the server and store one sample."""
        sizes = read_private_bytes(processes)
        for process, size in sizes.items():
            if process not in self._lives:
                self._lives[process] = ProcessMemory(_find_kind(process))
            self._lives[process].add(elapsed_s, size / MIB)
        self.totals.append(MemorySample(elapsed_s, sum(sizes.values()) / MIB, len(sizes)))

    def summarize_kinds(self) -> list[KindGrowth]:
        return summarize_kinds(self._lives.values())


def _find_kind(process: psutil.Process) -> str:
    command = read_command(process)
    return next((kind.name for kind in KINDS.values() if kind.words in command), OTHERS)


def summarize_kinds(lives: Iterable[ProcessMemory]) -> list[KindGrowth]:
    """Return the growth of each kind of which a process has MIN_SAMPLES samples."""
    by_kind: dict[str, list[ProcessMemory]] = {}
    for life in lives:
        if len(life.mib) >= MIN_SAMPLES:
            by_kind.setdefault(life.kind, []).append(life)
    return [
        KindGrowth(
            kind=kind,
            processes=len(found),
            longest_s=max(life.times_s[-1] - life.times_s[0] for life in found),
            mib_per_min=median(life.mib_per_min for life in found),
        )
        for kind, found in sorted(by_kind.items())
    ]


def measure_growth(samples: Sequence[MemorySample]) -> float | None:
    """Return the relative growth of the median memory from the second quarter to the last.

    The first quarter is warm-up. None if a quarter has no sample.
    """
    quarter = len(samples) // 4
    if not quarter:
        return None
    sizes = [sample.mib for sample in samples]
    return median(sizes[-quarter:]) / median(sizes[quarter : 2 * quarter]) - 1


def build_growth_table(kinds: Sequence[KindGrowth]) -> Table:
    rows = [
        (
            growth.kind,
            str(growth.processes),
            f"{growth.longest_s / 60:.1f} min",
            f"{growth.mib_per_min:+.2f}",
        )
        for growth in kinds
    ]
    return Table("growth", ("process", "measured", "longest life", "MiB per min"), rows)
