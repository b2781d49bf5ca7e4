"""Number of replicas from the load that replicas report themselves.

serve_config.yaml names the policy in `autoscaling_config`. Serve's own policy counts only calls
through handles; most calls use channels (transports/channel). Serve's controller imports this
module, so it imports little. Bounds, delays and factors are applied by Serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

# Metric of a replica: calls in progress over channels. The name `running_requests` would replace
# Serve's own count of calls through handles.
ONGOING_CALLS = "ongoing_calls"


class ScalingContext(Protocol):
    """The part of ray.serve.config.AutoscalingContext that the policy reads."""

    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None
    total_num_requests: float
    config: Any


def scale_on_calls(context: ScalingContext) -> tuple[float, dict[str, Any]]:
    """Return as many replicas as keep each at `target_ongoing_requests` calls of any transport."""
    reported = (context.aggregated_metrics or {}).get(ONGOING_CALLS, {})
    calls = sum(reported.values()) + context.total_num_requests
    return calls / context.config.get_target_ongoing_requests(), {}
