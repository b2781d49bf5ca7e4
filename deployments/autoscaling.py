"""Number of replicas from the load that replicas report themselves.

serve_config.yaml names the policy in `autoscaling_config`. Serve's own policy counts only calls
through handles; most calls use channels (transports/channel). Serve's controller imports this
module, so it imports little. Bounds, delays and factors are applied by Serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

# Metric of a replica: cost of its calls over channels. The name `running_requests` would replace
# Serve's own count of calls through handles.
LOAD = "load"


class ScalingContext(Protocol):
    """The part of ray.serve.config.AutoscalingContext that the policy reads."""

    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None
    total_num_requests: float
    config: Any


class ScaleOnLoad:
    """As many replicas as keep each at `target_load`: characters, tokens or requests by deployment.

    A call through a handle counts as `1 / target_ongoing_requests` of a replica.
    """

    def __init__(self, target_load: float) -> None:
        if target_load <= 0:
            raise ValueError(f"`target_load` is {target_load}; it must be above 0")
        self._target_load = target_load

    def __call__(self, context: ScalingContext) -> tuple[float, dict[str, Any]]:
        load = sum((context.aggregated_metrics or {}).get(LOAD, {}).values())
        through_handles = context.total_num_requests / context.config.get_target_ongoing_requests()
        return load / self._target_load + through_handles, {}
