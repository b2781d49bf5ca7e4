"""What is tuned: a sealed model on one kind of encoder of this host."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deployments.artifacts.manifest import ArtifactManifest, Candidate, EngineOptions
from deployments.artifacts.store import HOSTS_NAME, write_atomically
from deployments.artifacts.types import Device, Precision
from deployments.config import EncoderSettings
from deployments.engines.base import GraphSpec
from deployments.tuning.host import Host, engine_versions, read_host

log = logging.getLogger("ray.serve.hundredfold")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Shape(_Frozen):
    """The padded size of a pass."""

    items: int = Field(ge=1)
    tokens: int = Field(ge=1)

    @property
    def area(self) -> int:
        """Padded tokens."""
        return self.items * self.tokens

    def __str__(self) -> str:
        return f"{self.items}x{self.tokens}"


class Variant(_Frozen):
    """A sealed candidate, and the session options that tuning may change."""

    candidate: str
    arena: bool = False
    spinning: bool = False

    @property
    def name(self) -> str:
        """Such as `cpu-int8+arena`."""
        extras = (name for name in ("arena", "spinning") if getattr(self, name))
        return "+".join([self.candidate, *extras])

    @classmethod
    def of(cls, candidate: str, options: EngineOptions) -> Self:
        """A candidate of that name as it was sealed."""
        return cls(candidate=candidate, arena=options.arena, spinning=options.spinning)

    def options(self, sealed: EngineOptions) -> EngineOptions:
        """A candidate's sealed options with this variant's."""
        return sealed.model_copy(update={"arena": self.arena, "spinning": self.spinning})


class Cost(_Frozen):
    """Time of one pass of one variant at one shape, alone on its threads."""

    shape: Shape
    median_ms: float = Field(gt=0)
    low_ms: float = Field(gt=0)
    rounds: int = Field(ge=1)


class VariantCosts(_Frozen):
    """One row of the table."""

    variant: Variant
    precision: Precision
    costs: tuple[Cost, ...]

    def by_shape(self) -> dict[Shape, float]:
        """Median milliseconds by shape."""
        return {cost.shape: cost.median_ms for cost in self.costs}


class CostTable(_Frozen):
    """Every variant that is right on this kind of host, measured in interleaved rounds.

    `winners` names the variant to use per measured shape; few variants cover all shapes, because
    each is one more graph in memory (`choose.py`). `refused` are candidates that are not used
    here, although they were right where they were built, and why.
    """

    schema_version: Literal[2] = 2
    version: str  # of the artifact
    host: Host
    threads: int = Field(ge=1)  # per pass
    providers: tuple[str, ...]  # of the encoder
    engines: dict[str, str]  # what candidates ask for and is installed, with its version
    rows: tuple[VariantCosts, ...] = Field(min_length=1)
    selection: tuple[tuple[Shape, Variant], ...] = Field(min_length=1)
    rejected: dict[str, str] = {}

    def selected_variants(self) -> tuple[Variant, ...]:
        """The variants that win somewhere, the one that wins most often first."""
        named = [variant for _, variant in self.selection]
        return tuple(sorted(dict.fromkeys(named), key=lambda v: -named.count(v)))

    def to_json(self) -> bytes:
        """The bytes of the file."""
        return (self.model_dump_json(indent=1) + "\n").encode()


def write_costs(artifact: Path, table: CostTable) -> Path:
    """Keep `table` in the artifact's directory, whole or not at all; the file's path.

    Raises OSError.
    """
    path = costs_path(artifact, table.host, table.threads)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, table.to_json())
    return path


def read_costs(target: TuningTarget) -> CostTable | None:
    """The table for `target`; None when there is none, or none that still holds."""
    path = target.costs_path
    try:
        table = CostTable.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError) as exc:
        log.warning("%s is not used: %s", path, exc)
        return None
    if reason := _stale(table, target):
        log.info("%s is not used: %s", path, reason)
        return None
    return table


def _stale(table: CostTable, target: TuningTarget) -> str | None:
    settings, sealed = target.settings, {c.name: c for c in target.candidates}
    chosen = {variant.candidate for variant in table.selected_variants()}
    if table.version != target.manifest.version or not chosen <= sealed.keys():
        return "it was measured for another artifact"
    if (table.host, table.threads) != (target.host, settings.intra_op_threads):
        return "it was measured on another kind of host"
    if table.providers != settings.providers:
        return f"it was measured on {_told(table.providers)}, the encoder has {_told(settings.providers)}"
    if len({sealed[name].precision for name in chosen}) > 1:
        return "its winners differ in precision"
    here = engine_versions(candidate.engine for candidate in target.candidates)
    if here != table.engines:
        return (
            f"it was measured with {_told(table.engines.values())}, here is {_told(here.values())}"
        )
    return None


def _told(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


@dataclass(frozen=True, slots=True)
class TuningTarget:
    """One model, the encoder that runs it, and where on this host the two are remembered."""

    artifact: Path
    manifest: ArtifactManifest
    device: Device
    settings: EncoderSettings

    @property
    def host(self) -> Host:
        """The host this process runs on."""
        return read_host(self.device)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The sealed graphs for the encoder's device, the portable default first."""
        return self.manifest.candidates_for(self.device)

    @property
    def costs_path(self) -> Path:
        """Where the table of what passes cost here is kept."""
        return costs_path(self.artifact, self.host, self.settings.intra_op_threads)

    def spec(self, candidate: Candidate) -> GraphSpec:
        """How to open `candidate`."""
        return GraphSpec.of(self.artifact, self.manifest, candidate)


def costs_path(artifact: Path, host: Host, threads: int) -> Path:
    """Where the table of `host` for passes of `threads` threads is kept."""
    return artifact / HOSTS_NAME / host.fingerprint / f"{host.device}-{threads}.json"
