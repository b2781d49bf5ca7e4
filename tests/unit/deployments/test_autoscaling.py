from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from deployments.autoscaling import BUSY, QUEUED_S, ScaleOnLoad, ScalingTargets, count_replicas

TARGETS = ScalingTargets(target_busy=0.7, shrink_busy=0.6, drain_s=5)
CONFIG = AutoscalingConfig(target_ongoing_requests=4)
POLICY = "deployments.autoscaling:ScaleOnLoad"


def set_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """Set the cores of the cluster in the globals of the policy's method.

    These globals may differ from those of the module of the policy. Ray Serve pickles policies by
    value. Loading such a pickle gives the class copies of its methods with other globals.
    """
    monkeypatch.setitem(ScaleOnLoad.__call__.__globals__, "count_cores", lambda: cores)


class FakeContext(NamedTuple):
    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None
    total_queued_requests: float = 0.0
    target_num_replicas: int = 1
    config: AutoscalingConfig = CONFIG


@pytest.mark.parametrize(
    ("busy", "queued_s", "current", "replicas"),
    [
        (0.0, 0.0, 0, 0),
        (0.0, 0.0, 1, 0),  # Serve's min_replicas keeps the last one
        (0.7, 0.0, 1, 1),
        (0.71, 0.0, 1, 2),
        (1.0, 0.0, 1, 2),  # saturated, without a reported queue
        (1.0, 10.0, 1, 5),  # (busy 1 + 10 s / drain_s 5) / target_busy 0.7
        (2.0, 60.0, 2, 20),
        (8.0, 0.0, 8, 12),
        (0.0, 3.5, 1, 1),
        (0.0, 3.6, 1, 2),
    ],
)
def test_replicas_follow_busy_share_and_queue(
    busy: float, queued_s: float, current: int, replicas: int
) -> None:
    assert count_replicas(busy, queued_s, current, TARGETS) == replicas


@pytest.mark.parametrize(("busy", "replicas"), [(1.4, 2), (1.3, 3), (1.25, 3), (1.2, 2), (0.5, 1)])
def test_removal_needs_less_load_than_no_addition(busy: float, replicas: int) -> None:
    current = 2 if busy == 1.4 else 3
    assert count_replicas(busy, 0.0, current, TARGETS) == replicas


@pytest.mark.parametrize("busy", [step / 20 for step in range(1, 161)])
def test_result_is_stable(busy: float) -> None:
    """At the same load, the chosen number of replicas asks for no further change."""
    for current in range(1, 15):
        chosen = count_replicas(busy, 0.0, current, TARGETS)
        assert count_replicas(busy, 0.0, chosen, TARGETS) == chosen


def test_one_hot_model_reaches_the_maximum_with_a_hidden_queue() -> None:
    """A saturated deployment grows at every decision, even if its replicas report no queue."""
    counts = [1]
    while counts[-1] < 8:
        counts.append(min(count_replicas(counts[-1], 0.0, counts[-1], TARGETS), 8))
    assert counts == [1, 2, 3, 5, 8]


@pytest.mark.parametrize(
    ("reported", "in_handles", "current", "replicas"),
    [
        ({BUSY: {"a": 1.0, "b": 0.75}, QUEUED_S: {"a": 1.0, "b": 0.0}}, 0.0, 2, 3),
        ({BUSY: {"a": 0.5}, QUEUED_S: {"a": 0.0}, "other": {"a": 99.0}}, 0.0, 1, 1),
        ({BUSY: {"a": 0.5}, QUEUED_S: {"a": 0.0}}, 4.0, 1, 3),
        ({}, 4.0, 1, 1),
        ({}, 64.0, 1, 1),  # the only replica crashed
        ({}, 64.0, 0, 1),  # a start from zero
        ({BUSY: {"a": 1.0}, QUEUED_S: {"a": 10.0}}, 64.0, 2, 5),  # the other replica still starts
        ({BUSY: {"a": 0.1}, QUEUED_S: {"a": 0.0}}, 64.0, 2, 2),
        ({BUSY: {"a": 0.1, "b": 0.1}, QUEUED_S: {}}, 64.0, 2, 24),
        (None, 0.0, 1, 0),
    ],
)
def test_policy_sums_replicas_and_calls_in_handles(
    reported: Mapping[str, Mapping[Any, float]] | None,
    in_handles: float,
    current: int,
    replicas: int,
) -> None:
    policy = ScaleOnLoad(**TARGETS._asdict())
    assert policy(FakeContext(reported, in_handles, current)) == (replicas, {})


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"target_busy": 0.0}, "below `target_busy`"),
        ({"target_busy": 1.0}, "below 1"),
        ({"shrink_busy": 0.7}, "shrink_busy"),
        ({"shrink_busy": 0.0}, "shrink_busy"),
        ({"drain_s": 0.0}, "drain_s"),
        ({"cores_per_replica": 0.0}, "cores_per_replica"),
    ],
)
def test_invalid_targets_are_rejected(targets: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScaleOnLoad(**targets)


@pytest.mark.parametrize(
    ("cores", "current", "replicas"),
    [
        (16, 1, 8),
        (15, 1, 7),
        (4, 1, 2),
        (2, 1, 1),
        (1, 0, 1),  # one replica runs even if it shares its cores
        (4, 3, 3),  # a cluster that lost cores keeps its replicas
        (64, 1, 10),  # limited by the load, not by the cores
    ],
)
def test_replicas_are_added_only_up_to_the_cores_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch, cores: int, current: int, replicas: int
) -> None:
    set_cores(monkeypatch, cores)
    policy = ScaleOnLoad(**TARGETS._asdict() | {"cores_per_replica": 2})
    load = {BUSY: {"a": 1.0}, QUEUED_S: {"a": 30.0}}
    assert policy(FakeContext(load, target_num_replicas=current)) == (replicas, {})


def test_cores_do_not_remove_replicas_nor_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cores(monkeypatch, 16)
    policy = ScaleOnLoad(**TARGETS._asdict() | {"cores_per_replica": 2})
    assert policy(FakeContext({BUSY: {"a": 0.1, "b": 0.1}}, target_num_replicas=4)) == (1, {})


def test_unknown_target_is_rejected() -> None:
    with pytest.raises(TypeError, match="target_load"):
        ScaleOnLoad(target_load=4096.0)


def test_serve_loads_the_policy_by_its_name() -> None:
    policy = AutoscalingPolicy(policy_function=POLICY, policy_kwargs={"target_busy": 0.8})
    instance = policy.get_policy()(**policy.policy_kwargs)
    assert instance(FakeContext({BUSY: {"a": 0.79}})) == (1, {})


def test_serve_gives_the_policy_what_it_reads() -> None:
    """Serve's `AutoscalingContext` has the fields of `ScalingContext`, which the policy reads."""
    missing: Any = None
    context = AutoscalingContext(
        **dict.fromkeys(("deployment_id", "deployment_name", "app_name"), missing),
        current_num_replicas=1,
        target_num_replicas=1,
        running_replicas=[],
        total_num_requests=0.0,
        total_queued_requests=0.0,
        aggregated_metrics={BUSY: {"a": 0.9}},
        raw_metrics=None,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=2,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        config=CONFIG,
    )
    assert ScaleOnLoad()(context) == (2, {})
