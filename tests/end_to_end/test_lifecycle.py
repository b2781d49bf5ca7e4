"""Start, stop and crash of a cluster."""

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


def test_start_after_crash_works_and_stop_leaves_no_process(own_cluster: Cluster) -> None:
    own_cluster.start()
    first = own_cluster.processes()
    assert any("/haproxy" in read_title(p) for p in first)

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
    wait_for(lambda: not port_is_open(own_cluster.port), 5)


def test_occupied_port_error_names_the_process(own_cluster: Cluster) -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", own_cluster.port))
        squatter.listen()
        refused = subprocess.run(
            own_cluster.command(), cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
    assert refused.returncode == 1
    assert f"port {own_cluster.port} on 127.0.0.1 is in use by pid {os.getpid()}" in refused.stderr
    assert "hint: " in refused.stderr


def test_config_with_unknown_key_is_rejected_before_start(
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
