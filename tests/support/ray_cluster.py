"""A cluster of our own, started the way a user starts one."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

REPOSITORY = Path(__file__).parents[2]
START_S = 120
GPUS = 2  # that Ray believes in: one for the encoder, one for the generator


class Cluster:
    """`hundredfold serve` as a child process, its run directory beside the config."""

    def __init__(self, directory: Path, config: dict[str, Any], store: Path) -> None:
        self.store = store
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.config = directory / "serve_config.yaml"
        self.config.write_text(yaml.safe_dump(config, sort_keys=False))
        self.output = directory / "up.log"
        self._environment = {**os.environ, "HUNDREDFOLD_STORE": str(store)}
        self._launcher: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """The launcher's command line."""
        options = ["--port", str(self.port), "--num-gpus", str(GPUS)]
        return [sys.executable, "-m", "cluster", "up", str(self.config), *options]

    def start(self) -> None:
        """Start and wait for the line that invites."""
        with self.output.open("wb") as log:
            self._launcher = subprocess.Popen(
                self.command(),
                cwd=REPOSITORY,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_for(lambda: "serving on" in self.said() or self.launcher.poll() is not None, START_S)
        assert "serving on" in self.said(), self.said()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End the launcher; its exit status."""
        self.launcher.send_signal(number)
        return self.launcher.wait(60)

    def end(self) -> None:
        """Stop it if it still runs, whatever a test has done to it."""
        if self._launcher is not None and self._launcher.poll() is None:
            self.stop()

    @property
    def launcher(self) -> subprocess.Popen[bytes]:
        """The launcher's process."""
        assert self._launcher is not None
        return self._launcher

    def said(self) -> str:
        """Everything the launcher printed."""
        return self.output.read_text()

    def dashboard(self) -> str:
        """Where Ray's REST listens."""
        found = re.search(r"dashboard on (\S+)\)", self.said())
        assert found
        return f"http://{found[1]}"

    def deploy(self, config: dict[str, Any]) -> None:
        """`serve deploy` of another config, ports kept."""
        config = {**config, "http_options": {**config["http_options"], "port": self.port}}
        path = self.config.with_name("deployed.yaml")
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        serve = Path(sys.executable).with_name("serve")
        subprocess.run(
            [serve, "deploy", "-a", self.dashboard(), path],
            check=True,
            capture_output=True,
            env={**self._environment, "RAY_AUTH_MODE": "token"},
        )

    def processes(self) -> list[psutil.Process]:
        """Live processes that belong to this run, by the two sessions the launcher leads."""
        sessions = {child.pid for child in psutil.Process(self.launcher.pid).children()}
        return [p for p in psutil.process_iter() if find_session(p) in sessions]

    def replicas(self, deployment: str) -> list[psutil.Process]:
        """The processes of a deployment's replicas."""
        title = f"ray::ServeReplica:hundredfold:{deployment}"
        return [p for p in self.processes() if read_title(p).startswith(title)]


def find_session(process: psutil.Process) -> int | None:
    """The session a process belongs to; None when it has just ended."""
    try:
        return os.getsid(process.pid)
    except (ProcessLookupError, psutil.Error):
        return None


def read_title(process: psutil.Process) -> str:
    """What a process calls itself; empty when it has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    """Return when `condition` holds; fails the test after `timeout_s`."""
    give_up_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_s, f"waited {timeout_s} s in vain"
        time.sleep(0.2)


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_is_open(port: int) -> bool:
    """Whether somebody accepts connections."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
