"""Starting, stopping and crashing the whole thing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.ray_cluster import REPOSITORY, Cluster, port_is_open, read_title, wait_for


@pytest.fixture
def own_cluster(tmp_path: Path, config: dict[str, Any], store: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, config, store)
    yield cluster
    cluster.end()


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if is_alive(p)]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_a_start_after_a_crash_works_and_a_stop_leaves_nothing(own_cluster: Cluster) -> None:
    own_cluster.start()
    first = own_cluster.processes()
    assert any("/haproxy" in read_title(p) for p in first)

    second = subprocess.run(
        own_cluster.command(), cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert second.returncode == 1
    assert f"already being served by pid {own_cluster.launcher.pid}" in second.stderr

    os.kill(own_cluster.launcher.pid, signal.SIGKILL)
    own_cluster.launcher.wait()

    own_cluster.start()
    assert alive(first) == []
    running = own_cluster.processes()
    assert own_cluster.stop(signal.SIGHUP) == 0
    assert alive(running) == []
    wait_for(lambda: not port_is_open(own_cluster.port), 5)


def test_a_port_that_is_taken_is_an_error_that_names_the_owner(own_cluster: Cluster) -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", own_cluster.port))
        squatter.listen()
        refused = subprocess.run(
            own_cluster.command(), cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
    assert refused.returncode == 1
    assert f"port {own_cluster.port} on 127.0.0.1 is in use by pid {os.getpid()}" in refused.stderr
    assert "hint: " in refused.stderr


def test_a_config_with_a_typing_error_is_refused_before_anything_starts(
    own_cluster: Cluster,
) -> None:
    text = own_cluster.config.read_text().replace("max_ongoing_requests", "max_ongoing_request", 1)
    own_cluster.config.write_text(text)
    refused = subprocess.run(
        own_cluster.command(), cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1
    assert "max_ongoing_request" in refused.stderr
    assert "starting Ray" not in refused.stdout
