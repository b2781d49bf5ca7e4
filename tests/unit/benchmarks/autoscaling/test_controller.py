"""The simulated controller decides like Ray Serve's own, which runs on a fake clock here."""

from __future__ import annotations

import random
from typing import Any

import pytest
from ray.serve import autoscaling_policy as serve_policy
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from benchmarks.autoscaling.controller import Controller, ReplicaLoad
from deployments.autoscaling import BUSY, QUEUED_S

POLICY = AutoscalingPolicy(
    policy_function="deployments.autoscaling:ScaleOnLoad",
    policy_kwargs={"target_busy": 0.7, "shrink_busy": 0.6, "drain_s": 5},
)


def observe(running: int, busy: float, queued_s: float = 0.0, calls: float = 0.0) -> ReplicaLoad:
    metrics = {name: dict.fromkeys(range(running), value) for name, value in
               ((BUSY, busy), (QUEUED_S, queued_s))}  # fmt: skip
    return ReplicaLoad(running, metrics, calls, 0.0 if running else calls)


def create(**settings: Any) -> Controller:
    defaults: dict[str, Any] = {
        "min_replicas": 1,
        "max_replicas": 8,
        "upscale_delay_s": 2,
        "downscale_delay_s": 120,
        "policy": POLICY,
    }
    return Controller(AutoscalingConfig(**defaults | settings))


def test_addition_waits_for_the_delay_and_goes_to_the_needed_number_at_once() -> None:
    controller = create()
    targets = [controller.decide(second, observe(1, 1.0, 10.0)) for second in range(4)]
    assert targets == [1, 1, 5, 5]


def test_short_peak_adds_nothing() -> None:
    controller = create()
    loads = [1.0, 1.0, 0.5, 1.0, 1.0, 0.5]
    assert {controller.decide(second, observe(1, busy)) for second, busy in enumerate(loads)} == {1}


def test_removal_waits_until_every_decision_agreed_for_the_delay() -> None:
    controller = create()
    controller.target = 4
    assert {controller.decide(second, observe(4, 0.1)) for second in range(100)} == {4}
    assert controller.decide(100, observe(4, 0.7)) == 4  # restarts the downscale delay
    assert {controller.decide(second, observe(4, 0.1)) for second in range(101, 221)} == {4}
    assert controller.decide(221, observe(4, 0.1)) == 1


def test_bounds_hold() -> None:
    controller = create(max_replicas=3, upscale_delay_s=0)
    assert controller.decide(0, observe(1, 1.0, 600.0)) == 3
    controller = create(min_replicas=2, downscale_delay_s=0)
    assert controller.decide(0, observe(2, 0.0)) == 2


def test_zero_replicas_start_for_a_waiting_call_and_end_after_their_own_delay() -> None:
    controller = create(min_replicas=0, downscale_delay_s=10, downscale_to_zero_delay_s=900)
    assert controller.decide(0, observe(0, 0.0)) == 0
    assert controller.decide(1, observe(0, 0.0, calls=1.0)) == 1
    assert {controller.decide(second, observe(1, 0.0)) for second in range(2, 902)} == {1}
    assert controller.decide(902, observe(1, 0.0)) == 0


@pytest.mark.parametrize("policy", [POLICY, AutoscalingPolicy()], ids=["configured", "serve"])
@pytest.mark.parametrize("seed", range(3))
def test_decisions_equal_those_of_serve(
    policy: AutoscalingPolicy, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1_000.0
    monkeypatch.setattr(serve_policy.time, "time", lambda: now_s)
    controller = create(
        policy=policy, min_replicas=0, downscale_delay_s=5, downscale_to_zero_delay_s=9
    )
    serve = serve_policy._apply_autoscaling_config(controller._policy)
    state: dict[str, Any] = {}
    target, randomness = 0, random.Random(seed)
    seen = set()
    for _ in range(600):
        now_s += 1
        calls = randomness.choice([0.0, 0.0, 3.0, 40.0])
        seen_load = observe(target, randomness.choice([0.0, 0.5, 1.0]), 0.0, calls)
        context = controller._build_context(now_s, seen_load)
        context.policy_state = state
        replicas, state = serve(context)
        target = max(0, min(8, replicas))
        assert controller.decide(now_s, seen_load) == target
        seen.add(target)
    assert len(seen) > 2
