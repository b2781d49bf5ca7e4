"""Values of a report, the conditions of its measurement, and its speed-ups."""

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
from deployments.host.machine import usable_cores
from deployments.tuning.costs import TuningTarget, Variant, read_costs
from deployments.tuning.host import Host, read_host
from deployments.tuning.opening import default_candidate

DEFAULT_RUNS, DEFAULT_SECONDS = 50, 300.0  # defaults of `hundredfold models report`
GPU_SETTINGS = EncoderSettings(providers=("CUDAExecutionProvider",))


class ReportModel(BaseModel):
    """Base of the values in report.json. Infinite and undefined numbers are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRequest:
    """Inputs of a report: the artifact to measure, and the time, threads and data to use."""

    artifact: Path
    store: Path
    runs: int = DEFAULT_RUNS  # sequential passes per length
    threads: int | None = None  # None: all usable cores
    seconds: float = DEFAULT_SECONDS  # s, for all timed passes of all stages
    evaluation: Path | None = None
    sampling: ExampleSampling = ALL_EXAMPLES
    adapter: Path | None = None  # directory of the adapter
    prune_data: Path | None = None  # calibration file of the build's pruning
    gpu: EncoderSettings = GPU_SETTINGS


class ReportOptions(ReportModel):
    """Options of `hundredfold models report` that affect the measurement."""

    runs: int = Field(ge=1)
    threads: int = Field(ge=1)
    seconds: float = Field(ge=0)
    evaluation: str | None  # sha256 of the labeled data
    limit: int | None


class ReportConditions(ReportModel):
    """Conditions of a measurement. A complete stored report is reused until one of them changes."""

    version: str  # artifact version
    host: Host
    gpu: Host | None
    versions: dict[str, str]
    options: ReportOptions
    # Variant names by device and threads. The variant that runs most shapes comes first.
    served: dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class ServedVariants:
    """Variants that an encoder deployment on this host serves, the one for most shapes first.

    A variant is a candidate graph with session options.
    """

    target: TuningTarget
    variants: tuple[Variant, ...]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Candidates of the variants without duplicates."""
        sealed = {candidate.name: candidate for candidate in self.target.candidates}
        return tuple(sealed[name] for name in dict.fromkeys(v.candidate for v in self.variants))

    @property
    def size_bytes(self) -> int:
        """Size of the graphs and of their weight files. A graph of two candidates counts once."""
        by_graph = {candidate.graph: candidate for candidate in self.candidates}
        return sum(map(self.target.manifest.count_bytes, by_graph.values()))


def read_served_variants(target: TuningTarget) -> ServedVariants | None:
    """Read the tuned selection, else the default candidate. Return None if no graph runs here."""
    costs = read_costs(target)
    if costs is not None:
        return ServedVariants(target, costs.selected_variants())
    try:
        default = default_candidate(target)
    except (HardwareUnavailable, EngineFailed):
        return None
    return ServedVariants(target, (Variant.of(default.name, default.options),))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingModes:
    """CPU settings for the lowest latency of one pass and for the most items per second.

    `gpu` is for both measurements on a GPU.
    """

    single_pass: EncoderSettings
    throughput: EncoderSettings
    gpu: EncoderSettings

    @classmethod
    def of(cls, request: ReportRequest) -> TimingModes:
        threads = request.threads or usable_cores()
        return cls(
            single_pass=EncoderSettings(intra_op_threads=threads),
            throughput=EncoderSettings(intra_op_threads=1, concurrent_passes=threads),
            gpu=request.gpu,
        )


def read_conditions(request: ReportRequest, manifest: ArtifactManifest) -> ReportConditions:
    """Read the current conditions of `request`. Raises BuildError for unreadable labeled data."""
    modes = TimingModes.of(request)
    evaluation = request.evaluation
    served = {}
    for device, settings in (
        (Device.CPU, modes.single_pass),
        (Device.CPU, modes.throughput),
        (Device.GPU, modes.gpu),
    ):
        variants = read_served_variants(TuningTarget(request.artifact, manifest, device, settings))
        if variants is not None:
            names = tuple(variant.name for variant in variants.variants)
            served[f"{device}-{settings.intra_op_threads}"] = names
    on_gpu = any(name.startswith(Device.GPU) for name in served)
    return ReportConditions(
        version=manifest.version,
        host=read_host(Device.CPU),
        gpu=read_host(Device.GPU) if on_gpu else None,
        versions=read_tool_versions(),
        options=ReportOptions(
            runs=request.runs,
            threads=modes.single_pass.intra_op_threads,
            seconds=request.seconds,
            evaluation=None if evaluation is None else digest_data(evaluation),
            limit=request.sampling.limit,
        ),
        served=served,
    )


BASELINE = "torch"  # name of the stage that all others are compared with


class StageLatency(ReportModel):
    """Latency of sequential passes of one item of `tokens` tokens."""

    tokens: int = Field(ge=1)
    runs: int = Field(ge=1)
    mean_ms: float = Field(gt=0)
    std_ms: float = Field(ge=0)  # sample standard deviation; 0 for a single run
    median_ms: float = Field(gt=0)
    p95_ms: float = Field(gt=0)
    speedup: float | None = None  # mean_ms of the baseline divided by mean_ms

    @classmethod
    def of(cls, tokens: int, times_s: Sequence[float]) -> StageLatency:
        times_ms = [time_s * 1e3 for time_s in times_s]
        return cls(
            tokens=tokens,
            runs=len(times_ms),
            mean_ms=fmean(times_ms),
            std_ms=stdev(times_ms) if len(times_ms) > 1 else 0.0,
            median_ms=median(times_ms),
            p95_ms=float(np.percentile(times_ms, 95)),
        )


class StageThroughput(ReportModel):
    """Throughput of full batches of `items` x `tokens`, in `passes` concurrent passes."""

    items: int = Field(ge=1)
    tokens: int = Field(ge=1)
    passes: int = Field(ge=1)
    rounds: int = Field(ge=1)
    items_per_s: float = Field(gt=0)  # median of the rounds
    speedup: float | None = None  # items_per_s divided by items_per_s of the baseline


class StageResult(ReportModel):
    """Measurements of one stage; one row of the table."""

    name: str
    what: str  # description in a few words
    # True: a stage on the way from the original to the served graph. False: only for comparison.
    is_baseline_path: bool
    size_bytes: int = Field(ge=0)  # of the weights on disk
    cosine: float  # mean cosine of unbatched probes to the artifact's fp32 reference
    agreement: float | None  # top-1 agreement of models with labels (see `manifest.Parity`)
    # Results of the accuracy gate in the build; None for stages whose graph is not in the artifact.
    batched_cosine_worst: float | None = None
    batched_top1_agreement: float | None = None
    scores: dict[str, float]  # metrics of the task; empty without labeled data
    latencies: tuple[StageLatency, ...]  # ascending by tokens
    throughput: StageThroughput | None
    speedup: float | None = None  # geometric mean over the lengths


class Report(ReportModel):
    """Measurements of all stages of one artifact on one host.

    `metric` is the main metric among the scores. `unmeasured` maps missing stages and measurements
    to the reason.
    """

    schema_version: Literal[3] = 3
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
        """Measured lengths in tokens, ascending."""
        return tuple(self.runs)

    @property
    def runs(self) -> dict[int, int]:
        """Number of runs per length in tokens: the smallest number of any stage."""
        counts: dict[int, int] = {}
        for stage in self.stages:
            for latency in stage.latencies:
                fewest = counts.get(latency.tokens, latency.runs)
                counts[latency.tokens] = min(latency.runs, fewest)
        return dict(sorted(counts.items()))

    def to_json(self) -> bytes:
        return (self.model_dump_json(indent=1) + "\n").encode()


def add_speedups(stages: Sequence[StageResult]) -> tuple[StageResult, ...]:
    """Add the speed-ups over the baseline. Without a baseline, return the stages unchanged."""
    baseline = next((stage for stage in stages if stage.name == BASELINE), None)
    return tuple(stages) if baseline is None else tuple(_add_speedup(baseline, s) for s in stages)


def _add_speedup(baseline: StageResult, stage: StageResult) -> StageResult:
    means = {latency.tokens: latency.mean_ms for latency in baseline.latencies}
    latencies = tuple(
        latency.model_copy(update={"speedup": means[latency.tokens] / latency.mean_ms})
        if latency.tokens in means
        else latency
        for latency in stage.latencies
    )
    speedups = [latency.speedup for latency in latencies if latency.speedup is not None]
    throughput = stage.throughput
    if throughput is not None and baseline.throughput is not None:
        ratio = throughput.items_per_s / baseline.throughput.items_per_s
        throughput = throughput.model_copy(update={"speedup": ratio})
    return stage.model_copy(
        update={
            "latencies": latencies,
            "throughput": throughput,
            "speedup": geometric_mean(speedups) if speedups else None,
        }
    )
