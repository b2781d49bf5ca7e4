"""The autoscaling decisions of Ray Serve's controller, in simulated time."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from ray.serve import autoscaling_policy as serve_policy
from ray.serve.config import AutoscalingConfig, AutoscalingContext

Metrics = Mapping[str, Mapping[Any, float]]  # metric name -> replica -> value


class ReplicaLoad(NamedTuple):
    """Inputs of one decision of the controller. Metrics are means over `look_back_period_s`."""

    running: int  # number of running replicas
    metrics: Metrics  # metrics that the replicas report
    requests: float  # number of running and queued calls through deployment handles
    queued_requests: float  # number of calls that wait in deployment handles


class Controller:
    """Reimplementation of `ray.serve._private.autoscaling_state.DeploymentAutoscalingState`.

    Serve's class reads the wall clock; `Controller` gets the time as an argument. Both call the
    same policy and the same private functions of Serve for scaling factors and delays. A unit test
    compares the decisions with those of Serve's `_apply_autoscaling_config`, on a fake clock.
    """

    def __init__(self, config: AutoscalingConfig) -> None:
        self.config = config
        self.target: int = config.min_replicas
        policy = config.policy.get_policy()
        is_class = inspect.isclass(policy)
        self._policy = policy(**config.policy.policy_kwargs) if is_class else policy
        self._delays: dict[str, Any] = {}

    def decide(self, now_s: float, observation: ReplicaLoad) -> int:
        """Update `target`, the number of replicas to run from `now_s` on, and return it."""
        replicas = self._decide(now_s, self._build_context(now_s, observation))
        self.target = max(self.config.min_replicas, min(self.config.max_replicas, replicas))
        return self.target

    def _decide(self, now_s: float, context: AutoscalingContext) -> int:
        cold_start = serve_policy._get_cold_start_scale_up_replicas(context)
        if cold_start is not None:
            return int(cold_start)
        requested, _ = self._policy(context)
        scaled = serve_policy._apply_scaling_factors(
            requested, context.current_num_replicas, self.config
        )
        if context.current_num_replicas == 0 and scaled > 0:
            return int(scaled)
        replicas, self._delays = serve_policy._apply_delay_logic(
            max(0, scaled), self.target, self.config, self._delays, _now=now_s
        )
        return int(replicas)

    def _build_context(self, now_s: float, observation: ReplicaLoad) -> AutoscalingContext:
        unused: Any = None
        return AutoscalingContext(
            deployment_id=unused,
            deployment_name="simulated",
            app_name=None,
            current_num_replicas=observation.running,
            target_num_replicas=self.target,
            running_replicas=[],
            total_num_requests=observation.requests,
            total_queued_requests=observation.queued_requests,
            aggregated_metrics=dict(observation.metrics),
            raw_metrics=None,
            capacity_adjusted_min_replicas=self.config.min_replicas,
            capacity_adjusted_max_replicas=self.config.max_replicas,
            policy_state={},
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=now_s,
            config=self.config,
        )
