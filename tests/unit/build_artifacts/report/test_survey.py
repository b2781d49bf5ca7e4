from __future__ import annotations

import pytest

from build_artifacts.report.measure import groups_of
from build_artifacts.report.stages import Stage
from deployments.config import LaneSettings
from deployments.engines import Engine


def stage(name: str, size_bytes: int) -> Stage:
    def never(_lane: LaneSettings) -> Engine:
        raise AssertionError("nothing is opened to be grouped")

    lane = LaneSettings()
    return Stage(
        name=name,
        what="",
        size_bytes=size_bytes,
        open=never,
        alone=lane,
        crowd=lane,
        scores={},
    )


@pytest.mark.parametrize(
    ("room_bytes", "groups"),
    [
        (10_000, ["abc"]),
        (1_300, ["ab", "c"]),  # 3 x 300 bytes are less than 0.7 x 1300
        (10, ["a", "b", "c"]),
    ],
)
def test_as_many_stages_take_turns_as_have_room(room_bytes: int, groups: list[str]) -> None:
    stages = [stage("a", 100), stage("b", 200), stage("c", 300)]
    found = groups_of(stages, room_bytes)
    assert ["".join(s.name for s in group) for group in found] == groups
