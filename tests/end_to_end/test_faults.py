"""Generators, ingress and Serve's controller killed, stopped, replaced and removed under load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from deployments.transports.channel.client import LOST_S
from tests.support.cluster_faults import (
    COMPLETIONS,
    RIGHT,
    Clients,
    FaultLoad,
    Observation,
    Scene,
    changed,
    count_sockets,
    has_channels,
    noise,
)
from tests.support.ray_cluster import Cluster, wait_for

CALLED = ("Tokenizer", "CpuEncoder", "CpuGenerator")
UPDATED = ("Ingress", "CpuGenerator")
LOST = "engine_failed"  # a stream whose generator was lost after the first event
# What a client sees of a request that was in flight in an ingress that was killed.
CUT = ("RemoteProtocolError", "ReadError", "500 ")


def scaled(config: dict[str, Any], count: int) -> dict[str, Any]:
    """The config with so many generators and ingress replicas, which waits for cold starts."""
    fixed = {"min_replicas": count, "max_replicas": count, "downscale_delay_s": 0}
    return changed(
        config,
        CpuGenerator={"autoscaling_config": fixed},
        Ingress={
            "num_replicas": count,
            "user_config": {"cold_start_wait_s": 25},
            # s; a stopped ingress is replaced after three checks.
            "health_check_period_s": 3,
            "health_check_timeout_s": 3,
        },
    )


def updated(config: dict[str, Any]) -> dict[str, Any]:
    """The config with another resource, for which Serve restarts the replicas."""
    options = {"ray_actor_options": {"num_cpus": 0.21}}
    return changed(config, **{name: options for name in UPDATED})


def is_settled(cluster: Cluster, count: int) -> bool:
    """Whether so many generators and ingress replicas run, all connected."""
    return (
        len(cluster.replicas("Ingress")) == count
        and has_channels(cluster, "CpuGenerator", count, clients=count)
        and all(has_channels(cluster, name, 1, clients=count) for name in CALLED[:2])
    )


def find(cluster: Cluster, names: Iterable[str]) -> set[psutil.Process]:
    return {one for name in names for one in cluster.replicas(name)}


@pytest.fixture(scope="module")
def doubled(cluster: Cluster, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The cluster with two generators and two ingress replicas; its config."""
    pairs = scaled(config, 2)
    cluster.deploy(pairs)
    wait_for(lambda: is_settled(cluster, 2), 90)
    yield pairs
    old = find(cluster, UPDATED)
    cluster.deploy(scaled(config, 1))
    wait_for(lambda: is_settled(cluster, 1) and old.isdisjoint(find(cluster, UPDATED)), 90)
    cluster.deploy(config)


def watch(
    cluster: Cluster, seconds: float, fault: Callable[[], object], clients: Clients | None = None
) -> Scene:
    """Cause the fault under load; return what the clients saw."""
    scene = asyncio.run(FaultLoad(cluster, clients or Clients()).run(seconds, fault))
    print(scene.describe())
    return scene


def require_right(observations: list[Observation]) -> None:
    assert observations
    assert {one.seen.outcome for one in observations} == {RIGHT}


def require_cut_streams_only(scene: Scene) -> None:
    """Only streams that had begun in the lost generator may end early, with an error."""
    require_right(scene.of("embedding", "completion"))
    streams = scene.of("stream")
    require_right([one for one in streams if one.started_s > scene.fault_s])
    for one in streams:
        assert one.is_right or one.seen.outcome == LOST


def require_cut_once(scene: Scene, clients: Clients) -> None:
    """Each client may lose the request that was in flight in the lost ingress, and no other."""
    failed = scene.failed()
    assert all(one.seen.outcome.startswith(CUT) for one in failed)
    assert len(failed) <= clients.count


def find_controller(cluster: Cluster) -> psutil.Process:
    (controller,) = cluster.find("ray::ServeController")
    return controller


def test_killed_controller_and_generator_lose_no_request(
    cluster: Cluster, doubled: dict[str, Any]
) -> None:
    """Channels answer, and repeat the calls of the lost generator, while no controller runs."""
    assert doubled
    controller = find_controller(cluster)
    (victim, _) = cluster.replicas("CpuGenerator")
    kept = find(cluster, ("Ingress", *CALLED)) - {victim}

    def fault() -> None:
        controller.kill()
        victim.kill()

    require_cut_streams_only(watch(cluster, 5, fault))
    wait_for(lambda: is_settled(cluster, 2), 90)
    assert find_controller(cluster).pid != controller.pid
    assert kept < find(cluster, ("Ingress", *CALLED))


def test_stopped_generator_loses_no_request(cluster: Cluster, doubled: dict[str, Any]) -> None:
    assert doubled
    (victim, _) = cluster.replicas("CpuGenerator")
    try:
        # Longer than a silent replica is waited for: both streams may run in the stopped one.
        scene = watch(cluster, LOST_S + 3, victim.suspend)
    finally:
        victim.resume()
    require_cut_streams_only(scene)
    wait_for(lambda: is_settled(cluster, 2), 60)


def test_killed_ingress_cuts_only_requests_in_flight(
    cluster: Cluster, doubled: dict[str, Any]
) -> None:
    """A client sees a closed connection or status 500, at most once."""
    assert doubled
    victim = cluster.replicas("Ingress")[0]
    clients = Clients(embeddings=8)
    scene = watch(cluster, 2, victim.kill, clients)
    require_cut_once(scene, clients)
    assert victim not in cluster.replicas("Ingress")
    wait_for(lambda: is_settled(cluster, 2), 60)


def test_stopped_ingress_is_replaced(cluster: Cluster, doubled: dict[str, Any]) -> None:
    """Its requests end when Serve kills it; no client waits for its own timeout."""
    assert doubled
    victim = cluster.replicas("Ingress")[0]
    clients = Clients()
    scene = watch(cluster, 1, victim.suspend, clients)
    require_cut_once(scene, clients)
    wait_for(lambda: is_settled(cluster, 2), 60)
    assert victim not in cluster.replicas("Ingress")


def test_scaling_down_loses_no_request(cluster: Cluster, doubled: dict[str, Any]) -> None:
    def fault() -> None:
        cluster.deploy(scaled(doubled, 1))
        wait_for(lambda: is_settled(cluster, 1), 60)

    scene = watch(cluster, 1, fault, Clients(long_streams=2, long_tokens=3_000))
    require_right(list(scene.observations))


def test_killed_lone_replicas_lose_no_request(cluster: Cluster, doubled: dict[str, Any]) -> None:
    """Calls wait in Serve's handles until the next replica of each deployment runs."""
    cluster.deploy(scaled(doubled, 1))
    wait_for(lambda: is_settled(cluster, 1), 60)
    victims = find(cluster, CALLED)

    def fault() -> None:
        for victim in victims:
            victim.kill()

    require_cut_streams_only(watch(cluster, 3, fault))
    wait_for(lambda: is_settled(cluster, 1), 60)


def test_rolling_update_loses_no_request_and_finishes_streams(
    cluster: Cluster, doubled: dict[str, Any]
) -> None:
    """A running stream ends in the old generator. New requests go to the new one: they are answered
    while the old one is stopped.
    """
    single = scaled(doubled, 1)
    cluster.deploy(single)
    wait_for(lambda: is_settled(cluster, 1), 60)
    old = {name: cluster.replicas(name) for name in UPDATED}

    def are_replaced() -> bool:
        new = {n: [r for r in cluster.replicas(n) if r not in old[n]] for n in UPDATED}
        # The old ingress replica may be connected too, as long as it drains.
        sockets = sum(count_sockets(new["CpuGenerator"]).values())
        return bool(new["Ingress"]) and sockets > 1

    def fault() -> None:
        cluster.deploy(updated(single))
        wait_for(are_replaced, 90)
        draining = [one for one in cluster.replicas("CpuGenerator") if one in old["CpuGenerator"]]
        assert draining, "a long stream still runs"
        for one in draining:
            one.suspend()
        try:
            replies = [httpx.post(cluster.url + COMPLETIONS, json=noise(3)) for _ in range(4)]
        finally:
            for one in draining:
                one.resume()
        assert {reply.status_code for reply in replies} == {200}

    scene = watch(cluster, 1, fault, Clients(1, 1, 1, long_streams=1, long_tokens=18_000))
    require_right(scene.of("long stream"))
    require_right(list(scene.observations))
    wait_for(lambda: is_settled(cluster, 1), 60)
