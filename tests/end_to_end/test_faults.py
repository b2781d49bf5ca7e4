"""Requests under load while generators, ingress or Serve's controller are killed or replaced."""

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
    RECOVERY_S,
    RIGHT,
    TIMEOUT_S,
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
from tests.support.ray_cluster import Cluster
from tests.support.waiting import wait_for

CALLED = ("Tokenizer", "CpuEncoder", "CpuGenerator")
UPDATED = ("Ingress", "CpuGenerator")
COLD_START_S = 80  # below `timeout_s` of the config; slow hosts start replicas slowly
LOST = "engine_failed"  # error code of a stream whose generator was lost after the first event
# Outcomes for a client whose request was in flight in a killed ingress.
CUT = ("RemoteProtocolError", "ReadError", "502 ")


def scaled(config: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the config with `count` generators and `count` ingress replicas.

    A request waits up to COLD_START_S for a missing replica. The fixed counts keep the load from
    adding a second tokenizer or encoder.
    """
    return changed(
        config,
        Tokenizer=fixed(1),
        CpuEncoder=fixed(1),
        CpuGenerator=fixed(count),
        Ingress={
            "num_replicas": count,
            "user_config": {"cold_start_wait_s": COLD_START_S},
        },
    )


def fixed(count: int) -> dict[str, Any]:
    bounds = {"min_replicas": count, "max_replicas": count, "downscale_delay_s": 0}
    return {"autoscaling_config": bounds}


def updated(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with another `num_cpus`, so that Serve replaces the replicas."""
    options = {"ray_actor_options": {"num_cpus": 0.21}}
    return changed(config, **{name: options for name in UPDATED})


def is_settled(cluster: Cluster, count: int) -> bool:
    """Return whether `count` generators and `count` ingress replicas run, with all channels."""
    return (
        len(cluster.replicas("Ingress")) == count
        and has_channels(cluster, "CpuGenerator", count, clients=count)
        and all(has_channels(cluster, name, 1, clients=count) for name in CALLED[:2])
    )


def find(cluster: Cluster, names: Iterable[str]) -> set[psutil.Process]:
    return {one for name in names for one in cluster.replicas(name)}


@pytest.fixture(scope="module")
def doubled(cluster: Cluster, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Scale the cluster to two generators and two ingress replicas. Yield the config."""
    pairs = scaled(config, 2)
    cluster.deploy(pairs)
    wait_for(lambda: is_settled(cluster, 2), RECOVERY_S)
    yield pairs
    cluster.settle(scaled(config, 1))
    cluster.settle(config)


def watch(
    cluster: Cluster,
    fault: Callable[[], object],
    is_over: Callable[[], bool] = lambda: True,
    clients: ClientCounts | None = None,
) -> Scene:
    """Cause the fault under load. Return the clients' observations before, during and after it."""
    scene = asyncio.run(FaultLoad(cluster, clients or ClientCounts()).run(fault, is_over))
    print(scene.describe())
    return scene


def require_right(observations: list[ObservedRequest]) -> None:
    assert observations
    assert {one.seen.outcome for one in observations} == {RIGHT}


def require_cut_streams_only(scene: Scene) -> None:
    """Check that requests failed only if they were streams and started before the fault."""
    require_right(scene.of("embedding", "completion"))
    streams = scene.of("stream")
    require_right([one for one in streams if one.started_s > scene.fault_s])
    for one in streams:
        assert one.is_right or one.seen.outcome == LOST


def require_cut_once(scene: Scene, clients: ClientCounts) -> None:
    """Check that failed requests have an outcome of CUT, at most one per client on average."""
    failed = scene.failed()
    assert all(one.seen.outcome.startswith(CUT) for one in failed)
    assert len(failed) <= clients.count


def find_controller(cluster: Cluster) -> psutil.Process:
    (controller,) = cluster.find("ray::ServeController")
    return controller


def test_killed_controller_and_generator_lose_no_request(
    cluster: Cluster, doubled: dict[str, Any]
) -> None:
    """Without a controller, channels still work, and calls of the lost generator are repeated."""
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
    """Clients wait for the suspended generator until the launcher kills it."""
    assert doubled
    (victim, _) = cluster.replicas("CpuGenerator")

    def is_replaced() -> bool:
        return victim not in cluster.replicas("CpuGenerator") and is_settled(cluster, 2)

    require_cut_streams_only(watch(cluster, victim.suspend, is_replaced))


def test_killed_ingress_cuts_only_requests_in_flight(
    cluster: Cluster, doubled: dict[str, Any]
) -> None:
    """A client sees a closed connection or status 502, at most once."""
    assert doubled
    victim = cluster.replicas("Ingress")[0]
    clients = ClientCounts(embeddings=8)
    scene = watch(cluster, victim.kill, clients=clients)
    require_cut_once(scene, clients)
    assert victim not in cluster.replicas("Ingress")
    wait_for(lambda: is_settled(cluster, 2), RECOVERY_S)


def test_stopped_ingress_is_replaced(cluster: Cluster, doubled: dict[str, Any]) -> None:
    """The launcher kills the suspended ingress, so its requests end before the clients' timeout."""
    assert doubled
    victim = cluster.replicas("Ingress")[0]
    clients = ClientCounts()
    scene = watch(
        cluster, victim.suspend, lambda: victim not in cluster.replicas("Ingress"), clients
    )
    require_cut_once(scene, clients)
    wait_for(lambda: is_settled(cluster, 2), RECOVERY_S)


def test_scaling_down_loses_no_request(cluster: Cluster, doubled: dict[str, Any]) -> None:
    """The removed generator runs one of the two long streams, and finishes it before it stops."""
    pair = cluster.replicas("CpuGenerator")
    drained_s = math.inf

    def fault() -> None:
        nonlocal drained_s
        with slowed(pair):
            cluster.deploy(scaled(doubled, 1))
            wait_for(lambda: bool(cluster.draining("CpuGenerator")), RECOVERY_S)
            drained_s = time.monotonic()

    clients = ClientCounts(long_streams=2, long_tokens=6_000)
    scene = watch(cluster, fault, lambda: is_settled(cluster, 1), clients)
    require_right(list(scene.observations))
    assert all(one.ended_s > drained_s for one in scene.of("long stream"))


def test_killed_lone_replicas_lose_no_request(cluster: Cluster, doubled: dict[str, Any]) -> None:
    """Calls wait in Serve's handles until the next replica of each deployment runs."""
    cluster.deploy(scaled(doubled, 1))
    wait_for(lambda: is_settled(cluster, 1), RECOVERY_S)
    victims = find(cluster, CALLED)

    def fault() -> None:
        for victim in victims:
            victim.kill()

    def are_replaced() -> bool:
        return victims.isdisjoint(find(cluster, CALLED)) and is_settled(cluster, 1)

    require_cut_streams_only(watch(cluster, fault, are_replaced))


def test_stopped_lone_replicas_are_replaced(cluster: Cluster, doubled: dict[str, Any]) -> None:
    """Requests wait for the next replica, or get status 503, after which clients can retry."""
    cluster.deploy(scaled(doubled, 1))
    wait_for(lambda: is_settled(cluster, 1), RECOVERY_S)
    victims = find(cluster, CALLED)

    def fault() -> None:
        for victim in victims:
            victim.suspend()

    def are_replaced() -> bool:
        return victims.isdisjoint(find(cluster, CALLED)) and is_settled(cluster, 1)

    scene = watch(cluster, fault, are_replaced)
    outcomes = {one.seen.outcome for one in scene.failed()}
    # A stream that has waited for 30 s has its status, 200, before the error.
    assert outcomes <= {"503 replicas_silent", "replicas_silent", LOST}


def test_rolling_update_loses_no_request_and_finishes_streams(
    cluster: Cluster, doubled: dict[str, Any]
) -> None:
    """The old generator finishes its running stream. New requests go to the new generator.

    The test suspends the old generator, so that only the new one can answer.
    """
    single = scaled(doubled, 1)
    cluster.deploy(single)
    wait_for(lambda: is_settled(cluster, 1), RECOVERY_S)
    old = {name: cluster.replicas(name) for name in UPDATED}

    def are_replaced() -> bool:
        new = {n: [r for r in cluster.replicas(n) if r not in old[n]] for n in UPDATED}
        # The old ingress replica may still be connected while it drains.
        sockets = sum(count_sockets(new["CpuGenerator"]).values())
        return bool(new["Ingress"]) and sockets > 1

    def fault() -> None:
        with slowed(old["CpuGenerator"]):
            cluster.deploy(updated(single))
            wait_for(are_replaced, RECOVERY_S)
            (draining,) = old["CpuGenerator"]
            assert draining.pid in cluster.draining("CpuGenerator"), "a long stream still runs"
        # HAProxy may be replaced too, and would close an idle connection.
        one_each = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(base_url=cluster.url, timeout=TIMEOUT_S, limits=one_each) as http:
            for _ in range(4):
                with stopped([draining]):  # too short for the launcher to kill the process
                    reply = http.post(COMPLETIONS, json=noise(3))
                assert reply.status_code == 200

    clients = ClientCounts(1, 1, 1, long_streams=1)
    scene = watch(cluster, fault, lambda: is_settled(cluster, 1), clients)
    require_right(scene.of("long stream"))
    require_right(list(scene.observations))
