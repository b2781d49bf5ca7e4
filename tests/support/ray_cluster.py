"""A cluster for tests, started by `hundredfold serve`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.servers.process_kinds import read_command
from tests.support.ports import free_port
from tests.support.waiting import wait_for

REPOSITORY = Path(__file__).parents[2]
START_S = 400  # maximum wait; slow hosts take minutes while other tests run
SETTLED_S = 300
GPUS = 2  # passed to Ray as the number of GPUs: one for the encoder, one for the generator


class Cluster:
    """`hundredfold serve` as a child process, with its run directory next to the config."""

    def __init__(
        self,
        directory: Path,
        config: dict[str, Any],
        store: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.store = store
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.config = directory / "serve_config.yaml"
        self.config.write_text(yaml.safe_dump(config, sort_keys=False))
        self.output = directory / "up.log"
        self._environment = {
            **os.environ,
            "HUNDREDFOLD_STORE": str(store),
            "RAY_metrics_report_interval_ms": "1000",  # tests wait for metrics; default 10 s
            **environment,
        }
        self._launcher: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        options = ["--port", str(self.port), "--num-gpus", str(GPUS)]
        return [sys.executable, "-m", "cluster", "serve", str(self.config), *options]

    def start(self) -> None:
        """Start the launcher and wait until it prints `serving on`."""
        assert not self.is_running, "the launcher would be lost"
        with self.output.open("wb") as log:
            self._launcher = subprocess.Popen(
                # Tests under `nohup` ignore SIGHUP, and the launcher would inherit this.
                ["env", "--default-signal=HUP", *self.command()],
                cwd=REPOSITORY,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_for(lambda: "serving on" in self.said() or self.launcher.poll() is not None, START_S)
        assert "serving on" in self.said(), self.said()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Stop the launcher; return its exit status."""
        self.launcher.send_signal(number)
        return self.launcher.wait(60)

    def end(self) -> None:
        """Stop the launcher if it still runs."""
        if self.is_running:
            self.stop()

    @property
    def is_running(self) -> bool:
        return self._launcher is not None and self._launcher.poll() is None

    @property
    def launcher(self) -> subprocess.Popen[bytes]:
        assert self._launcher is not None
        return self._launcher

    def said(self) -> str:
        """Return the output of the launcher."""
        return self.output.read_text()

    def dashboard(self) -> str:
        """Return the URL of Ray's REST API."""
        return self._find_url("dashboard")

    def metrics(self) -> str:
        """Return the text of `/metrics`, which has a separate port."""
        return httpx.get(self._find_url("metrics") + "/metrics", timeout=30).text

    def _find_url(self, port: str) -> str:
        found = re.search(rf"{port} on ([\d.:]+)", self.said())
        assert found
        return f"http://{found[1]}"

    def deploy(self, config: dict[str, Any]) -> None:
        """Apply another config, with the same port. REST is faster than `serve deploy`."""
        self._call_serve("PUT", self._with_port(config))

    def settle(self, config: dict[str, Any]) -> None:
        """Apply a config and wait until Serve has applied it completely.

        Otherwise, later steps of a test could reach stopping replicas or old settings.
        """
        self.deploy(config)
        wait_for(self._is_settled, SETTLED_S)

    def _is_settled(self) -> bool:
        status = self.status()
        replicas = [each for one in status["deployments"].values() for each in one["replicas"]]
        return status["status"] == "RUNNING" and {each["state"] for each in replicas} == {"RUNNING"}

    def draining(self, deployment: str) -> set[int]:
        """Return the pids of the replicas that Serve is stopping."""
        replicas = self.status()["deployments"][deployment]["replicas"]
        return {replica["pid"] for replica in replicas if replica["state"] == "STOPPING"}

    def status(self) -> dict[str, Any]:
        """Return Serve's status of the application."""
        details: dict[str, Any] = self._call_serve("GET").json()["applications"]["hundredfold"]
        return details

    def _call_serve(self, method: str, config: dict[str, Any] | None = None) -> httpx.Response:
        """Call Serve's REST API, which requires Ray's token."""
        reply = httpx.request(
            method,
            f"{self.dashboard()}/api/serve/applications/",
            json=config,
            headers={"Authorization": f"Bearer {read_token()}"},
            timeout=30,
        )
        assert reply.status_code == 200, reply.text
        return reply

    def deploy_by_command(self, config: dict[str, Any]) -> None:
        """Run `serve deploy` with another config and the same port."""
        path = self.config.with_name("deployed.yaml")
        path.write_text(yaml.safe_dump(self._with_port(config), sort_keys=False))
        serve = Path(sys.executable).with_name("serve")
        subprocess.run(
            [serve, "deploy", "-a", self.dashboard(), path],
            check=True,
            capture_output=True,
            env={**self._environment, "RAY_AUTH_MODE": "token"},
        )

    def _with_port(self, config: dict[str, Any]) -> dict[str, Any]:
        return {**config, "http_options": {**config["http_options"], "port": self.port}}

    def processes(self) -> list[psutil.Process]:
        """Return the live processes in the launcher's session, except the launcher."""
        return list_session(self.launcher.pid)

    def ports(self) -> dict[tuple[str, int], str]:
        """Return the names of the processes that listen, by address and port."""
        found: dict[tuple[str, int], str] = {}
        for process in (psutil.Process(self.launcher.pid), *self.processes()):
            with suppress(psutil.Error):  # the process has ended
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        host, port = connection.laddr
                        found[host.removeprefix("::ffff:"), port] = process.name()
        return found

    def replicas(self, deployment: str) -> list[psutil.Process]:
        return self.find(f"ray::ServeReplica:hundredfold:{deployment}")

    def named(self, name: str) -> list[psutil.Process]:
        """Return the live processes with this name."""
        found = []
        for process in self.processes():
            with suppress(psutil.Error):  # the process has ended
                if process.name() == name:
                    found.append(process)
        return found

    def find(self, title: str) -> list[psutil.Process]:
        """Return the live processes whose command line starts with `title`."""
        return [p for p in self.processes() if read_command(p).startswith(title)]


def read_token() -> str:
    """Return Ray's token. The first start of a cluster creates it."""
    path = Path.home() / ".ray" / "auth_token"
    return os.environ.get("RAY_AUTH_TOKEN") or path.read_text().strip()


def list_session(leader: int) -> list[psutil.Process]:
    """Return the live processes of a session, except its leader."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_member = process.pid != leader and find_session(process) == leader
            if is_member and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def find_session(process: psutil.Process) -> int | None:
    """Return the session of a process; None when it has ended."""
    try:
        return os.getsid(process.pid)
    except (ProcessLookupError, psutil.Error):
        return None
