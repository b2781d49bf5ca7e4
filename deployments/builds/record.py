"""Record of the build of one model: a small file in the store."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class BuildState(StrEnum):
    """State of a model whose build is queued, runs or has ended."""

    QUEUED = "queued"
    PULLING = "pulling"  # the files of the source are fetched
    BUILDING = "building"
    VERIFYING = "verifying"  # graphs are compared with the original, then published
    READY = "ready"
    FAILED = "failed"


# Stages in the order of a build. After verifying one candidate, a build returns to BUILDING for the
# next candidate.
STAGES = (BuildState.PULLING, BuildState.BUILDING, BuildState.VERIFYING)
ENDS = (BuildState.READY, BuildState.FAILED)


class BuildRecord(BaseModel):
    """The last build of a model. Times are seconds since the epoch."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    source: str  # argument of `hundredfold build`
    task: str | None = None  # None: the task of the checkpoint
    state: BuildState = BuildState.QUEUED
    step: str = ""  # what the build does now, as text for people
    reason: str = ""  # why the build failed, or why it waits again
    version: str | None = None  # set when the model is ready
    attempts: int = 0  # number of builders that began the build
    interruptions: int = 0  # number of those builders that were stopped before the build ended
    size: int | None = None  # bytes of the source, once it is pulled
    queued_s: float
    changed_s: float  # start of the present state
    spent_s: Mapping[BuildState, float] = {}  # seconds per stage, until `changed_s`

    @property
    def is_running(self) -> bool:
        return self.state in STAGES

    @property
    def crashes(self) -> int:
        """Number of builders that began the build and were not stopped.

        If the build has not ended and no builder runs it, all of them have crashed.
        """
        return self.attempts - self.interruptions

    @property
    def has_ended(self) -> bool:
        return self.state in ENDS

    def enter(self, state: BuildState, now_s: float, **changes: object) -> BuildRecord:
        """Return the record in a new state. Add the time in the present stage to its `spent_s`."""
        spent_s = dict(self.spent_s)
        if self.is_running:
            spent_s[self.state] = spent_s.get(self.state, 0.0) + max(0.0, now_s - self.changed_s)
        update = {"state": state, "changed_s": now_s, "spent_s": spent_s, **changes}
        return self.model_copy(update=update)


class BuildDurations(BaseModel):
    """Seconds that a finished build spent in each stage."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    size: int  # bytes of the source
    seconds: Mapping[BuildState, float]
