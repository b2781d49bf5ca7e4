"""HAProxy and its manager killed in a running cluster."""

from __future__ import annotations

import threading
import time
from collections import Counter

import httpx
import psutil

from tests.support.ray_cluster import Cluster, wait_for
from tests.support.served_models import EMBEDDER

MANAGER = "ray::HAProxyManager"


class Prober(threading.Thread):
    """Sends one request after the other, each on a connection of its own."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._url = f"{cluster.url}/models/{EMBEDDER}"
        self._stopping = threading.Event()
        self.outcomes: Counter[str] = Counter()
        self.start()

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                reply = httpx.post(self._url, json={"inputs": "one text"}, timeout=20)
                self.outcomes[str(reply.status_code)] += 1
            except httpx.HTTPError as error:
                self.outcomes[type(error).__name__] += 1

    def stop(self) -> Counter[str]:
        self._stopping.set()
        self.join()
        return self.outcomes


def haproxies(cluster: Cluster) -> list[psutil.Process]:
    return [one for one in cluster.processes() if one.name() == "haproxy"]


def test_killed_haproxy_costs_its_own_connections_only(cluster: Cluster) -> None:
    prober = Prober(cluster)
    killed = 3
    for _ in range(killed):
        wait_for(lambda: len(haproxies(cluster)) == 1, 10)
        (victim,) = haproxies(cluster)
        victim.kill()
        victim.wait(5)
        time.sleep(0.5)  # of requests to the next one
    outcomes = prober.stop()
    lost = sum(count for outcome, count in outcomes.items() if outcome != "200")
    assert lost <= killed, outcomes  # the request in flight at each kill
    assert "ConnectError" not in outcomes
    assert "404" not in outcomes


def test_killed_manager_costs_nothing(cluster: Cluster) -> None:
    (manager,) = cluster.find(MANAGER)
    before = haproxies(cluster)
    prober = Prober(cluster)
    manager.kill()
    wait_for(lambda: {p.pid for p in cluster.find(MANAGER)} - {manager.pid} != set(), 60)
    time.sleep(5)  # the new manager receives its routes
    outcomes = prober.stop()
    assert set(outcomes) == {"200"}
    assert haproxies(cluster) == before


def test_killed_ingress_costs_no_short_request(cluster: Cluster) -> None:
    (victim,) = cluster.replicas("Ingress")
    prober = Prober(cluster)
    time.sleep(0.5)  # of requests
    victim.kill()
    wait_for(lambda: {p.pid for p in cluster.replicas("Ingress")} - {victim.pid} != set(), 60)
    time.sleep(3)  # of requests to the next one
    assert set(prober.stop()) == {"200"}
