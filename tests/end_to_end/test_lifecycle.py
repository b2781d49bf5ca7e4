"""Start, tuning in the background, crash and stop of a cluster."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from benchmarks.servers.process_kinds import read_command
from deployments.artifacts.store import LATEST_NAME
from deployments.tuning.costs import TuningTarget, read_costs
from tests.end_to_end.conftest import encoder_config
from tests.support.artifacts import EMBEDDER
from tests.support.ray_cluster import REPOSITORY, Cluster, port_is_open, wait_for
from tests.support.tuning_artifacts import hold_tuning_lock, seal_tunable


@pytest.fixture(scope="module")
def placement(tmp_path_factory: pytest.TempPathFactory) -> TuningTarget:
    """A tiny model whose default candidate is slow; its candidate `int8` is fast."""
    return seal_tunable(tmp_path_factory.mktemp("tuned") / "store", names=["slow", "int8"])


@pytest.fixture(scope="module")
def own_cluster(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any], placement: TuningTarget
) -> Iterator[Cluster]:
    """A cluster that tunes its model in the background; the first test starts it.

    It listens on all network interfaces, without API keys, so that a test can check which ports
    other hosts reach.
    """
    tuning = encoder_config(config, [{"id": EMBEDDER, "version": LATEST_NAME}])
    tuning["http_options"]["host"] = "0.0.0.0"
    ingress = next(d for d in tuning["applications"][0]["deployments"] if d["name"] == "Ingress")
    ingress["user_config"]["no_auth"] = True
    arguments = tuning["applications"][0]["args"]
    arguments["encoders"]["cpu"] |= {"tune": "background", "tune_seconds": 1}
    store = placement.artifact.parents[1]
    cluster = Cluster(tmp_path_factory.mktemp("own"), tuning, store)
    yield cluster
    cluster.end()


def ask(cluster: Cluster) -> httpx.Response:
    body = {"inputs": "a good film", "options": {"use_cache": False}}
    reply = httpx.post(f"{cluster.url}/models/{EMBEDDER}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply


def measuring(cluster: Cluster) -> list[str]:
    titles = (read_command(process) for process in cluster.processes())
    return [title for title in titles if "-m deployments.tuning" in title]


def test_cluster_serves_while_it_tunes(own_cluster: Cluster, placement: TuningTarget) -> None:
    with hold_tuning_lock(placement):
        own_cluster.start()
        first = ask(own_cluster)
        assert first.headers["x-compute-type"] == "cpu-fp32"
        assert not measuring(own_cluster)
    (replica,) = own_cluster.replicas("CpuEncoder")

    def is_tuned() -> bool:
        reply = ask(own_cluster)
        assert np.allclose(reply.json(), first.json(), atol=1e-5)
        return reply.headers["x-compute-type"] == "cpu-int8"

    wait_for(is_tuned, 60)
    table = read_costs(placement)
    assert table is not None
    assert {variant.candidate for variant in table.selected_variants()} == {"int8"}
    assert [process.pid for process in own_cluster.replicas("CpuEncoder")] == [replica.pid]
    wait_for(lambda: not measuring(own_cluster), 10)


def test_other_hosts_reach_only_the_port_for_clients(own_cluster: Cluster) -> None:
    if not own_cluster.is_running:  # the test before this one was deselected
        own_cluster.start()
    ports = own_cluster.ports()
    outside = {one: name for one, name in ports.items() if one[0] != "127.0.0.1"}
    assert outside.keys() == {("0.0.0.0", own_cluster.port)}, outside


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if is_alive(p)]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_start_after_crash_works_and_stop_leaves_no_process(own_cluster: Cluster) -> None:
    if not own_cluster.is_running:  # the test before this one was deselected
        own_cluster.start()
    first = own_cluster.processes()
    assert any("/haproxy" in read_command(p) for p in first)

    second = subprocess.run(
        own_cluster.command(), cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert second.returncode == 1
    assert f"pid {own_cluster.launcher.pid} already serves from this directory" in second.stderr

    os.kill(own_cluster.launcher.pid, signal.SIGKILL)
    own_cluster.launcher.wait()

    own_cluster.start()
    assert alive(first) == []
    running = own_cluster.processes()
    assert own_cluster.stop(signal.SIGHUP) == 0
    assert alive(running) == []
    wait_for(lambda: not port_is_open(own_cluster.port), 5)


@pytest.fixture
def new_cluster(tmp_path: Path, config: dict[str, Any]) -> Cluster:
    """A cluster that is never started."""
    return Cluster(tmp_path, config, store=tmp_path)


def test_occupied_port_error_names_the_process(new_cluster: Cluster) -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", new_cluster.port))
        squatter.listen()
        refused = subprocess.run(
            new_cluster.command(), cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
    assert refused.returncode == 1
    assert f"port {new_cluster.port} on 127.0.0.1 is in use by pid {os.getpid()}" in refused.stderr
    assert "hint: " in refused.stderr


def test_config_with_unknown_key_is_rejected_before_start(
    new_cluster: Cluster,
) -> None:
    text = new_cluster.config.read_text().replace("max_ongoing_requests", "max_ongoing_request", 1)
    new_cluster.config.write_text(text)
    refused = subprocess.run(
        new_cluster.command(), cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1
    assert "max_ongoing_request" in refused.stderr
    assert "starting Ray" not in refused.stderr
