"""What the figures of a report depend on, as far as it can be known without measuring."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from build_artifacts.evaluation import EVERYTHING, Sampling, data_digest
from build_artifacts.steps.seal import build_tools
from deployments.config import LaneSettings
from deployments.errors import EngineFailed, HardwareUnavailable
from deployments.manifest import ArtifactManifest, Candidate, Device
from deployments.processors import usable_cores
from deployments.tuning.costs import Variant, read_costs
from deployments.tuning.host import Host, this_host
from deployments.tuning.opening import default_candidate
from deployments.tuning.placement import Placement

GPU_LANE = LaneSettings(providers=("CUDAExecutionProvider",))


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
    sampling: Sampling = EVERYTHING
    adapter: Path | None = None  # where the artifact's adapter lies
    gpu: LaneSettings = GPU_LANE


class Options(Frozen):
    """How it was measured."""

    runs: int = Field(ge=1)
    threads: int = Field(ge=1)
    seconds: float = Field(ge=0)
    evaluation: str | None  # sha256 of the data
    limit: int | None


class Setting(Frozen):
    """A report holds as long as this stays the same."""

    version: str  # of the artifact
    host: Host
    gpu: Host | None
    versions: dict[str, str]
    options: Options
    served: dict[str, tuple[str, ...]]  # variants by device and threads, most used first


@dataclass(frozen=True, slots=True)
class Serving:
    """The sealed graphs that a lane of this host serves with, most used first."""

    placement: Placement
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


def serving(placement: Placement) -> Serving | None:
    """What tuning chose here, else the portable default; None when no graph runs here."""
    table = read_costs(placement)
    if table is not None:
        return Serving(placement, table.chosen())
    try:
        default = default_candidate(placement)
    except (HardwareUnavailable, EngineFailed):
        return None
    return Serving(placement, (Variant.of(default.name, default.options),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """How this host runs one pass alone, and how it runs most items per second."""

    alone: LaneSettings
    crowd: LaneSettings
    gpu: LaneSettings

    @classmethod
    def of(cls, request: ReportRequest) -> Lanes:
        """The lanes on as many cores as were asked for."""
        threads = request.threads or usable_cores()
        return cls(
            alone=LaneSettings(threads_per_run=threads),
            crowd=LaneSettings(threads_per_run=1, runs=threads),
            gpu=request.gpu,
        )


def setting_of(request: ReportRequest, manifest: ArtifactManifest) -> Setting:
    """The setting that a report of `request` has now. Raises BuildError."""
    lanes = Lanes.of(request)
    evaluation = request.evaluation
    served = {}
    for device, lane in (
        (Device.CPU, lanes.alone),
        (Device.CPU, lanes.crowd),
        (Device.GPU, lanes.gpu),
    ):
        found = serving(Placement(request.artifact, manifest, device, lane))
        if found is not None:
            names = tuple(variant.name for variant in found.variants)
            served[f"{device}-{lane.threads_per_run}"] = names
    on_gpu = any(name.startswith(Device.GPU) for name in served)
    return Setting(
        version=manifest.version,
        host=this_host(Device.CPU),
        gpu=this_host(Device.GPU) if on_gpu else None,
        versions=build_tools(),
        options=Options(
            runs=request.runs,
            threads=lanes.alone.threads_per_run,
            seconds=request.seconds,
            evaluation=None if evaluation is None else data_digest(evaluation),
            limit=request.sampling.limit,
        ),
        served=served,
    )
