"""Channels, the Unix sockets between replicas, while replicas are lost or replaced under load."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster_faults import RECOVERY_S, changed, count_sockets, has_channels
from tests.support.cluster_load import embed, load
from tests.support.ray_cluster import Cluster
from tests.support.served_models import EMBEDDER
from tests.support.waiting import wait_for

PAIRED = ("Tokenizer", "CpuEncoder")


def test_transport_handle_opens_no_socket(cluster: Cluster, config: dict[str, Any]) -> None:
    def has_one_of_each() -> bool:
        return all(has_channels(cluster, name, 1) for name in PAIRED)

    assert embed(cluster, "text").status_code == 200  # the first call opens the channels
    wait_for(has_one_of_each, RECOVERY_S)
    paths = [Path(path) for path in count_sockets(cluster.replicas("CpuEncoder"))]
    assert paths
    assert all(path.parent.stat().st_mode & 0o777 == 0o700 for path in paths)
    handles = copy.deepcopy(config)
    handles["applications"][0]["args"]["transport"] = "handle"

    def uses_handles() -> bool:
        listening = [count_sockets(cluster.replicas(name)) for name in PAIRED]
        response = embed(cluster, "text")
        ids = response.headers.get_list("x-request-id")
        return not any(listening) and response.status_code == 200 and len(ids) == 1

    try:
        cluster.deploy(handles)
        wait_for(uses_handles, RECOVERY_S)
        assert not any(path.parent.exists() for path in paths)
        check_memory_routes(cluster)
    finally:
        cluster.settle(config)
    wait_for(has_one_of_each, RECOVERY_S)
    assert embed(cluster, "text").status_code == 200


def check_memory_routes(cluster: Cluster) -> None:
    """List, load and try to unload models over Serve's deployment handles."""

    def are_listed() -> bool:
        listed = httpx.get(f"{cluster.url}/models/ps", timeout=60).json()
        return {entry["deployment"] for entry in listed} >= {"CpuEncoder", "CpuGenerator"}

    wait_for(are_listed, RECOVERY_S)
    loaded = httpx.post(f"{cluster.url}/models/{EMBEDDER}/load", timeout=60)
    assert [entry["model"] for entry in loaded.json()] == [EMBEDDER], loaded.text
    kept = httpx.post(f"{cluster.url}/models/{EMBEDDER}/unload", timeout=60)
    assert (kept.status_code, kept.json()["field"]) == (400, "model")  # pinned models stay loaded


@pytest.fixture(scope="module")
def paired(cluster: Cluster, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Scale the cluster to two tokenizers and two encoders. Yield the config."""
    two = {"autoscaling_config": {"min_replicas": 2, "max_replicas": 2}}
    pairs = changed(config, **dict.fromkeys(PAIRED, two))
    cluster.deploy(pairs)
    assert embed(cluster, "text").status_code == 200  # the first call opens the channels
    wait_for(lambda: all(has_channels(cluster, name, 2) for name in PAIRED), RECOVERY_S)
    yield pairs
    one = {"autoscaling_config": {"downscale_delay_s": 0}}
    cluster.deploy(changed(config, **dict.fromkeys(PAIRED, one)))
    wait_for(lambda: all(len(cluster.replicas(name)) == 1 for name in PAIRED), RECOVERY_S)
    cluster.settle(config)


def statuses_during(
    cluster: Cluster, change: Callable[[], None], is_over: Callable[[], bool]
) -> list[int]:
    """Apply load, run `change`, and wait until `is_over`. Return the HTTP statuses of the load."""

    async def scene() -> None:
        await asyncio.sleep(1)
        await asyncio.to_thread(change)
        await asyncio.to_thread(wait_for, is_over, RECOVERY_S)
        await asyncio.sleep(1)

    return asyncio.run(load(cluster, clients=6, until=scene()))


def pids(cluster: Cluster) -> set[int]:
    return {replica.pid for name in PAIRED for replica in cluster.replicas(name)}


@pytest.mark.parametrize("fault", ["kill", "suspend"])
@pytest.mark.parametrize("deployment", PAIRED)
def test_lost_replica_loses_no_request(
    cluster: Cluster, paired: dict[str, Any], deployment: str, fault: str
) -> None:
    """The launcher kills a suspended replica. Until then, calls go to the other replica."""
    assert paired
    (victim, _) = cluster.replicas(deployment)

    def is_replaced() -> bool:
        return victim.pid not in pids(cluster) and has_channels(cluster, deployment, 2)

    assert set(statuses_during(cluster, getattr(victim, fault), is_replaced)) == {200}


def test_rolling_update_loses_no_request(cluster: Cluster, paired: dict[str, Any]) -> None:
    before = pids(cluster)
    restarted = {"ray_actor_options": {"num_cpus": 0.1}}
    updated = changed(paired, **dict.fromkeys(PAIRED, restarted))

    def is_updated() -> bool:
        replaced = before.isdisjoint(pids(cluster))
        return replaced and all(has_channels(cluster, name, 2) for name in PAIRED)

    assert set(statuses_during(cluster, lambda: cluster.deploy(updated), is_updated)) == {200}


def test_scaling_down_loses_no_request(cluster: Cluster, paired: dict[str, Any]) -> None:
    one = {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1, "downscale_delay_s": 0}}
    fewer = changed(paired, **dict.fromkeys(PAIRED, one))

    def is_smaller() -> bool:
        return all(has_channels(cluster, name, 1) for name in PAIRED)

    assert set(statuses_during(cluster, lambda: cluster.deploy(fewer), is_smaller)) == {200}
