"""Number of replicas from the work that replicas report themselves.

serve_config.yaml names the policy in `autoscaling_config`. Serve's own policy counts calls through
handles; most calls use channels (transports/channel), and a call may be one text or a thousand.
Serve applies factors, delays and bounds to what the policy returns. Serve's controller imports this
module, so it imports little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

# Metrics of a replica. The name `running_requests` would replace Serve's own count of calls.
BUSY = "busy"  # share of its capacity in use since the last report, 0 to 1
QUEUED_S = "queued_s"  # s that it needs for the work that waits for it, alone


class ScalingContext(Protocol):
    """The part of ray.serve.config.AutoscalingContext that the policy reads."""

    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None  # by metric and replica
    total_queued_requests: float  # calls that wait in handles
    target_num_replicas: int  # running, starting or requested
    config: Any


class ScalingTargets(NamedTuple):
    """`policy_kwargs` of serve_config.yaml."""

    target_busy: float = 0.7  # share of a replica's capacity, at most; more adds replicas
    # Share that may remain in use after a removal. The distance to `target_busy` keeps a load that
    # is stable from adding and removing the same replica.
    shrink_busy: float = 0.6
    drain_s: float = 5.0  # s in which the replicas together work off what waits

    def check(self) -> None:
        """Raise ValueError."""
        if not 0 < self.shrink_busy < self.target_busy < 1:
            raise ValueError(
                f"`shrink_busy` ({self.shrink_busy:g}) must be above 0 and below `target_busy` "
                f"({self.target_busy:g}), which must be below 1: no replica is busier"
            )
        if self.drain_s <= 0:
            raise ValueError(f"`drain_s` is {self.drain_s:g}; it must be above 0")


def count_replicas(busy: float, queued_s: float, current: int, targets: ScalingTargets) -> int:
    """Return the number of replicas for the load of a deployment that has `current` replicas.

    `busy` and `queued_s` are sums over the replicas. A saturated deployment grows at least by
    1 / target_busy each time, also if most of its queue is somewhere that reports nothing.
    """
    work = busy + queued_s / targets.drain_s  # replicas, each in use all the time
    needed = math.ceil(work / targets.target_busy)
    if needed > current:
        return needed
    return min(math.ceil(work / targets.shrink_busy), current)


class ScaleOnLoad:
    """The policy: `count_replicas` of what the replicas report and of the calls in handles.

    `target_ongoing_requests` calls that wait in handles count as one replica. They wait there while
    a deployment starts, or always with `transport: handle`.
    """

    def __init__(self, **targets: float) -> None:
        """Raises ValueError or TypeError for invalid `policy_kwargs`."""
        self._targets = ScalingTargets(**targets)
        self._targets.check()

    def __call__(self, context: ScalingContext) -> tuple[int, dict[str, Any]]:
        reported = context.aggregated_metrics or {}
        busy, queued_s = (sum(reported.get(name, {}).values()) for name in (BUSY, QUEUED_S))
        in_handles = context.total_queued_requests / context.config.get_target_ongoing_requests()
        replicas = count_replicas(
            busy + in_handles, queued_s, context.target_num_replicas, self._targets
        )
        return replicas, {}
