"""What is tuned: a sealed model on one kind of lane of this host."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deployments.config import LaneSettings
from deployments.engines.base import GraphSpec
from deployments.manifest import ArtifactManifest, Candidate, Device
from deployments.store import HOSTS_NAME
from deployments.tuning.host import Host, this_host


@dataclass(frozen=True, slots=True)
class Placement:
    """One model, the lane that runs it, and where on this host the two are remembered."""

    artifact: Path
    manifest: ArtifactManifest
    device: Device
    lane: LaneSettings

    @property
    def host(self) -> Host:
        """The host this process runs on."""
        return this_host(self.device)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The sealed graphs for the lane's device, the portable default first."""
        return self.manifest.candidates_for(self.device)

    @property
    def costs_path(self) -> Path:
        """Where the table of what passes cost here is kept."""
        return costs_path(self.artifact, self.host, self.lane.threads_per_run)

    def spec(self, candidate: Candidate) -> GraphSpec:
        """How to open `candidate`."""
        return GraphSpec.of(self.artifact, self.manifest, candidate)


def costs_path(artifact: Path, host: Host, threads: int) -> Path:
    """Where the table of `host` for passes of `threads` threads is kept."""
    return artifact / HOSTS_NAME / host.fingerprint / f"{host.device}-{threads}.json"
