"""Rollout of a version that cannot be served: the old replicas keep serving."""

from __future__ import annotations

import copy
from typing import Any

import httpx

from tests.end_to_end.test_edge import Prober
from tests.support.cluster_faults import RECOVERY_S
from tests.support.ray_cluster import Cluster
from tests.support.served_models import EMBEDDER
from tests.support.waiting import wait_for

UNKNOWN_VERSION = "feedfeedfeed"


def pin(config: dict[str, Any], model_id: str, version: str) -> dict[str, Any]:
    pinned = copy.deepcopy(config)
    (model,) = [
        entry for entry in pinned["applications"][0]["args"]["models"] if entry["id"] == model_id
    ]
    model["version"] = version
    return pinned


def test_refused_version_leaves_the_old_replicas_serving(
    cluster: Cluster, config: dict[str, Any]
) -> None:
    names = ("Ingress", "CpuEncoder", "CpuGenerator")
    before = {name: cluster.replicas(name) for name in names}
    prober = Prober(cluster)
    try:
        cluster.deploy(pin(config, EMBEDDER, UNKNOWN_VERSION))
        wait_for(lambda: cluster.status()["status"] == "DEPLOY_FAILED", RECOVERY_S)
        failed = cluster.status()["deployments"].values()
        assert any(UNKNOWN_VERSION in one["message"] for one in failed)
        wait_for(lambda: {name: cluster.replicas(name) for name in names} == before, 60)
        assert httpx.get(f"{cluster.url}/ready", timeout=5).status_code == 200
    finally:
        outcomes = prober.stop()
        cluster.settle(config)
    assert set(outcomes) == {"200"}, outcomes
