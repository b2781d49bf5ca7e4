"""Migration of a store, and verification of sealed artifacts: digests and parity."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from build_artifacts.build_devices import engine_settings
from deployments.artifacts.manifest import (
    MANIFEST_NAME,
    REFERENCE_NAME,
    ArtifactManifest,
    Candidate,
    has_previous_schema,
)
from deployments.artifacts.store import list_artifacts
from deployments.console import format_table
from deployments.engines import GraphSpec, missing_requirement
from deployments.files import write_atomically
from deployments.machine import usable_cores
from deployments.tuning.costs import CostTable
from deployments.tuning.parity import ParityResult, ReferenceOutputs, check_graph


def format_costs(table: CostTable) -> str:
    """Format a row per shape and a column per variant; `*` marks the selected variant."""
    selection = dict(table.selection)
    rows = [["items x tokens", *(row.variant.name for row in table.rows)]]
    for shape in selection:
        cells = [str(shape)]
        for row in table.rows:
            ms = row.by_shape().get(shape)
            mark = "*" if row.variant == selection[shape] else " "
            cells.append("-" if ms is None else f"{ms:.2f}{mark}")
        rows.append(cells)
    threads = f"{table.threads} thread{'s' if table.threads > 1 else ''} a pass"
    head = f"{table.host.name}, {table.host.cores} cores, {threads}; milliseconds, * serves"
    rejected = [f"{name} violates the gate here: {why}" for name, why in table.rejected.items()]
    unmeasured = [f"{name} was not measured here: {why}" for name, why in table.unmeasured.items()]
    return "\n".join([head, format_table(rows, align_right=True), *rejected, *unmeasured])


def migrate_manifests(store: Path) -> Iterator[Path]:
    """Rewrite manifests of the previous schema in the present schema. Yield their directories.

    The other files and the modification time of the manifest stay unchanged. Raises ArtifactError
    for a damaged artifact, or OSError.
    """
    for directory in list_artifacts(store):
        path = directory / MANIFEST_NAME
        if not path.is_file() or not has_previous_schema(directory):
            continue
        manifest, stat = ArtifactManifest.read(directory), path.stat()
        write_atomically(path, manifest.to_json())
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        yield directory


@dataclass(frozen=True, slots=True)
class CandidateCheck:
    """Parity of one candidate on this host."""

    candidate: Candidate
    result: ParityResult | None  # None: not checked
    skipped: str = ""  # reason why the candidate was not checked

    @property
    def has_failed(self) -> bool:
        return self.result is not None and not self.result.passed

    def to_json(self) -> dict[str, object]:
        return {
            "candidate": self.candidate.name,
            "passed": None if self.result is None else self.result.passed,
            "reasons": [self.skipped] if self.result is None else list(self.result.reasons),
        }

    @property
    def line(self) -> str:
        if self.result is None:
            return f"{self.candidate.name}: not checked, {self.skipped}"
        if not self.result.passed:
            return f"{self.candidate.name}: FAILED, {'; '.join(self.result.reasons)}"
        parity = self.result.parity
        if parity is None:
            raise AssertionError("bug: a check without parity has no reasons")
        sealed = self.candidate.parity
        return (
            f"{self.candidate.name}: passed, cosine {parity.cosine_mean:.4f} mean "
            f"{parity.cosine_worst:.4f} worst, {parity.batched_cosine_worst:.4f} batched "
            f"(sealed with {sealed.cosine_mean:.4f}, {sealed.cosine_worst:.4f}, "
            f"{sealed.batched_cosine_worst:.4f})"
        )


def verify_candidates(directory: Path) -> Iterator[CandidateCheck]:
    """Check the accuracy of the artifact's candidates one after the other.

    Raises ArtifactError if a file differs from its sealed digest. Without a GPU, an FP16 graph runs
    on the CPU provider, which computes the same numbers. Skips a candidate that cannot run here.
    """
    manifest = ArtifactManifest.read(directory)
    reference = ReferenceOutputs.read(directory / REFERENCE_NAME)
    for candidate in manifest.candidates:
        spec = GraphSpec.of(directory, manifest, candidate)
        settings = engine_settings(candidate.device, usable_cores())
        if reason := missing_requirement(spec, settings):
            yield CandidateCheck(candidate, None, reason)
        else:
            yield CandidateCheck(candidate, check_graph(spec, settings, reference, manifest.gate))
