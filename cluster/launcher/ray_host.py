"""Ray and Serve on one host, as children of the launcher that are restarted if they end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.default_config import CONFIG_NAME
from cluster.edge.supervisor import Edge
from cluster.environment import OBJECT_STORE_BYTES
from cluster.launcher.liveness import Liveness, StoppedProcesses
from cluster.launcher.local_environment import has_own_ray_directory
from cluster.launcher.local_ports import LocalPorts
from cluster.launcher.ray_sessions import find_session, link_session, remove_ended_sessions
from cluster.launcher.serve_status import DeployFailures, find_token_file
from cluster.probes import StatusCheck, check_port_open, check_ready
from cluster.processes import ChildProcesses
from cluster.progress import StartupProgress
from cluster.shortages import check_space, explain_shortages
from cluster.start_errors import StartError, file_errors
from deployments.files import write_atomically
from deployments.host.machine import usable_cores

MAX_STARTS = 3  # maximum attempts to restart an ended child
# Seconds that the launcher waits, after Serve has ended, to see whether Ray ends too. `ray start`
# checks its processes every second.
SETTLE_S = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RayHost:
    """Ray and Serve on one host, and the settings for their starts and restarts."""

    children: ChildProcesses
    read_config: Callable[[], dict[str, Any]]  # called at each start of Serve
    find_url: Callable[[], str]  # URL for clients, as in the config that was read last
    ports: LocalPorts
    metrics_address: str
    environment: dict[str, str]
    # Working directory of `serve run`. Ray adds it to the import path of the replicas.
    serve_directory: Path
    num_gpus: int
    start_timeout_s: float
    progress: StartupProgress

    def start(self) -> None:
        """Start Ray, then Serve with the config. Raises StartError if Ray does not start."""
        ensure_token(self.environment)
        if has_own_ray_directory(self.environment):
            remove_ended_sessions(self._ray_directory)
        check_space(self._ray_directory)
        self.progress.report(
            f"starting Ray (dashboard on 127.0.0.1:{self.ports.dashboard}, "
            f"metrics on {self.metrics_address})"
        )
        command = build_ray_command(self.ports, self.num_gpus)
        pid = self.children.start("ray", command, self.environment)
        with explain_shortages(self._ray_directory):
            self._wait_for(check_port_open("127.0.0.1", self.ports.gcs))
        self._report_logs(pid)
        self._start_serve()

    def wait_until_ready(self, edge: Edge) -> None:
        """Wait until `GET /ready` succeeds, HAProxy is attached and the dashboard runs.

        Without HAProxy, Serve would silently use its slow Python proxy. Raises StartError if a
        child ends, if Serve cannot start a deployment, or if one of the three takes longer than
        `start_timeout_s`.
        """
        failures = DeployFailures(self.ports.dashboard, self.environment)

        def missing() -> str | None:
            return None if edge.is_attached else "starting: HAProxy"

        def failure() -> str | None:
            return self.children.failure() or failures.find()

        with explain_shortages(self._ray_directory):
            self.progress.wait(check_ready(self.find_url()), failure, self.start_timeout_s)
            self._wait_for(missing)
            self._wait_for(check_port_open("127.0.0.1", self.ports.dashboard))

    def wait(self) -> None:
        """Wait until a child has ended. If only Serve has ended, wait SETTLE_S: Ray may end too.

        Kill Ray if GCS or the raylet does not answer. Kill processes that a signal has stopped.
        """
        liveness = Liveness({"GCS": self.ports.gcs, "the raylet": self.ports.raylet})
        stopped = StoppedProcesses(self.children.find_stopped)

        def is_ray_silent() -> bool:
            for name in stopped.kill():
                self.progress.report(f"`{name}` is stopped; it is killed and replaced")
            silent = liveness.find_silent()
            if silent is not None:
                self.progress.report(f"{silent} does not answer")
            return silent is not None

        self.children.wait(is_ray_silent)
        if "ray" not in self.children.find_ended():  # if Ray has ended, both are restarted anyway
            time.sleep(SETTLE_S)

    def restart(self, edge: Edge) -> None:
        """Restart Serve if only Serve has ended, else Ray and Serve.

        After an attempt that timed out, restart both, because Ray may hang. An attempt also fails
        if a file cannot be written. Raises StartError after MAX_STARTS failed attempts.
        """
        started_s = time.monotonic()
        reason = self.children.failure()
        for _ in range(MAX_STARTS):
            self.progress.report(f"{reason}\nstarting again")
            try:
                if self.children.find_ended().keys() == {"serve"}:
                    self._start_serve()
                else:
                    self.children.kill()
                    self.start()
                self.wait_until_ready(edge)
            except StartError as error:
                failure, reason = error, error.message
            else:
                self.progress.report(f"serving again after {time.monotonic() - started_s:.1f} s")
                return
        raise failure

    @property
    def _ray_directory(self) -> Path:
        return Path(self.environment["RAY_TMPDIR"])

    def _wait_for(self, missing: StatusCheck) -> None:
        self.progress.wait(missing, self.children.failure, self.start_timeout_s)

    def _report_logs(self, pid: int) -> None:
        """Link to the session of the Ray that process `pid` has started, and print its logs."""
        session = find_session(self._ray_directory, pid)
        if session is not None:
            link_session(self.children.run_dir, session)
            self.progress.report(f"logs of the replicas: {session}/logs/serve")

    def _start_serve(self) -> None:
        effective = self.children.run_dir / CONFIG_NAME
        content = yaml.safe_dump(self.read_config(), sort_keys=False).encode()
        with file_errors(effective):
            # Earlier versions let all users read it. Some file systems refuse a change of the mode.
            if effective.exists() and effective.stat().st_mode & 0o077:
                with suppress(PermissionError):
                    effective.chmod(0o600)
            # Do not write an unchanged file, so that a restart needs no space on a full disk.
            if not effective.exists() or effective.read_bytes() != content:
                effective.parent.mkdir(exist_ok=True)
                write_atomically(effective, content, mode=0o600)  # it may contain secrets
        self.progress.report("serve run")
        environment = self.environment | {"RAY_ADDRESS": f"127.0.0.1:{self.ports.gcs}"}
        command = [bin_path("serve"), "run", str(effective)]
        self.children.start("serve", command, environment, self.serve_directory)


def build_ray_command(ports: LocalPorts, num_gpus: int) -> list[str]:
    """Build `ray start` on loopback with explicit ports, so that two clusters can share a host.

    The node autoscaler and the log monitor are off, because one host does not need them. The log
    monitor copies logs of workers to drivers.
    """
    # At least 2, because the deployments' num_cpus together exceed 1.
    num_cpus = max(2, usable_cores())
    return [
        *(sys.executable, "-m", "cluster.launcher.ray_start"),
        "start",
        "--head",
        "--block",
        "--disable-usage-stats",
        "--no-monitor",
        "--include-log-monitor=false",
        "--node-ip-address=127.0.0.1",
        "--dashboard-host=127.0.0.1",
        f"--port={ports.gcs}",
        f"--node-manager-port={ports.raylet}",
        f"--dashboard-port={ports.dashboard}",
        f"--dashboard-agent-listen-port={ports.agent}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--num-cpus={num_cpus}",
        f"--num-gpus={num_gpus}",
    ]


def bin_path(name: str) -> str:
    """Return the path of a console script in this Python environment."""
    return str(Path(sys.executable).with_name(name))


def ensure_token(environment: dict[str, str]) -> None:
    """Create the token file of Ray's control ports if it has no token. Make the file private.

    Do nothing if `environment` contains the token. A file that `environment` names must exist, and
    keeps its mode. Raises StartError if there is no token.
    """
    if "RAY_AUTH_TOKEN" in environment:
        return
    if named := environment.get("RAY_AUTH_TOKEN_PATH"):
        if not os.access(named, os.R_OK):
            raise StartError(f"$RAY_AUTH_TOKEN_PATH names `{named}`, which cannot be read")
        return
    try:
        token = find_token_file()
        # A full disk or a power failure can leave an empty file.
        if not token.exists() or not token.read_bytes().strip():
            command = [bin_path("ray"), "get-auth-token", "--generate"]
            subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True, umask=0o077
            )
        if token.stat().st_mode & 0o077:  # a private file may be on a file system that is read-only
            token.chmod(0o600)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as exc:  # RuntimeError: no home
        reason = (getattr(exc, "stderr", "") or "").strip() or str(exc)
        raise StartError(
            f"cannot create or read the token of Ray's control ports: {reason.splitlines()[-1]}",
            hint="set $HOME to a directory that you may write to, or $RAY_AUTH_TOKEN_PATH",
        ) from exc
