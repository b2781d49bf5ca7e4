"""Autoscaling policy: the number of replicas from the load that the replicas report.

serve_config.yaml names the policy in `autoscaling_config`. Serve's own policy counts the calls
through handles. This count does not measure the load, because most calls use channels
(transports/channel), and a call may be one text or a thousand. Serve applies factors, delays and
bounds to the result of the policy. Serve's controller imports this module, so the module itself
imports little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from deployments.host.machine import usable_cores

# Names of the metrics that a replica reports. No metric may have the name `running_requests`: Serve
# would use this metric instead of its own count of calls.
BUSY = "busy"  # share of the replica's capacity in use since its last report, 0 to 1
QUEUED_S = "queued_s"  # seconds that this replica alone needs for its waiting work


class ScalingContext(Protocol):
    """The part of ray.serve.config.AutoscalingContext that the policy reads."""

    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None  # values by metric and replica
    total_queued_requests: float  # calls that wait in handles
    target_num_replicas: int  # replicas that are running, starting or requested
    config: Any


class ScalingTargets(NamedTuple):
    """`policy_kwargs` of serve_config.yaml."""

    # Highest share of the replicas' capacity in use. A higher share adds replicas.
    target_busy: float = 0.7
    # Highest share in use after a replica is removed. It is below `target_busy`, so that a stable
    # load does not add and remove the same replica in turn.
    shrink_busy: float = 0.6
    drain_s: float = 5.0  # seconds in which the replicas together shall finish the waiting work
    # Cores that a busy replica uses. The policy adds no replica for which the cluster lacks cores.
    # None: only `max_replicas` limits the number.
    cores_per_replica: float | None = None

    def check(self) -> None:
        """Raise ValueError if a target is out of its range."""
        if not 0 < self.shrink_busy < self.target_busy < 1:
            raise ValueError(
                f"`shrink_busy` ({self.shrink_busy:g}) must be above 0 and below `target_busy` "
                f"({self.target_busy:g}), which must be below 1: no replica is busier"
            )
        if self.drain_s <= 0:
            raise ValueError(f"`drain_s` is {self.drain_s:g}; it must be above 0")
        if self.cores_per_replica is not None and self.cores_per_replica <= 0:
            raise ValueError(
                f"`cores_per_replica` is {self.cores_per_replica:g}; it must be above 0, or null "
                "for no limit"
            )


def count_replicas(busy: float, queued_s: float, current: int, targets: ScalingTargets) -> int:
    """Return the number of replicas for the load of a deployment that has `current` replicas.

    `busy` and `queued_s` are sums over the replicas. While all replicas are fully busy, the result
    is at least current / target_busy. This holds even if they do not report most of the queue.
    """
    work = busy + queued_s / targets.drain_s  # number of fully busy replicas that the load needs
    needed = math.ceil(work / targets.target_busy)
    if needed > current:
        return needed
    return min(math.ceil(work / targets.shrink_busy), current)


def count_cores() -> int:
    """Return the cores of the Ray cluster; without a cluster, the cores this process may use."""
    import ray  # costs nothing: Serve's controller has imported it already

    if not ray.is_initialized():
        return usable_cores()
    return int(ray.cluster_resources().get("CPU", 0))


class ScaleOnLoad:
    """Policy that applies `count_replicas` to the replicas' reports and the calls in handles.

    Every `target_ongoing_requests` calls that wait in handles count as one busy replica. Calls wait
    in handles while a deployment starts, and with `transport: handle` also later. Waiting calls add
    the first replica. They add further replicas only while all replicas report their load. A
    replica that starts, for example in place of a crashed one, does not report yet. The calls that
    queue during these few seconds must not add many replicas.
    """

    def __init__(self, **targets: float | None) -> None:
        """Check the `policy_kwargs`. Raises ValueError or TypeError if they are invalid."""
        # mypy sees that a value may be None, but only `cores_per_replica` accepts None. For any
        # other target, `check` raises TypeError.
        self._targets = ScalingTargets(**targets)  # type: ignore[arg-type]
        self._targets.check()

    def __call__(self, context: ScalingContext) -> tuple[int, dict[str, Any]]:
        reported = context.aggregated_metrics or {}
        busy, queued_s = (sum(reported.get(name, {}).values()) for name in (BUSY, QUEUED_S))
        in_handles = context.total_queued_requests / context.config.get_target_ongoing_requests()
        current = context.target_num_replicas
        replicas = count_replicas(busy + in_handles, queued_s, current, self._targets)
        if len(reported.get(BUSY, {})) < max(current, 1):
            by_reports = count_replicas(busy, queued_s, current, self._targets)
            replicas = min(replicas, max(by_reports, current, 1))
        cores = self._targets.cores_per_replica
        if cores is not None and replicas > current:
            replicas = min(replicas, max(int(count_cores() / cores), current, 1))
        return replicas, {}
