"""A cluster that tunes a model for its host in the background."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from deployments.tuning.costs import TuningTarget, read_costs
from tests.support.artifacts import EMBEDDER
from tests.support.ray_cluster import Cluster, read_title, wait_for
from tests.support.tuning_artifacts import hold_tuning_lock, seal_tunable


@pytest.fixture
def placement(tmp_path: Path) -> TuningTarget:
    """A tiny model whose portable default is slow, and another graph that is not."""
    return seal_tunable(tmp_path / "store", names=["slow", "int8"])


@pytest.fixture
def own_cluster(
    tmp_path: Path, config: dict[str, Any], placement: TuningTarget
) -> Iterator[Cluster]:
    tuning = copy.deepcopy(config)
    arguments = tuning["applications"][0]["args"]
    arguments["models"] = [{"id": EMBEDDER, "version": "latest"}]
    arguments["encoders"]["cpu"] |= {"tune": "background", "tune_seconds": 1}
    cluster = Cluster(tmp_path, tuning, tmp_path / "store")
    yield cluster
    cluster.end()


def ask(cluster: Cluster) -> httpx.Response:
    body = {"inputs": "a good film", "options": {"use_cache": False}}
    reply = httpx.post(f"{cluster.url}/models/{EMBEDDER}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply


def measuring(cluster: Cluster) -> list[str]:
    titles = (read_title(process) for process in cluster.processes())
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
