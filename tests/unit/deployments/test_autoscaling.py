from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from deployments.autoscaling import ONGOING_CALLS, scale_on_calls


@dataclass
class FakeContext:
    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None
    total_num_requests: float
    config: AutoscalingConfig


@pytest.mark.parametrize(
    ("reported", "through_handles", "replicas"),
    [
        ({"a": 8.0, "b": 4.0}, 0.0, 3.0),
        ({"a": 8.0}, 4.0, 3.0),
        ({"a": 0.0}, 0.0, 0.0),
        ({}, 6.0, 1.5),
    ],
)
def test_replicas_follow_the_calls_of_all_transports(
    reported: dict[str, float], through_handles: float, replicas: float
) -> None:
    config = AutoscalingConfig(target_ongoing_requests=4)
    context = FakeContext({ONGOING_CALLS: reported, "other": {"a": 99.0}}, through_handles, config)
    assert scale_on_calls(context) == (replicas, {})


def test_without_reports_the_handles_count() -> None:
    config = AutoscalingConfig(target_ongoing_requests=4)
    assert scale_on_calls(FakeContext(None, 8.0, config)) == (2.0, {})


def test_serve_loads_the_policy_by_its_name() -> None:
    policy = AutoscalingPolicy(policy_function="deployments.autoscaling:scale_on_calls")
    context = FakeContext(None, 4.0, AutoscalingConfig(target_ongoing_requests=4))
    assert policy.get_policy()(context) == (1.0, {})
