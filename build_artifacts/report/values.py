"""What a report says, as values, and the arithmetic of its ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, geometric_mean, median, stdev
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from build_artifacts.evaluation import ALL_EXAMPLES, ExampleSampling, digest_data
from build_artifacts.steps.seal import read_tool_versions
from deployments.artifacts.manifest import ArtifactManifest, Candidate
from deployments.artifacts.types import Device
from deployments.config import EncoderSettings
from deployments.errors import EngineFailed, HardwareUnavailable
from deployments.machine import usable_cores
from deployments.tuning.costs import TuningTarget, Variant, read_costs
from deployments.tuning.host import Host, read_host
from deployments.tuning.opening import default_candidate

GPU_SETTINGS = EncoderSettings(providers=("CUDAExecutionProvider",))


class Frozen(BaseModel):
    """A part of a report."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRequest:
    """What is to be reported on, and how much time it may take."""

    artifact: Path
    store: Path
    runs: int = 50  # sequential passes per length
    threads: int | None = None  # None: all usable cores
    seconds: float = 300.0  # for all timed passes together
    evaluation: Path | None = None
    sampling: ExampleSampling = ALL_EXAMPLES
    adapter: Path | None = None  # where the artifact's adapter lies
    gpu: EncoderSettings = GPU_SETTINGS


class ReportOptions(Frozen):
    """How it was measured."""

    runs: int = Field(ge=1)
    threads: int = Field(ge=1)
    seconds: float = Field(ge=0)
    evaluation: str | None  # sha256 of the data
    limit: int | None


class ReportConditions(Frozen):
    """A report holds as long as this stays the same."""

    version: str  # of the artifact
    host: Host
    gpu: Host | None
    versions: dict[str, str]
    options: ReportOptions
    served: dict[str, tuple[str, ...]]  # variants by device and threads, most used first


@dataclass(frozen=True, slots=True)
class ServedVariants:
    """The sealed graphs that an encoder of this host serves with, most used first."""

    placement: TuningTarget
    variants: tuple[Variant, ...]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Each graph once."""
        sealed = {candidate.name: candidate for candidate in self.placement.candidates}
        return tuple(sealed[name] for name in dict.fromkeys(v.candidate for v in self.variants))

    @property
    def size_bytes(self) -> int:
        """Their files."""
        files = self.placement.manifest.files
        return sum(files[graph].size for graph in {c.graph for c in self.candidates})


def serving(placement: TuningTarget) -> ServedVariants | None:
    """The tuned selection, else the default candidate; None when no graph runs here."""
    table = read_costs(placement)
    if table is not None:
        return ServedVariants(placement, table.selected_variants())
    try:
        default = default_candidate(placement)
    except (HardwareUnavailable, EngineFailed):
        return None
    return ServedVariants(placement, (Variant.of(default.name, default.options),))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingModes:
    """How this host runs one pass alone, and how it runs most items per second."""

    alone: EncoderSettings
    crowd: EncoderSettings
    gpu: EncoderSettings

    @classmethod
    def of(cls, request: ReportRequest) -> TimingModes:
        """The modes on as many cores as were asked for."""
        threads = request.threads or usable_cores()
        return cls(
            alone=EncoderSettings(intra_op_threads=threads),
            crowd=EncoderSettings(intra_op_threads=1, concurrent_passes=threads),
            gpu=request.gpu,
        )


def read_conditions(request: ReportRequest, manifest: ArtifactManifest) -> ReportConditions:
    """The setting that a report of `request` has now. Raises BuildError."""
    modes = TimingModes.of(request)
    evaluation = request.evaluation
    served = {}
    for device, settings in (
        (Device.CPU, modes.alone),
        (Device.CPU, modes.crowd),
        (Device.GPU, modes.gpu),
    ):
        found = serving(TuningTarget(request.artifact, manifest, device, settings))
        if found is not None:
            names = tuple(variant.name for variant in found.variants)
            served[f"{device}-{settings.intra_op_threads}"] = names
    on_gpu = any(name.startswith(Device.GPU) for name in served)
    return ReportConditions(
        version=manifest.version,
        host=read_host(Device.CPU),
        gpu=read_host(Device.GPU) if on_gpu else None,
        versions=read_tool_versions(),
        options=ReportOptions(
            runs=request.runs,
            threads=modes.alone.intra_op_threads,
            seconds=request.seconds,
            evaluation=None if evaluation is None else digest_data(evaluation),
            limit=request.sampling.limit,
        ),
        served=served,
    )


# The stage that all others are compared with.
BASELINE = "torch"


class StageLatency(Frozen):
    """Sequential passes of one item of `tokens` tokens."""

    tokens: int = Field(ge=1)
    runs: int = Field(ge=1)
    mean_ms: float = Field(gt=0)
    std_ms: float = Field(ge=0)  # of a sample; 0 for a single run
    median_ms: float = Field(gt=0)
    p95_ms: float = Field(gt=0)
    speedup: float | None = None  # mean of the baseline by this mean

    @classmethod
    def of(cls, tokens: int, times_s: Sequence[float]) -> StageLatency:
        """The figures of passes that took `times_s` seconds each."""
        times_ms = [taken * 1e3 for taken in times_s]
        return cls(
            tokens=tokens,
            runs=len(times_ms),
            mean_ms=fmean(times_ms),
            std_ms=stdev(times_ms) if len(times_ms) > 1 else 0.0,
            median_ms=median(times_ms),
            p95_ms=float(np.percentile(times_ms, 95)),
        )


class StageThroughput(Frozen):
    """Full batches of `items` x `tokens`, `passes` of them at once."""

    items: int = Field(ge=1)
    tokens: int = Field(ge=1)
    passes: int = Field(ge=1)
    rounds: int = Field(ge=1)
    items_per_s: float = Field(gt=0)  # median of the rounds
    speedup: float | None = None  # by the items per second of the baseline


class StageResult(Frozen):
    """One row of the table."""

    name: str
    what: str  # in a few words
    is_baseline_path: bool  # False: measured for comparison only
    size_bytes: int = Field(ge=0)  # weights on disk
    cosine: float  # mean, to the fp32 reference sealed with the artifact, each probe alone
    agreement: float | None  # top-1, where the model chooses (see `manifest.Parity`)
    scores: dict[str, float]  # the task's metrics; empty where none were measured
    latencies: tuple[StageLatency, ...]  # by tokens
    throughput: StageThroughput | None
    speedup: float | None = None  # geometric mean over the lengths


class Report(Frozen):
    """The journey of one artifact on one host.

    `metric` is the leading one among the scores; `unmeasured` names stages that are left out, and
    why.
    """

    schema_version: Literal[2] = 2
    id: str
    conditions: ReportConditions
    source: str
    metric: str | None
    measured_at: str  # UTC, ISO 8601
    command: str
    stages: tuple[StageResult, ...] = Field(min_length=1)
    unmeasured: dict[str, str]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Every length that was measured, ascending."""
        return tuple(self.runs)

    @property
    def runs(self) -> dict[int, int]:
        """Runs of each stage by length; of the stage with the fewest, should they differ."""
        counts: dict[int, int] = {}
        for latency in (one for stage in self.stages for one in stage.latencies):
            counts[latency.tokens] = min(latency.runs, counts.get(latency.tokens, latency.runs))
        return dict(sorted(counts.items()))

    def to_json(self) -> bytes:
        """The bytes of report.json."""
        return (self.model_dump_json(indent=1) + "\n").encode()


def add_speedups(stages: Sequence[StageResult]) -> tuple[StageResult, ...]:
    """The stages with their speed-ups; as they are where the baseline is not among them."""
    baseline = next((stage for stage in stages if stage.name == BASELINE), None)
    return tuple(stages) if baseline is None else tuple(_over(baseline, s) for s in stages)


def _over(baseline: StageResult, stage: StageResult) -> StageResult:
    means = {one.tokens: one.mean_ms for one in baseline.latencies}
    latencies = tuple(
        one.model_copy(update={"speedup": means[one.tokens] / one.mean_ms})
        if one.tokens in means
        else one
        for one in stage.latencies
    )
    ratios = [one.speedup for one in latencies if one.speedup is not None]
    throughput, slow = stage.throughput, baseline.throughput
    if throughput is not None and slow is not None:
        gain = throughput.items_per_s / slow.items_per_s
        throughput = throughput.model_copy(update={"speedup": gain})
    return stage.model_copy(
        update={
            "latencies": latencies,
            "throughput": throughput,
            "speedup": geometric_mean(ratios) if ratios else None,
        }
    )
