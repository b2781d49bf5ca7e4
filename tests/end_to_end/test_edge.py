"""Requests while HAProxy, its manager or the ingress is killed, or the client disconnects."""

from __future__ import annotations

import threading
import time
from collections import Counter

import httpx
import psutil
import pytest

from tests.support.ray_cluster import Cluster
from tests.support.served_models import EMBEDDER
from tests.support.waiting import TIMEOUT_S, wait_for

MANAGER = "ray::HAProxyManager"


class Prober(threading.Thread):
    """Thread that sends one request after the other, each over a new connection."""

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


def find_haproxies(cluster: Cluster) -> list[psutil.Process]:
    return [one for one in cluster.processes() if one.name() == "haproxy"]


def find_haproxy(cluster: Cluster) -> psutil.Process:
    """Return the newest HAProxy process. Older ones may still finish their requests."""
    return max(find_haproxies(cluster), key=psutil.Process.create_time)


def test_killed_haproxy_costs_its_own_connections_only(cluster: Cluster) -> None:
    prober = Prober(cluster)
    killed = 3
    for _ in range(killed):
        victim = find_haproxy(cluster)
        victim.kill()
        victim.wait(TIMEOUT_S)
        wait_for(lambda: bool(find_haproxies(cluster)))
        time.sleep(0.5)  # time for requests to the new process
    outcomes = prober.stop()
    lost = sum(count for outcome, count in outcomes.items() if outcome != "200")
    assert lost <= killed, outcomes  # each kill may lose the request in flight
    assert "ConnectError" not in outcomes
    assert "404" not in outcomes


def test_killed_manager_costs_nothing(cluster: Cluster) -> None:
    (manager,) = cluster.find(MANAGER)
    before = find_haproxy(cluster)
    prober = Prober(cluster)
    manager.kill()
    wait_for(lambda: {p.pid for p in cluster.find(MANAGER)} - {manager.pid} != set(), 60)
    time.sleep(5)  # time for the new manager to receive its routes
    outcomes = prober.stop()
    assert set(outcomes) == {"200"}
    assert find_haproxy(cluster) == before


def test_killed_ingress_costs_no_short_request(cluster: Cluster) -> None:
    (victim,) = cluster.replicas("Ingress")
    prober = Prober(cluster)
    time.sleep(0.5)  # time for requests before the kill
    victim.kill()
    wait_for(lambda: {p.pid for p in cluster.replicas("Ingress")} - {victim.pid} != set(), 60)
    time.sleep(3)  # time for requests to the new ingress
    assert set(prober.stop()) == {"200"}


def computed_items(cluster: Cluster) -> float:
    """Return how many texts the encoders have computed, as they last reported."""
    lines = cluster.metrics().splitlines()
    sums = [line for line in lines if line.startswith("hundredfold_batch_items_sum{")]
    return sum(float(line.rpartition(" ")[2]) for line in sums)


def final_items(cluster: Cluster) -> float:
    """Return how many texts the encoders have computed, once the metric no longer changes."""
    previous, total = -1.0, computed_items(cluster)
    while total != previous:
        time.sleep(3)  # longer than the interval at which replicas export metrics
        previous, total = total, computed_items(cluster)
    return total


def test_client_that_leaves_drops_its_queued_texts(cluster: Cluster) -> None:
    texts = [f"{number} " + "a sentence of some length " * 30 for number in range(1_000)]
    body = {"inputs": texts, "options": {"use_cache": False}}
    before = computed_items(cluster)  # may lack a few late texts of other tests
    timeout = httpx.Timeout(TIMEOUT_S, read=1)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{cluster.url}/models/{EMBEDDER}", json=body, timeout=timeout)
    assert final_items(cluster) - before < len(texts)
