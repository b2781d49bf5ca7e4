"""Channels between replicas: killed, stopped, removed and replaced replicas under load."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.transports.channel.client import CHECK_S, LOST_S
from tests.support.cluster_faults import changed, count_sockets, has_channels
from tests.support.cluster_load import embed, load
from tests.support.ray_cluster import Cluster, wait_for

PAIRED = ("Tokenizer", "CpuEncoder")


def test_transport_handle_opens_no_socket(cluster: Cluster, config: dict[str, Any]) -> None:
    def has_one_of_each() -> bool:
        return all(has_channels(cluster, name, 1) for name in PAIRED)

    wait_for(has_one_of_each, 60)
    paths = [Path(path) for path in count_sockets(cluster.replicas("CpuEncoder"))]
    assert paths
    assert all(path.parent.stat().st_mode & 0o777 == 0o700 for path in paths)
    handles = copy.deepcopy(config)
    handles["applications"][0]["args"]["transport"] = "handle"

    def uses_handles() -> bool:
        listening = [count_sockets(cluster.replicas(name)) for name in PAIRED]
        return not any(listening) and embed(cluster, "text").status_code == 200

    try:
        cluster.deploy(handles)
        wait_for(uses_handles, 120)
        assert not any(path.parent.exists() for path in paths)
    finally:
        cluster.deploy(config)
    wait_for(has_one_of_each, 120)
    assert embed(cluster, "text").status_code == 200


@pytest.fixture(scope="module")
def paired(cluster: Cluster, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The cluster with two tokenizers and two encoders; its config."""
    two = {"autoscaling_config": {"min_replicas": 2, "max_replicas": 2}}
    pairs = changed(config, **dict.fromkeys(PAIRED, two))
    cluster.deploy(pairs)
    wait_for(lambda: all(has_channels(cluster, name, 2) for name in PAIRED), 90)
    yield pairs
    one = {"autoscaling_config": {"downscale_delay_s": 0}}
    cluster.deploy(changed(config, **dict.fromkeys(PAIRED, one)))
    wait_for(lambda: all(len(cluster.replicas(name)) == 1 for name in PAIRED), 90)
    cluster.deploy(config)


def statuses_during(
    cluster: Cluster, change: Callable[[], None], is_over: Callable[[], bool]
) -> list[int]:
    """Run `change` under load until `is_over` holds; return the statuses."""

    async def scene() -> None:
        await asyncio.sleep(1)
        await asyncio.to_thread(change)
        await asyncio.to_thread(wait_for, is_over, 120)
        await asyncio.sleep(1)

    return asyncio.run(load(cluster, clients=6, until=scene()))


def pids(cluster: Cluster) -> set[int]:
    return {replica.pid for name in PAIRED for replica in cluster.replicas(name)}


@pytest.mark.parametrize("deployment", PAIRED)
def test_killed_replica_loses_no_request(
    cluster: Cluster, paired: dict[str, Any], deployment: str
) -> None:
    assert paired
    (victim, _) = cluster.replicas(deployment)

    def is_replaced() -> bool:
        return victim.pid not in pids(cluster) and has_channels(cluster, deployment, 2)

    assert set(statuses_during(cluster, victim.kill, is_replaced)) == {200}


@pytest.mark.parametrize("deployment", PAIRED)
def test_stopped_replica_loses_no_request(
    cluster: Cluster, paired: dict[str, Any], deployment: str
) -> None:
    assert paired
    (victim, _) = cluster.replicas(deployment)
    stopped_s = 0.0

    def stop() -> None:
        nonlocal stopped_s
        os.kill(victim.pid, signal.SIGSTOP)
        stopped_s = time.monotonic()

    def is_given_up() -> bool:
        return time.monotonic() > stopped_s + LOST_S + CHECK_S

    try:
        statuses = statuses_during(cluster, stop, is_given_up)
    finally:
        victim.send_signal(signal.SIGCONT)
    assert set(statuses) == {200}
    wait_for(lambda: has_channels(cluster, deployment, 2), 60)


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
