"""Generators, ingress and Serve's controller killed, stopped, replaced and removed under load."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.support.cluster_faults import (
    COMPLETIONS,
    RIGHT,
    ClientCounts,
    FaultLoad,
    ObservedRequest,
    Scene,
    changed,
    count_sockets,
    has_channels,
    noise,
    slowed,
    stopped,
)
from tests.support.ray_cluster import Cluster, wait_for

CALLED = ("Tokenizer", "CpuEncoder", "CpuGenerator")
UPDATED = ("Ingress", "CpuGenerator")
LOST = "engine_failed"  # a stream whose generator was lost after the first event
# What a client sees of a request that was in flight in an ingress that was killed.
CUT = ("RemoteProtocolError", "ReadError", "502 ")


def scaled(config: dict[str, Any], count: int) -> dict[str, Any]:
    """The config with so many generators and ingress replicas, which waits for cold starts.

    One tokenizer and one encoder: the load of the faults may reach what adds a second.
    """
    return changed(
        config,
        Tokenizer=fixed(1),
        CpuEncoder=fixed(1),
        CpuGenerator=fixed(count),
        Ingress={
            "num_replicas": count,
            "user_config": {"cold_start_wait_s": 25},
        },
    )


def fixed(count: int) -> dict[str, Any]:
    bounds = {"min_replicas": count, "max_replicas": count, "downscale_delay_s": 0}
    return {"autoscaling_config": bounds}


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
    cluster.settle(scaled(config, 1))
    cluster.settle(config)


def watch(
    cluster: Cluster,
    fault: Callable[[], object],
    is_over: Callable[[], bool] = lambda: True,
    clients: ClientCounts | None = None,
) -> Scene:
    """Cause the fault under load; return what the clients saw until it was over, and after."""
    scene = asyncio.run(FaultLoad(cluster, clients or ClientCounts()).run(fault, is_over))
    print(scene.describe())
    return scene


def require_right(observations: list[ObservedRequest]) -> None:
    assert observations
    assert {one.seen.outcome for one in observations} == {RIGHT}


def require_cut_streams_only(scene: Scene) -> None:
    """Only streams that had begun in the lost generator may end early, with an error."""
    require_right(scene.of("embedding", "completion"))
    streams = scene.of("stream")
    require_right([one for one in streams if one.started_s > scene.fault_s])
    for one in streams:
        assert one.is_right or one.seen.outcome == LOST


def require_cut_once(scene: Scene, clients: ClientCounts) -> None:
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

    def are_replaced() -> bool:
        running = find(cluster, CALLED) | set(cluster.find("ray::ServeController"))
        return running.isdisjoint({controller, victim}) and is_settled(cluster, 2)

    require_cut_streams_only(watch(cluster, fault, are_replaced))
    assert find_controller(cluster) != controller
    assert kept < find(cluster, ("Ingress", *CALLED))


def test_stopped_generator_loses_no_request(cluster: Cluster, doubled: dict[str, Any]) -> None:
    """Clients wait for the stopped generator until the launcher kills it."""
    assert doubled
    (victim, _) = cluster.replicas("CpuGenerator")

    def is_replaced() -> bool:
        return victim not in cluster.replicas("CpuGenerator") and is_settled(cluster, 2)

    require_cut_streams_only(watch(cluster, victim.suspend, is_replaced))


def test_killed_ingress_cuts_only_requests_in_flight(
    cluster: Cluster, doubled: dict[str, Any]
) -> None:
    """A client sees a closed connection or status 500, at most once."""
    assert doubled
    victim = cluster.replicas("Ingress")[0]
    clients = ClientCounts(embeddings=8)
    scene = watch(cluster, victim.kill, clients=clients)
    require_cut_once(scene, clients)
    assert victim not in cluster.replicas("Ingress")
    wait_for(lambda: is_settled(cluster, 2), 60)


def test_stopped_ingress_is_replaced(cluster: Cluster, doubled: dict[str, Any]) -> None:
    """Its requests end when Serve kills it; no client waits for its own timeout."""
    assert doubled
    victim = cluster.replicas("Ingress")[0]
    clients = ClientCounts()
    scene = watch(
        cluster, victim.suspend, lambda: victim not in cluster.replicas("Ingress"), clients
    )
    require_cut_once(scene, clients)
    wait_for(lambda: is_settled(cluster, 2), 60)


def test_scaling_down_loses_no_request(cluster: Cluster, doubled: dict[str, Any]) -> None:
    """One of two long streams runs in the generator that ends, and ends before it."""
    pair = cluster.replicas("CpuGenerator")
    drained_s = math.inf

    def fault() -> None:
        nonlocal drained_s
        with slowed(pair):
            cluster.deploy(scaled(doubled, 1))
            wait_for(lambda: bool(cluster.draining("CpuGenerator")), 60)
            drained_s = time.monotonic()

    clients = ClientCounts(long_streams=2, long_tokens=3_000)
    scene = watch(cluster, fault, lambda: is_settled(cluster, 1), clients)
    require_right(list(scene.observations))
    assert all(one.ended_s > drained_s for one in scene.of("long stream"))


def test_killed_lone_replicas_lose_no_request(cluster: Cluster, doubled: dict[str, Any]) -> None:
    """Calls wait in Serve's handles until the next replica of each deployment runs."""
    cluster.deploy(scaled(doubled, 1))
    wait_for(lambda: is_settled(cluster, 1), 60)
    victims = find(cluster, CALLED)

    def fault() -> None:
        for victim in victims:
            victim.kill()

    def are_replaced() -> bool:
        return victims.isdisjoint(find(cluster, CALLED)) and is_settled(cluster, 1)

    require_cut_streams_only(watch(cluster, fault, are_replaced))


def test_stopped_lone_replicas_are_replaced(cluster: Cluster, doubled: dict[str, Any]) -> None:
    """Clients wait for the next replica, or are asked to send the request again."""
    cluster.deploy(scaled(doubled, 1))
    wait_for(lambda: is_settled(cluster, 1), 60)
    victims = find(cluster, CALLED)

    def fault() -> None:
        for victim in victims:
            victim.suspend()

    def are_replaced() -> bool:
        return victims.isdisjoint(find(cluster, CALLED)) and is_settled(cluster, 1)

    scene = watch(cluster, fault, are_replaced)
    assert {one.seen.outcome for one in scene.failed()} <= {"503 replicas_silent", LOST}


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
        with slowed(old["CpuGenerator"]):
            cluster.deploy(updated(single))
            wait_for(are_replaced, 90)
        (draining,) = old["CpuGenerator"]
        assert draining.pid in cluster.draining("CpuGenerator"), "a long stream still runs"
        for _ in range(4):
            with stopped([draining]):  # for less time than the launcher kills it after
                reply = httpx.post(cluster.url + COMPLETIONS, json=noise(3))
            assert reply.status_code == 200

    clients = ClientCounts(1, 1, 1, long_streams=1, long_tokens=15_000)
    scene = watch(cluster, fault, lambda: is_settled(cluster, 1), clients)
    require_right(scene.of("long stream"))
    require_right(list(scene.observations))
