"""Is a sealed artifact still what it was? Digests, then every candidate against its reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from build_artifacts.search.lanes import lane_for
from deployments.engines import GraphSpec, lacking
from deployments.manifest import REFERENCE_NAME, ArtifactManifest, Candidate
from deployments.processors import usable_cores
from deployments.tuning.parity import Reference, Verdict, judged


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of one candidate on this host."""

    candidate: Candidate
    verdict: Verdict | None  # None: nothing here can run it
    skipped: str = ""

    @property
    def line(self) -> str:
        """One line for people."""
        if self.verdict is None:
            return f"{self.candidate.name}: not checked, {self.skipped}"
        if not self.verdict.passed:
            return f"{self.candidate.name}: FAILED, {'; '.join(self.verdict.reasons)}"
        parity = self.verdict.parity
        assert parity is not None, "a verdict without numbers has reasons; this is a bug"
        sealed = self.candidate.parity
        return (
            f"{self.candidate.name}: passed, cosine {parity.cosine_mean:.4f} mean "
            f"{parity.cosine_worst:.4f} worst (sealed with {sealed.cosine_mean:.4f}, "
            f"{sealed.cosine_worst:.4f})"
        )


def check(directory: Path) -> Iterator[Checked]:
    """Every candidate of the artifact in `directory`, one after the other.

    Raises ArtifactError at once when a file is not the one that was sealed. An FP16 graph whose
    device is missing computes on the CPU provider, which gives the same numbers.
    """
    manifest = ArtifactManifest.read(directory)
    reference = Reference.read(directory / REFERENCE_NAME)
    for candidate in manifest.candidates:
        spec = GraphSpec.of(directory, manifest, candidate)
        lane = lane_for(candidate.device, usable_cores())
        if reason := lacking(spec, lane):
            yield Checked(candidate, None, reason)
        else:
            yield Checked(candidate, judged(spec, lane, reference, manifest.gate))
