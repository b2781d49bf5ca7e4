"""Progress and remaining time of a build, estimated from the finished builds of the same store.

If no build of the store has finished, there is no estimate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from statistics import median

from pydantic import BaseModel, ConfigDict

from deployments.builds.record import STAGES, BuildDurations, BuildRecord, BuildState
from deployments.builds.sources import hide_directory

NEIGHBORS = 3  # an estimate is the median of this many builds of the most similar size
# The directories of an absolute path in a text. In quotes, they may contain spaces.
_DIRECTORIES = re.compile(r"""(?<=[`'"])/(?:[^/`'"\n]+/)+|(?<![\w.~/])/(?:[^\s/`'"]+/)+""")


class BuildStatus(BaseModel):
    """Status of a build."""

    model_config = ConfigDict(frozen=True)

    id: str
    state: BuildState
    # null: the build failed, or there is no finished build in this store to estimate from
    percent: int | None = None
    estimated_time: float | None = None  # s until the model is ready; null as for `percent`
    reason: str = ""
    step: str = ""
    source: str = ""
    version: str | None = None
    ahead: int = 0  # number of queued builds that run before this one
    elapsed_s: float = 0.0  # s from queuing to the end of the build, or to now
    since_end_s: float = 0.0

    def hide_directories(self) -> BuildStatus:
        """Return the status for clients. It does not tell them where this host keeps its files."""
        shown = {"reason": self._hide(self.reason), "step": self._hide(self.step)}
        return self.model_copy(update={**shown, "source": hide_directory(self.source)})

    def _hide(self, text: str) -> str:
        directory = self.source.rpartition("/")[0]
        if directory.startswith("/"):  # may contain spaces, even without quotes
            text = text.replace(f"{directory}/", ".../")
        return _DIRECTORIES.sub(".../", text)


def build_status(
    record: BuildRecord,
    history: Sequence[BuildDurations],
    before: Sequence[BuildRecord],
    now_s: float,
) -> BuildStatus:
    """Describe a build; `before` are the unfinished builds that run before it."""
    percent = estimated_s = None
    if record.state is BuildState.READY:
        percent, estimated_s = 100, 0.0
    elif not record.has_ended and history:
        expected = expect_seconds(record, history)
        total_s = sum(expected.values())
        left_s = remaining_s(record, expected, now_s)
        percent = min(99, int(100 * (1 - left_s / total_s))) if total_s else 99
        queue = (remaining_s(one, expect_seconds(one, history), now_s) for one in before)
        estimated_s = round(left_s + sum(queue), 1)
    end_s = record.changed_s if record.has_ended else now_s
    return BuildStatus(
        id=record.id,
        state=record.state,
        percent=percent,
        estimated_time=estimated_s,
        reason=record.reason,
        step=record.step,
        source=record.source,
        version=record.version,
        ahead=len(before),
        elapsed_s=round(max(0.0, end_s - record.queued_s), 1),
        since_end_s=round(now_s - end_s, 1),
    )


def expect_seconds(
    record: BuildRecord, history: Sequence[BuildDurations]
) -> Mapping[BuildState, float]:
    """Return the expected seconds of each stage: the median of the builds of most similar size.

    While the size of the source is unknown, return the median of all builds. `history` must not be
    empty.
    """
    similar = history
    if record.size:
        size = record.size
        similar = sorted(history, key=lambda one: abs(math.log(max(one.size, 1) / size)))
        similar = similar[:NEIGHBORS]
    return {stage: median(one.seconds.get(stage, 0.0) for one in similar) for stage in STAGES}


def remaining_s(record: BuildRecord, expected: Mapping[BuildState, float], now_s: float) -> float:
    """Return the expected seconds that the build still takes; an overdue stage counts as 0."""
    spent_s = dict(record.spent_s)
    if record.is_running:
        running_s = max(0.0, now_s - record.changed_s)  # the clock of the builder may be ahead
        spent_s[record.state] = spent_s.get(record.state, 0.0) + running_s
    return sum(max(0.0, expected[stage] - spent_s.get(stage, 0.0)) for stage in STAGES)
