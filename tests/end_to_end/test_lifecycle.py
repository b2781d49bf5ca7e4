"""Start of a cluster, and tuning in the background."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks.servers.process_kinds import read_command
from deployments.terminal.command_line import UNUSABLE_CONFIG
from deployments.tuning.costs import TuningTarget, read_costs
from tests.support.artifacts import EMBEDDER
from tests.support.ray_cluster import REPOSITORY, Cluster
from tests.support.tuning_artifacts import hold_tuning_lock
from tests.support.waiting import wait_for


def ask(cluster: Cluster) -> httpx.Response:
    body = {"inputs": "a good film", "options": {"use_cache": False}}
    reply = httpx.post(f"{cluster.url}/models/{EMBEDDER}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply


def measuring(cluster: Cluster) -> list[str]:
    titles = (read_command(process) for process in cluster.processes())
    return [title for title in titles if "-m deployments.tuning" in title]


def test_cluster_serves_while_it_tunes(tuning_cluster: Cluster, placement: TuningTarget) -> None:
    with hold_tuning_lock(placement):
        tuning_cluster.start()
        first = ask(tuning_cluster)
        assert first.headers["x-compute-type"] == "cpu-fp32"
        assert not measuring(tuning_cluster)
    (replica,) = tuning_cluster.replicas("CpuEncoder")

    def is_tuned() -> bool:
        reply = ask(tuning_cluster)
        assert np.allclose(reply.json(), first.json(), atol=1e-5)
        return reply.headers["x-compute-type"] == "cpu-int8"

    wait_for(is_tuned, 240)  # tuning has the lowest priority
    table = read_costs(placement)
    assert table is not None
    assert {variant.candidate for variant in table.selected_variants()} == {"int8"}
    assert [process.pid for process in tuning_cluster.replicas("CpuEncoder")] == [replica.pid]
    wait_for(lambda: not measuring(tuning_cluster))


def test_other_hosts_reach_only_the_port_for_clients(own_cluster: Cluster) -> None:
    ports = own_cluster.ports()
    outside = {one: name for one, name in ports.items() if one[0] != "127.0.0.1"}
    assert outside.keys() == {("0.0.0.0", own_cluster.port)}, outside


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
    assert refused.returncode == UNUSABLE_CONFIG
    assert "max_ongoing_request" in refused.stderr
    assert "starting Ray" not in refused.stderr
