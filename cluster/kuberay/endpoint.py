"""Port, artifacts and drain time of the pods, and settings that would make pods unreachable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from cluster.config_entries import find_applications, read_args, read_mapping
from cluster.kuberay.overlay import InvalidOverlay
from cluster.ports import (
    DASHBOARD_PORT,
    HAPROXY_METRICS_PORT,
    HAPROXY_STATUS_PORT,
    HTTP_PORT,
    REPLICA_PORTS,
    WORKER_PORTS,
)
from cluster.serve_defaults import DEPLOYMENT_DEFAULTS, HTTP_DEFAULTS

# Seconds for replacements to start on other pods. Afterwards the replicas of a drained pod stop
# even without replacements.
REPLACEMENT_S = 120
ALL_INTERFACES = ("0.0.0.0", "::")
# KubeRay requires these port names.
HEAD_PORTS: Mapping[str, int] = {"gcs-server": 6379, "dashboard": DASHBOARD_PORT, "client": 10001}
# Ports that Prometheus reads, by the names that pod-monitor.yaml uses. KubeRay requires `metrics`.
PROMETHEUS_PORTS: Mapping[str, int] = {"metrics": 8080, "haproxy": HAPROXY_METRICS_PORT}
# Ports on which Ray, KubeRay, Serve and HAProxy listen in the pods.
RESERVED_PORTS: Mapping[str, range] = {
    **{f"Ray's {name}": range(port, port + 1) for name, port in HEAD_PORTS.items()},
    "Ray's metrics": range(PROMETHEUS_PORTS["metrics"], PROMETHEUS_PORTS["metrics"] + 1),
    "Serve's fallback proxy": range(8500, 8501),
    "Serve's fallback proxy for gRPC": range(9500, 9501),
    "HAProxy's statistics": range(HAPROXY_STATUS_PORT, HAPROXY_STATUS_PORT + 1),
    "HAProxy's metrics": range(PROMETHEUS_PORTS["haproxy"], PROMETHEUS_PORTS["haproxy"] + 1),
    "Ray's workers": WORKER_PORTS,
    "the replicas": REPLICA_PORTS,
    "the replicas for gRPC": range(40_000, 41_001),
    "Ray's autoscaler": range(44_217, 44_218),
    "the metrics of Ray's dashboard": range(44_227, 44_228),
    "Ray's agent": range(52_365, 52_366),
}


@dataclass(frozen=True, slots=True)
class ServeEndpoint:
    """Values that the pods depend on, from the Serve config merged with production.yaml."""

    port: int
    store: str  # mount point of the artifacts
    drain_s: int  # seconds in which a terminating worker must finish or hand over its requests


def find_endpoint_errors(merged: dict[str, Any]) -> Iterator[str]:
    """Yield a message per setting that would make ready pods unreachable."""
    options = read_mapping(merged, "http_options")
    host, port = options.get("host", HTTP_DEFAULTS["host"]), options.get("port", HTTP_PORT)
    if host not in ALL_INTERFACES:
        yield (
            f"`http_options.host` is {host}: pods have addresses of their own and must reach each "
            f"other. Use {ALL_INTERFACES[0]}"
        )
    location = merged.get("proxy_location", "EveryNode")
    if location != "EveryNode":
        yield (
            f"`proxy_location` is {location}: the Service leaves out the head, and workers without "
            "a proxy stay unready. Use EveryNode"
        )
    for owner, ports in RESERVED_PORTS.items():
        if port in ports:
            yield (
                f"`http_options.port` is {port}: in the pods it belongs to {owner}. Use {HTTP_PORT}"
            )


def read_endpoint(merged: dict[str, Any]) -> ServeEndpoint:
    """Read the endpoint from the merged config.

    Raises InvalidOverlay if the pods could not serve this config, or if no client could reach them.
    """
    stores = {args.get("store") for args in read_args(merged)}
    if len(stores) != 1 or None in stores:
        raise InvalidOverlay(
            "`args.store` must be the same directory in all applications: the pods mount the "
            "artifacts there"
        )
    if errors := list(find_endpoint_errors(merged)):
        raise InvalidOverlay("\n".join(errors))
    # Serve stops the replicas of a draining node so early that their shutdown ends at the deadline
    # `drain_s`. Before the slowest shutdown begins, replacements have REPLACEMENT_S to start.
    key = "graceful_shutdown_timeout_s"
    timeouts = [
        entry.raw.get(key, DEPLOYMENT_DEFAULTS[key])
        for application in find_applications(merged)
        for entry in application.deployments()
    ]
    port = read_mapping(merged, "http_options").get("port", HTTP_PORT)
    drain_s = REPLACEMENT_S + ceil(max(timeouts))
    return ServeEndpoint(port=port, store=str(stores.pop()), drain_s=drain_s)
