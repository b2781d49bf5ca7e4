"""Cost tables: measured times of a model's graphs on one kind of host, stored with the model."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deployments.artifacts.manifest import ArtifactManifest, Candidate, EngineOptions
from deployments.artifacts.store import host_directory, make_host_directory
from deployments.artifacts.types import Device, Precision
from deployments.config import EncoderSettings
from deployments.engines.base import GraphSpec
from deployments.files import write_atomically
from deployments.tuning.host import Host, read_engine_versions, read_host

log = logging.getLogger("ray.serve.hundredfold")


QUANTIZED: frozenset[Precision] = frozenset({"int8", "int4", "nf4"})


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Shape(_Frozen):
    """Padded size of a forward pass."""

    items: int = Field(ge=1)
    tokens: int = Field(ge=1)

    @property
    def area(self) -> int:
        return self.items * self.tokens

    def __str__(self) -> str:
        return f"{self.items}x{self.tokens}"


class Variant(_Frozen):
    """A candidate of the artifact, with the session options that tuning may change."""

    candidate: str
    spinning: bool = False

    @property
    def name(self) -> str:
        """A name such as `cpu-int8+spinning`."""
        return f"{self.candidate}+spinning" if self.spinning else self.candidate

    @classmethod
    def of(cls, candidate: str, options: EngineOptions) -> Self:
        """Create the variant without changes to `options`, the candidate's options."""
        return cls(candidate=candidate, spinning=options.spinning)

    def options(self, sealed: EngineOptions) -> EngineOptions:
        """Return `sealed`, the candidate's options, with the changes of this variant."""
        return sealed.model_copy(update={"spinning": self.spinning})


class Cost(_Frozen):
    """Time of one forward pass of a variant at a shape, while its process runs no other pass."""

    shape: Shape
    median_ms: float = Field(gt=0)
    low_ms: float = Field(gt=0)  # time in the fastest round
    rounds: int = Field(ge=1)


def rounding_of(candidate: str, precision: Precision) -> str:
    """Return a key of the rounding: candidates with the same key count as equally rounded.

    All graphs of one float precision round alike. Each quantized graph has its own scales and
    unquantized nodes. Two quantized graphs therefore differ as much from each other as from fp32.
    """
    return candidate if precision in QUANTIZED else precision


class VariantCosts(_Frozen):
    """Costs of one variant: a row of the cost table."""

    variant: Variant
    precision: Precision
    costs: tuple[Cost, ...]

    @property
    def rounding(self) -> str:
        return rounding_of(self.variant.candidate, self.precision)

    def by_shape(self) -> dict[Shape, float]:
        """Return the median milliseconds by shape."""
        return {cost.shape: cost.median_ms for cost in self.costs}


class CostTable(_Frozen):
    """Costs of every variant that was measured on one kind of host.

    `selection` names the variant to use per measured shape. `rejected` has the candidates that
    passed the accuracy gate on the build host only: on this kind of host they fail it, or cannot
    run its probes. `unmeasured` has all other candidates without a row. Both name a reason for each
    candidate, such as missing memory.
    """

    schema_version: Literal[3] = 3
    version: str  # version of the artifact
    host: Host
    threads: int = Field(ge=1)  # threads per forward pass
    providers: tuple[str, ...]  # ONNX Runtime providers of the encoder
    engines: dict[str, str]  # installed version of each engine that the candidates require
    rows: tuple[VariantCosts, ...] = Field(min_length=1)
    selection: tuple[tuple[Shape, Variant], ...] = Field(min_length=1)
    rejected: dict[str, str] = {}
    unmeasured: dict[str, str] = {}

    def selected_variants(self) -> tuple[Variant, ...]:
        """Return the selected variants; the variant of the most shapes comes first."""
        variants = [variant for _, variant in self.selection]
        return tuple(sorted(dict.fromkeys(variants), key=lambda v: -variants.count(v)))

    def to_json(self) -> bytes:
        # Older releases reject a table with the field `unmeasured`, so omit it if it is empty.
        exclude = None if self.unmeasured else {"unmeasured"}
        return (self.model_dump_json(indent=1, exclude=exclude) + "\n").encode()


def write_costs(artifact: Path, table: CostTable) -> Path:
    """Write `table` to the artifact's directory. Return the path.

    Raises ArtifactMissing if the artifact was removed, and OSError on other failures.
    """
    path = costs_path(artifact, table.host, table.threads)
    make_host_directory(path.parent)
    write_atomically(path, table.to_json())
    return path


def read_costs(target: TuningTarget) -> CostTable | None:
    """Return the cost table of `target`, or None if it is missing, unreadable or does not apply.

    A table does not apply to another artifact, host, number of threads, list of providers or engine
    version.
    """
    path = target.costs_path
    try:
        table = CostTable.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError) as exc:
        log.warning("%s is not used: %s", path, exc)
        return None
    if reason := _find_mismatch(table, target):
        log.info("%s is not used: %s", path, reason)
        return None
    return table


def find_artifact_mismatch(table: CostTable, target: TuningTarget) -> str | None:
    """Return why `table`, of any host, does not apply to the artifact of `target`, or None."""
    sealed = {candidate.name: candidate for candidate in target.candidates}
    selected = {variant.candidate for variant in table.selected_variants()}
    if table.version != target.manifest.version or not selected <= sealed.keys():
        return "it was measured for another artifact"
    if len({rounding_of(name, sealed[name].precision) for name in selected}) > 1:
        return "its selected variants round differently"
    return None


def _find_mismatch(table: CostTable, target: TuningTarget) -> str | None:
    """Return why the table does not apply to `target`, or None if it does."""
    if reason := find_artifact_mismatch(table, target):
        return reason
    settings = target.settings
    if table.host != target.host:
        return "it was measured on another kind of host"
    if table.threads != settings.intra_op_threads:
        return "it was measured with another number of threads"
    if table.providers != settings.providers:
        measured, current = _join(table.providers), _join(settings.providers)
        return f"it was measured on {measured}, the encoder has {current}"
    installed = read_engine_versions(candidate.engine for candidate in target.candidates)
    if installed != table.engines:
        measured, current = _join(table.engines.values()), _join(installed.values())
        return f"it was measured with {measured}, this host has {current}"
    return None


def _join(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


def selected_times(table: CostTable) -> dict[Shape, float]:
    """Return by shape the median milliseconds of the variant that is selected for the shape."""
    return {shape: cost.median_ms for shape, cost in selected_costs(table).items()}


def selected_costs(table: CostTable) -> dict[Shape, Cost]:
    """Return by shape the cost of the variant that is selected for the shape.

    Leaves out shapes at which this variant was not measured.
    """
    costs = {(row.variant, cost.shape): cost for row in table.rows for cost in row.costs}
    return {
        shape: costs[variant, shape]
        for shape, variant in table.selection
        if (variant, shape) in costs
    }


@dataclass(frozen=True, slots=True)
class TuningTarget:
    """One model and the settings of the encoder that runs it on this host."""

    artifact: Path
    manifest: ArtifactManifest
    device: Device
    settings: EncoderSettings

    @property
    def host(self) -> Host:
        return read_host(self.device)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The sealed graphs for the encoder's device, the default candidate first."""
        return self.manifest.candidates_for(self.device)

    @property
    def costs_path(self) -> Path:
        return costs_path(self.artifact, self.host, self.settings.intra_op_threads)

    def spec(self, candidate: Candidate) -> GraphSpec:
        spec = GraphSpec.of(self.artifact, self.manifest, candidate)
        return replace(spec, host_folder=self.costs_path.parent)


def costs_path(artifact: Path, host: Host, threads: int) -> Path:
    """Return the path of the cost table for forward passes of `threads` threads on `host`."""
    return host_directory(artifact, host.fingerprint) / f"{host.device}-{threads}.json"
