from __future__ import annotations

import pytest

from build_artifacts.report.measure import group_by_memory
from build_artifacts.report.stages import Stage
from deployments.config import EncoderSettings
from deployments.engines import EncoderEngine


def stage(name: str, size_bytes: int) -> Stage:
    def fail_to_open(_settings: EncoderSettings) -> EncoderEngine:
        raise AssertionError("nothing is opened to be grouped")

    encoder = EncoderSettings()
    return Stage(
        name=name,
        what="",
        size_bytes=size_bytes,
        open=fail_to_open,
        single_pass=encoder,
        throughput=encoder,
        scores={},
    )


@pytest.mark.parametrize(
    ("available_bytes", "groups"),
    [
        (10_000, ["abc"]),
        (1_300, ["ab", "c"]),  # 3 x (100 + 200) bytes are less than 0.7 x 1300
        (10, ["a", "b", "c"]),
    ],
)
def test_stages_are_grouped_by_available_memory(available_bytes: int, groups: list[str]) -> None:
    stages = [stage("a", 100), stage("b", 200), stage("c", 300)]
    actual_groups = group_by_memory(stages, available_bytes)
    assert ["".join(s.name for s in group) for group in actual_groups] == groups
