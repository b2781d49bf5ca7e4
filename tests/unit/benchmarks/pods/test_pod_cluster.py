"""What a cluster of containers asks of the engine and of Ray's dashboard. Both are fakes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.pods import pod_cluster
from benchmarks.pods.containers import PodNetwork, read_ray_cluster
from benchmarks.pods.pod_cluster import NAME, PodCluster
from tests.unit.benchmarks.pods.test_containers import MANIFEST

APPLICATION: dict[str, Any] = {
    "status": "RUNNING",
    "deployments": {
        "Ingress": {"status": "HEALTHY", "replicas": [{"node_ip": "10.1.2.12"}, {}]},
        "Tokenizer": {"status": "HEALTHY", "replicas": [{"node_ip": "10.1.2.11"}]},
    },
}


@pytest.fixture
def cluster(tmp_path: Path) -> PodCluster:
    """Create a cluster whose engine logs its arguments into `calls`."""
    engine = tmp_path / "podman"
    engine.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    engine.chmod(0o755)
    network = PodNetwork(name="net", subnet="10.1.2", image="image", store=tmp_path, token="t0")
    groups, config = read_ray_cluster(MANIFEST)
    return PodCluster(str(engine), network, groups, config, first_port=1)


def read_calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


@contextmanager
def dashboard(cluster: PodCluster, status: int, content: bytes) -> Iterator[list[tuple[str, Any]]]:
    """Run a dashboard with one answer. Yield the path and the token of each request."""
    requests: list[tuple[str, Any]] = []

    class DashboardHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append((self.path, self.headers["authorization"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), DashboardHandler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    cluster.first_port = server.server_address[1]
    try:
        yield requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_drained_worker_stops_after_the_drain(cluster: PodCluster, tmp_path: Path) -> None:
    cluster.drain(2)
    assert read_calls(tmp_path) == [
        f"exec {NAME}-worker-2 python -m cluster.kuberay.drain 60",
        f"stop --time 60 {NAME}-worker-2",
    ]


def test_replaced_worker_has_the_same_address(cluster: PodCluster, tmp_path: Path) -> None:
    cluster.replace(3)
    removed, started = read_calls(tmp_path)
    assert removed == f"rm --force {NAME}-worker-3"
    assert started.startswith(f"run --detach --name {NAME}-worker-3 ")
    assert "--ip 10.1.2.13 " in started
    assert "--publish=127.0.0.1:4:8000" in started


def test_end_removes_all_containers_and_the_network(cluster: PodCluster, tmp_path: Path) -> None:
    cluster.close()
    workers = " ".join(f"{NAME}-worker-{worker}" for worker in (1, 2, 3))
    assert read_calls(tmp_path) == [f"rm --force {NAME}-head {workers}", "network rm net"]


def test_victim_has_a_replica_of_the_ingress(cluster: PodCluster) -> None:
    content = json.dumps({"applications": {"hundredfold": APPLICATION}}).encode()
    with dashboard(cluster, 200, content) as requests:
        assert cluster.find_ingress_worker() == 2
    assert requests == [("/api/serve/applications/", "Bearer t0")]


def test_dashboard_is_not_asked_through_a_proxy(
    cluster: PodCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    content = json.dumps({"applications": {"hundredfold": APPLICATION}}).encode()
    with dashboard(cluster, 200, content) as requests:
        assert cluster.find_ingress_worker() == 2
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("change", "is_complete"),
    [
        ({}, True),
        ({"status": "DEPLOYING"}, False),
        ({"deployments": {"a": {"status": "X"}}}, False),
    ],
)
def test_cluster_is_complete_when_all_deployments_are_healthy(
    change: dict[str, Any],
    is_complete: bool,
    cluster: PodCluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, str]] = []
    monkeypatch.setattr(pod_cluster, "is_ready", lambda *given: asked.append(given) or True)
    content = json.dumps({"applications": {"hundredfold": APPLICATION | change}}).encode()
    with dashboard(cluster, 200, content):
        assert cluster._is_complete() is is_complete
    assert len(asked) == (3 if is_complete else 0)


def test_failed_deployment_is_named_with_the_text_of_the_dashboard(cluster: PodCluster) -> None:
    with (
        dashboard(cluster, 500, b"HAProxy crashed"),
        pytest.raises(BenchmarkError, match="answers 500: HAProxy crashed"),
    ):
        cluster.find_ingress_worker()


def test_dashboard_that_does_not_answer_yet_is_waited_for(
    cluster: PodCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_cluster, "START_TIMEOUT_S", 0.0)
    with pytest.raises(BenchmarkError, match="the application did not start"):
        cluster.wait_until_complete()
