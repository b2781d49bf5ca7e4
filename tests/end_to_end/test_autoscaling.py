"""Autoscaling of encoder replicas: up under load, down after it, to zero without requests."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import httpx

from tests.support.cluster_faults import RECOVERY_S
from tests.support.cluster_load import load
from tests.support.ray_cluster import Cluster
from tests.support.served_models import EMBEDDER
from tests.support.waiting import wait_for


def test_encoder_scales_to_two_under_load_and_back(cluster: Cluster) -> None:
    wait_for(lambda: len(cluster.replicas("CpuEncoder")) == 1, RECOVERY_S)

    def are_two() -> bool:
        return len(cluster.replicas("CpuEncoder")) == 2

    async def two_have_served() -> None:
        await asyncio.to_thread(wait_for, are_two, RECOVERY_S)
        await asyncio.sleep(3)

    statuses = asyncio.run(load(cluster, clients=24, until=two_have_served()))
    assert set(statuses) == {200}
    wait_for(lambda: len(cluster.replicas("CpuEncoder")) == 1, RECOVERY_S)


def test_encoder_without_requests_ends_and_starts_for_the_next(
    cluster: Cluster, config: dict[str, Any]
) -> None:
    quick = copy.deepcopy(config)
    deployments = {one["name"]: one for one in quick["applications"][0]["deployments"]}
    deployments["GpuEncoder"]["autoscaling_config"] |= {
        "metrics_interval_s": 0.2,
        "look_back_period_s": 1,
        "downscale_delay_s": 1,
        "downscale_to_zero_delay_s": 1,
    }
    cluster.deploy(quick)
    try:
        for text in ("first", "second"):
            options = {"use_gpu": True, "wait_for_model": True, "use_cache": False}
            body = {"inputs": text, "options": options}
            reply = httpx.post(f"{cluster.url}/models/{EMBEDDER}", json=body, timeout=120)
            assert reply.status_code == 200, reply.text
            assert reply.headers["x-compute-type"] == "gpu-fp16"
            wait_for(lambda: cluster.replicas("GpuEncoder") == [], RECOVERY_S)
    finally:
        cluster.settle(config)
