"""A Ray cluster of containers with the application, on one host."""

from __future__ import annotations

import json
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress
from benchmarks.common.report import log_progress
from benchmarks.pods.containers import (
    PodNetwork,
    build_arguments,
    read_ray_cluster,
    run_engine,
)
from benchmarks.servers.processes import is_ready
from cluster.ports import DASHBOARD_PORT, HTTP_PORT
from cluster.probes import DIRECT
from deployments.deployment_names import INGRESS

NAME = "hundredfold-pods"  # of the network, and before the names of the containers
SUBNET = "10.91.77"
FIRST_WORKER = 11  # last byte of its address
START_TIMEOUT_S = 240.0
POLL_S = 1.0
DRAIN_S = 60  # time that a drained worker has, in place of the minutes of the preStop hook


@dataclass
class PodCluster:
    """Head and CPU workers of a RayService as containers. Workers count from 1."""

    engine: str
    network: PodNetwork
    groups: dict[str, Any]  # `rayClusterConfig` of the RayService
    config: dict[str, Any]  # of Serve
    first_port: int  # on 127.0.0.1: the dashboard; the workers' ports follow

    @property
    def workers(self) -> range:
        return range(1, self.groups["workerGroupSpecs"][0]["replicas"] + 1)

    def start(self) -> None:
        """Start all pods, deploy the application, and wait until it serves on every worker.

        Raises BenchmarkError.
        """
        self.close()  # what a killed run has left
        network = ("network", "create", "--subnet", f"{self.network.subnet}.0/24")
        run_engine(self.engine, (*network, self.network.name))
        log_progress("starting the head and the workers")
        self._run(
            f"{NAME}-head", 2, self.groups["headGroupSpec"], {self.first_port: DASHBOARD_PORT}
        )
        self._wait_for("the dashboard", lambda: bool(self._call_dashboard("api/version")))
        for worker in self.workers:
            self.start_worker(worker)
        self._wait_for("Ray's nodes", lambda: self._count_nodes() == 1 + len(self.workers))
        self._call_dashboard("api/serve/applications/", self.config)
        self.wait_until_complete()

    def close(self) -> None:
        names = [f"{NAME}-head", *(self._name(worker) for worker in self.workers)]
        run_engine(self.engine, ("rm", "--force", *names), check=False)
        run_engine(self.engine, ("network", "rm", self.network.name), check=False)

    def address(self, worker: int) -> ServerAddress:
        """Return where clients on this host reach HAProxy in a worker."""
        return ServerAddress("127.0.0.1", self.first_port + worker)

    def start_worker(self, worker: int) -> None:
        group = self.groups["workerGroupSpecs"][0]
        number, port = FIRST_WORKER + worker - 1, self.first_port + worker
        self._run(self._name(worker), number, group, {port: HTTP_PORT})

    def replace(self, worker: int) -> None:
        """Start a new container in place of a worker, as Kubernetes does after a failure."""
        run_engine(self.engine, ("rm", "--force", self._name(worker)))
        self.start_worker(worker)

    def kill(self, worker: int) -> None:
        run_engine(self.engine, ("kill", self._name(worker)))

    def disconnect(self, worker: int) -> None:
        """Take a worker off the network. Its connections stay open, without a packet."""
        run_engine(self.engine, ("network", "disconnect", self.network.name, self._name(worker)))

    def drain(self, worker: int) -> None:
        """Drain a worker as the preStop hook does, and stop it."""
        name = self._name(worker)
        command = ("python", "-m", "cluster.kuberay.drain", str(DRAIN_S))
        run_engine(self.engine, ("exec", name, *command))
        run_engine(self.engine, ("stop", "--time", str(DRAIN_S), name))

    def find_ingress_worker(self) -> int:
        """Return the first worker with a replica of the ingress."""
        deployments = self._read_application().get("deployments", {})
        replicas = deployments.get(INGRESS, {}).get("replicas", [])
        addresses = {replica.get("node_ip") for replica in replicas}
        for worker in self.workers:
            if self.network.address(FIRST_WORKER + worker - 1) in addresses:
                return worker
        raise BenchmarkError(f"no worker has a replica of the ingress: {replicas}")

    def wait_until_complete(self) -> None:
        """Wait until all deployments are healthy and HAProxy serves on every worker.

        Raises BenchmarkError after START_TIMEOUT_S.
        """
        self._wait_for("the application", self._is_complete)

    def _is_complete(self) -> bool:
        application = self._read_application()
        deployments = application.get("deployments", {}).values()
        return (
            application.get("status") == "RUNNING"
            and all(each["status"] == "HEALTHY" for each in deployments)
            and all(is_ready(self.address(each).port, "/-/healthz") for each in self.workers)
        )

    def _read_application(self) -> dict[str, Any]:
        applications = self._call_dashboard("api/serve/applications/").get("applications", {})
        application: dict[str, Any] = next(iter(applications.values()), {})
        return application

    def _count_nodes(self) -> int:
        nodes = self._call_dashboard("nodes?view=summary").get("data", {}).get("summary", [])
        return sum(node["raylet"]["state"] == "ALIVE" for node in nodes)

    def _call_dashboard(self, path: str, body: Any = None) -> Any:
        """Return the JSON of the dashboard; {} while it does not answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.first_port}/{path}",
            data=None if body is None else json.dumps(body).encode(),
            method="GET" if body is None else "PUT",
            headers={
                "authorization": f"Bearer {self.network.token}",
                "content-type": "application/json",
            },
        )
        try:
            with DIRECT.open(request, timeout=120) as response:
                return json.loads(response.read() or b"{}")
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace").strip()
            raise BenchmarkError(f"the dashboard answers {error.code}: {text[-1_000:]}") from error
        except OSError:
            return {}

    def _wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline_s:
                raise BenchmarkError(
                    f"{what} did not start within {START_TIMEOUT_S:g} s",
                    hint=f"see the containers: `{self.engine} logs {NAME}-head`, also during a run",
                )
            time.sleep(POLL_S)

    def _run(self, name: str, number: int, group: dict[str, Any], ports: dict[int, int]) -> None:
        run_engine(self.engine, build_arguments(name, number, group, self.network, ports))

    def _name(self, worker: int) -> str:
        return f"{NAME}-worker-{worker}"


@contextmanager
def run_pods(
    engine: str, manifest: Path, image: str, store: Path, first_port: int
) -> Iterator[PodCluster]:
    """Run the pods of `manifest` until the end of the block. Raises BenchmarkError."""
    groups, config = read_ray_cluster(manifest)
    network = PodNetwork(
        name=NAME, subnet=SUBNET, image=image, store=store.resolve(), token=secrets.token_hex(32)
    )
    cluster = PodCluster(engine, network, groups, config, first_port)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
