"""Requests while HAProxy, its manager or the ingress is killed, or the client disconnects."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from cluster.edge.haproxy_config import has_routes
from tests.support.cluster_faults import RECOVERY_S
from tests.support.ray_cluster import Cluster
from tests.support.served_models import EMBEDDER
from tests.support.waiting import TIMEOUT_S, wait_for

MANAGER = "ray::HAProxyManager"
ANSWERED_S = 120  # maximum wait for one response


class Prober(threading.Thread):
    """Thread that sends one request after the other, each over a new connection."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._url = f"{cluster.url}/models/{EMBEDDER}"
        self._stopping = threading.Event()
        self.outcomes: Counter[str] = Counter()
        self.ended = 0  # requests
        self.start()

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                body = {"inputs": "one text"}
                reply = httpx.post(self._url, json=body, timeout=ANSWERED_S)
                self.outcomes[str(reply.status_code)] += 1
            except httpx.HTTPError as error:
                self.outcomes[type(error).__name__] += 1
            self.ended += 1

    def wait_for_more(self, requests: int = 5) -> None:
        """Wait until this many further requests have ended, the current one included."""
        enough = self.ended + requests
        wait_for(lambda: self.ended >= enough, RECOVERY_S)

    def stop(self) -> Counter[str]:
        self._stopping.set()
        self.join()
        return self.outcomes


def find_haproxies(cluster: Cluster) -> list[psutil.Process]:
    return cluster.named("haproxy")


def find_haproxy(cluster: Cluster) -> psutil.Process:
    """Return the newest HAProxy process. Older ones may still finish their requests."""
    return max(find_haproxies(cluster), key=psutil.Process.create_time)


def has_routed_since(cluster: Cluster, time_s: float) -> bool:
    """Return whether a manager has configured HAProxy with the routes of the application since.

    Its child `attach.py` takes the file with the routes as HAProxy would, by `-f`.
    """
    managers = {manager.pid for manager in cluster.find(MANAGER)}
    for process in cluster.processes():
        with suppress(psutil.Error, OSError):  # the process has ended, or writes the file now
            if process.ppid() in managers and "-f" in (words := process.cmdline()):
                config = Path(words[words.index("-f") + 1])
                if config.stat().st_mtime > time_s and has_routes(config.read_text()):
                    return True
    return False


def test_killed_haproxy_costs_its_own_connections_only(cluster: Cluster) -> None:
    prober = Prober(cluster)
    killed = 3
    for _ in range(killed):
        victim = find_haproxy(cluster)
        victim.kill()
        victim.wait(TIMEOUT_S)
        wait_for(lambda: bool(find_haproxies(cluster)))
        prober.wait_for_more()  # some go to the new process
    outcomes = prober.stop()
    lost = sum(count for outcome, count in outcomes.items() if outcome != "200")
    assert lost <= killed, outcomes  # each kill may lose the request in flight
    assert "ConnectError" not in outcomes
    assert "404" not in outcomes


def test_killed_manager_costs_nothing(cluster: Cluster) -> None:
    (manager,) = cluster.find(MANAGER)
    before = find_haproxy(cluster)
    prober = Prober(cluster)
    prober.wait_for_more()
    killed_s = time.time()
    manager.kill()
    wait_for(lambda: has_routed_since(cluster, killed_s), RECOVERY_S)
    prober.wait_for_more()
    outcomes = prober.stop()
    assert set(outcomes) == {"200"}
    assert find_haproxy(cluster) == before


def test_killed_ingress_costs_no_short_request(cluster: Cluster) -> None:
    (victim,) = cluster.replicas("Ingress")
    prober = Prober(cluster)
    prober.wait_for_more()
    victim.kill()
    wait_for(
        lambda: {p.pid for p in cluster.replicas("Ingress")} - {victim.pid} != set(), RECOVERY_S
    )
    prober.wait_for_more()  # there is no other ingress, so the new one answers
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
