"""Verification of a sealed artifact on this host: digests and parity of its candidates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from build_artifacts.build_devices import engine_settings
from deployments.artifacts.manifest import REFERENCE_NAME, ArtifactManifest, Candidate
from deployments.engines import GraphSpec, missing_requirement
from deployments.host.machine import usable_cores
from deployments.tuning.parity import ParityResult, ReferenceOutputs, check_graph


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

    For a candidate that cannot run here, yield the reason. Without a GPU, ONNX Runtime's CPU
    provider runs the fp16 graphs, only slowly. Raises ArtifactError if a file differs from its
    sealed digest.
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
