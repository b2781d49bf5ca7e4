"""Killed processes: helpers of Ray, which restart alone, core processes, and the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

import httpx
import psutil
import pytest

from benchmarks.servers.process_kinds import read_command
from tests.support.artifacts import EMBEDDER
from tests.support.cluster_faults import RECOVERY_S
from tests.support.ports import port_is_open
from tests.support.ray_cluster import REPOSITORY, Cluster
from tests.support.waiting import TIMEOUT_S, wait_for

REPLICA = "ray::ServeReplica"
AGAIN = "serving again after"


def find(cluster: Cluster, words: str) -> psutil.Process:
    """Return the only process with these words in its command line.

    Skip its children: a child has the command line of its parent until it runs its own program.
    """
    matches = [one for one in cluster.processes() if words in read_command(one)]
    skipped = {None, *(one.pid for one in matches)}
    (found,) = [one for one in matches if read_parent(one) not in skipped]
    return found


def read_parent(process: psutil.Process) -> int | None:
    """Return the pid of the parent; None if the process has ended."""
    try:
        return int(process.ppid())
    except psutil.Error:
        return None


def ask(cluster: Cluster) -> httpx.Response:
    body = {"inputs": "a text", "options": {"use_cache": False}}
    return httpx.post(f"{cluster.url}/models/{EMBEDDER}", json=body, timeout=120)


def restarts(cluster: Cluster) -> int:
    return cluster.said().count(AGAIN)


def test_unneeded_processes_do_not_run(own_cluster: Cluster) -> None:
    titles = "\n".join(read_command(one) for one in own_cluster.processes())
    for unneeded in ("log_monitor.py", "autoscaler/_private/monitor.py", "ray.util.client.server"):
        assert unneeded not in titles


def test_killed_dashboard_starts_again_alone(own_cluster: Cluster) -> None:
    replicas = own_cluster.find(REPLICA)
    dashboard = find(own_cluster, "dashboard/dashboard.py")
    port = int(own_cluster.dashboard().rpartition(":")[2])
    dashboard.kill()
    dashboard.wait(TIMEOUT_S)
    assert ask(own_cluster).status_code == 200
    wait_for(lambda: port_is_open(port), RECOVERY_S)
    assert find(own_cluster, "dashboard/dashboard.py") != dashboard
    assert own_cluster.find(REPLICA) == replicas
    assert restarts(own_cluster) == 0


def test_killed_driver_starts_again_alone(own_cluster: Cluster) -> None:
    replicas = own_cluster.find(REPLICA)
    find(own_cluster, "serve run").kill()
    assert ask(own_cluster).status_code == 200
    wait_for(lambda: restarts(own_cluster) == 1, RECOVERY_S)
    assert ask(own_cluster).status_code == 200
    assert own_cluster.find(REPLICA) == replicas


@pytest.mark.parametrize("fault", [psutil.Process.kill, psutil.Process.suspend])
@pytest.mark.parametrize("victim", ["gcs/gcs_server", "raylet/raylet"])
def test_lost_core_starts_everything_again(
    own_cluster: Cluster, victim: str, fault: Callable[[psutil.Process], None]
) -> None:
    before = restarts(own_cluster)
    lost: list[httpx.HTTPError] = []
    fault(find(own_cluster, victim))

    def is_restarted() -> bool:
        try:
            reply = ask(own_cluster)
        except httpx.HTTPError as error:
            lost.append(error)
        else:
            assert reply.status_code in (200, 502, 503), reply.text
            assert reply.status_code == 200 or reply.headers["retry-after"]
        return restarts(own_cluster) > before

    wait_for(is_restarted, RECOVERY_S)
    assert ask(own_cluster).status_code == 200
    # Only a request in flight may be lost. The port stays open, so no connection is refused.
    assert [type(error) for error in lost] in ([], [httpx.RemoteProtocolError])
    assert own_cluster.launcher.poll() is None


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if is_alive(p)]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_start_after_crash_works_and_stop_leaves_no_process(own_cluster: Cluster) -> None:
    first = own_cluster.processes()
    assert any("/haproxy" in read_command(p) for p in first)

    second = subprocess.run(
        own_cluster.command(), cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert second.returncode == 1
    assert f"pid {own_cluster.launcher.pid} already serves from this directory" in second.stderr

    os.kill(own_cluster.launcher.pid, signal.SIGKILL)
    own_cluster.launcher.wait()

    own_cluster.start()
    assert alive(first) == []
    running = own_cluster.processes()
    assert own_cluster.stop(signal.SIGHUP) == 0
    assert alive(running) == []
    wait_for(lambda: not port_is_open(own_cluster.port))
