from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from deployments.autoscaling import LOAD, ScaleOnLoad


@dataclass
class FakeContext:
    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None
    total_num_requests: float
    config: AutoscalingConfig


CONFIG = AutoscalingConfig(target_ongoing_requests=4)
POLICY = "deployments.autoscaling:ScaleOnLoad"


@pytest.mark.parametrize(
    ("reported", "through_handles", "replicas"),
    [
        ({"a": 800.0, "b": 400.0}, 0.0, 3.0),
        ({"a": 800.0}, 4.0, 3.0),
        ({"a": 0.0}, 0.0, 0.0),
        ({}, 6.0, 1.5),
    ],
)
def test_replicas_follow_the_load_of_all_transports(
    reported: dict[str, float], through_handles: float, replicas: float
) -> None:
    context = FakeContext({LOAD: reported, "other": {"a": 99.0}}, through_handles, CONFIG)
    assert ScaleOnLoad(target_load=400)(context) == (replicas, {})


def test_without_reports_the_handles_count() -> None:
    assert ScaleOnLoad(target_load=400)(FakeContext(None, 8.0, CONFIG)) == (2.0, {})


def test_target_of_zero_is_rejected() -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        ScaleOnLoad(target_load=0)


def test_serve_loads_the_policy_by_its_name() -> None:
    policy = AutoscalingPolicy(policy_function=POLICY, policy_kwargs={"target_load": 400})
    instance = policy.get_policy()(**policy.policy_kwargs)
    assert instance(FakeContext({LOAD: {"a": 400.0}}, 0.0, CONFIG)) == (1.0, {})
