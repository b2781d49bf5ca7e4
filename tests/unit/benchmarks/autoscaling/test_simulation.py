from __future__ import annotations

import numpy as np
import pytest
from ray.serve.config import AutoscalingPolicy

from benchmarks.autoscaling.controller import Controller
from benchmarks.autoscaling.day import Day
from benchmarks.autoscaling.policies import (
    count_micro_batches,
    count_requests,
    parse_autoscaling,
)
from benchmarks.autoscaling.simulation import PASS_S, ServerSettings, Simulation, Trace

REQUEST_S = 0.01


def constant(work: float, seconds: int, models: int = 1) -> Day:
    """Return a day on which each model needs `work` replicas in every second."""
    requests = np.full((models, seconds), round(work / REQUEST_S))
    return Day(np.full(models, REQUEST_S), requests)


def replay(day: Day, replicas: int = 1, server: ServerSettings | None = None) -> Trace:
    server = server or ServerSettings()
    return Simulation(day, server, None, count_requests, replicas).run()


def scale(day: Day, *, window_s: float | None = None, min_replicas: int = 1) -> Trace:
    policy = AutoscalingPolicy(policy_function="deployments.autoscaling:ScaleOnLoad")
    config = parse_autoscaling(
        {
            "min_replicas": min_replicas,
            "max_replicas": 8,
            "metrics_interval_s": 1,
            "look_back_period_s": 5,
            "upscale_delay_s": 2,
            "downscale_delay_s": 60,
            "policy": policy,
        }
    )
    server = ServerSettings(start_s=10, deadline_s=30, window_s=window_s)
    controller = Controller(config)
    return Simulation(day, server, controller, count_requests, min_replicas).run()


def test_load_below_the_capacity_waits_for_nothing() -> None:
    trace = replay(constant(0.8, 100))
    assert {latency for _, latency, _ in trace.latencies} == {PASS_S}
    assert sum(trace.rejected) == 0


def test_every_request_is_served_or_rejected() -> None:
    day = constant(1.5, 100)
    trace = replay(day, server=ServerSettings(deadline_s=5))
    served = sum(number for _, _, number in trace.latencies)
    waiting = trace.queued_s[-1] / REQUEST_S
    assert served + waiting + sum(trace.rejected) == pytest.approx(day.requests.sum())
    assert sum(trace.rejected) > 0


def test_queue_ends_at_the_deadline_and_latency_with_it() -> None:
    trace = replay(constant(3.0, 60), server=ServerSettings(deadline_s=5))
    assert max(trace.queued_s) == pytest.approx(5.0)
    assert 4.0 < max(latency for _, latency, _ in trace.latencies) < 6.0


def test_load_adds_replicas_after_their_start() -> None:
    trace = scale(constant(3.0, 200))
    assert trace.replicas[0] == 1
    first = next(second for second, count in enumerate(trace.replicas) if count > 1)
    assert 10 < first < 20, "delay, look-back and start of a replica"
    assert trace.replicas[-1] >= 5  # work 3.0 / target_busy 0.7
    assert trace.queued_s[-1] == 0


def test_one_hot_model_reaches_the_maximum_even_if_replicas_do_not_see_the_queue() -> None:
    assert max(scale(constant(7.0, 200), window_s=0.1).replicas) == 8


def test_replicas_are_removed_after_the_load() -> None:
    day = constant(3.0, 400)
    day.requests[:, 200:] = 0
    trace = scale(day)
    assert trace.replicas[250] >= 5
    assert trace.replicas[-1] == 1


def test_zero_replicas_start_for_the_first_request() -> None:
    day = constant(0.5, 60)
    day.requests[:, :20] = 0
    trace = scale(day, min_replicas=0)
    assert trace.replicas[:31] == [0] * 30 + [1]
    assert max(latency for _, latency, _ in trace.latencies) > 5


def test_micro_batches_of_one_model_stop_at_their_limit() -> None:
    assert count_micro_batches(np.array([1000.0])) == 16
    assert count_micro_batches(np.array([1000.0, 3.0])) == 19
    assert count_requests(np.array([1000.0, 3.0])) == 1003
