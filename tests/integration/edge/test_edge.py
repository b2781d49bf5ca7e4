"""HAProxy under Ray Serve's own manager code: crashes, hangs, new routes, ports and sockets."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import httpx
import psutil
import pytest

from cluster.edge.haproxy_process import HaproxyProcess
from cluster.launcher.local_environment import local_environment
from cluster.launcher.local_ports import LocalPorts
from tests.support.edge_harness import EdgeHarness, build_manager, run_harness, set_routes
from tests.support.ports import free_port
from tests.support.waiting import TIMEOUT_S, wait_for


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a short path, because paths of Unix sockets have a maximum length."""
    with tempfile.TemporaryDirectory(prefix="edge-") as name:
        yield Path(name)


@pytest.fixture
def edge(directory: Path) -> Iterator[EdgeHarness]:
    """HAProxy with a manager and one replica."""
    with run_harness(directory) as harness:
        harness.start_manager()
        harness.route(harness.backend.port)
        harness.wait_for_one()
        yield harness


def test_edge_before_routes_answers_503(directory: Path) -> None:
    with run_harness(directory) as harness:
        assert harness.post().status_code == 503
        harness.start_manager()
        reply = harness.post()
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "1"
        assert reply.json()["code"] == "unavailable"


def test_route_that_a_replica_does_not_know_yet_is_retryable(edge: EdgeHarness) -> None:
    reply = edge.post("/unrouted")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["code"] == "unavailable"
    assert edge.post("/unknown").status_code == 404


def test_killed_haproxy_refuses_nobody(edge: EdgeHarness) -> None:
    (first,) = edge.haproxies()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            edge.kill_haproxies()
            # `post` opens a new connection, because those of the killed process are lost.
            replies = list(pool.map(lambda _: edge.post(), range(8)))
            assert [reply.status_code for reply in replies] == [200] * 8
    (current,) = edge.haproxies()
    assert current != first
    assert edge.is_healthy()
    assert "exit code -9" in edge.reports[0]


def test_killed_haproxy_starts_again_although_a_cleaner_removed_its_files(
    edge: EdgeHarness, directory: Path
) -> None:
    for path in (*directory.glob("haproxy-*.cfg"), *directory.glob("*.http")):
        path.unlink()
    edge.kill_haproxies()
    assert edge.post().status_code == 200
    reply = httpx.get(f"{edge.url}/metrics")
    assert (reply.status_code, reply.json()["code"]) == (404, "route_not_found")


def test_stopped_haproxy_is_replaced(edge: EdgeHarness) -> None:
    (stopped,) = edge.haproxies()
    stopped.suspend()
    wait_for(lambda: not stopped.is_running())
    assert edge.post().status_code == 200
    assert edge.is_healthy()
    assert edge.reports[0] == "HAProxy does not answer"


def test_busy_haproxy_that_misses_probes_is_kept(
    edge: EdgeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overloaded HAProxy may miss probes. Its replacement would lose requests in flight."""
    before, missed, is_idle = edge.haproxies(), 0, threading.Event()

    async def time_out(process: HaproxyProcess, timeout_s: float = 1.0) -> bool:
        """Fail after HAProxy has used CPU time; once it is idle, after `timeout_s`."""
        nonlocal missed
        cpu_s = process.read_cpu_s()
        while process.read_cpu_s() == cpu_s and not is_idle.is_set():
            await asyncio.sleep(0.01)
        if is_idle.is_set():
            await asyncio.sleep(timeout_s)
        missed += 1
        return False

    monkeypatch.setattr(HaproxyProcess, "is_serving", time_out)
    with httpx.Client(base_url=edge.url) as client:
        while missed < 7:  # the probes of three checks, and one more
            # HAProxy itself answers, which shows that it is busy and does not hang.
            assert client.get("/metrics").status_code == 404
    assert (edge.haproxies(), edge.reports) == (before, [])
    is_idle.set()
    # Without requests, missed probes count as a hang.
    wait_for(lambda: edge.reports[:1] == ["HAProxy does not answer"])


def test_killed_manager_keeps_the_table(edge: EdgeHarness) -> None:
    before = edge.haproxies()
    edge.replace_manager()
    assert edge.post().status_code == 200
    wait_for(lambda: not edge.is_healthy())  # Ray Serve replaces an unhealthy manager
    edge.start_manager()  # the new manager has no routes yet
    assert edge.post().status_code == 200
    edge.route(edge.backend.port)
    assert edge.is_healthy()
    assert edge.post().status_code == 200
    assert edge.haproxies() == before


def test_new_routes_replace_haproxy(edge: EdgeHarness) -> None:
    with httpx.Client(base_url=edge.url) as client:
        assert client.post("/echo", content=b"text").text == "text"
        before = edge.haproxies()
        edge.route(edge.backend.port, 1)
        assert client.post("/echo", content=b"text").text == "text"
    wait_for(lambda: not any(p.is_running() for p in before))
    assert len(edge.haproxies()) == 1
    assert edge.post().status_code == 200


def test_replaced_haproxy_keeps_its_requests_although_it_does_not_answer_a_probe(
    edge: EdgeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe starts before the replacement and fails while the old process drains."""
    (old,) = edge.haproxies()
    is_serving = HaproxyProcess.is_serving
    waits, is_replaced = threading.Event(), threading.Event()
    probed: list[int] = []

    async def probe(process: HaproxyProcess, timeout_s: float = 1.0) -> bool:
        while process.pid == old.pid and not is_replaced.is_set():
            waits.set()
            await asyncio.sleep(0.01)
        serves = await is_serving(process, timeout_s)
        assert not (process.pid == old.pid and serves)
        probed.append(process.pid)
        return serves

    with socket.create_connection(("127.0.0.1", edge.port)) as peer:
        peer.sendall(b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\ntext")
        wait_for(lambda: "/slow" in edge.backend.seen)
        monkeypatch.setattr(HaproxyProcess, "is_serving", probe)
        wait_for(waits.is_set)
        edge.route(edge.backend.port, 1)
        is_replaced.set()
        wait_for(lambda: probed.count(old.pid) == 2 and probed[-1] != old.pid)
        assert edge.reports == []
        assert old.is_running()
    wait_for(lambda: not old.is_running())


def test_unknown_template_keeps_the_table(
    edge: EdgeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.serve._private.haproxy.HAPROXY_CONFIG_TEMPLATE", "global\n")
    with pytest.raises(RuntimeError, match="has no line"):
        edge.route(edge.backend.port, 1)
    assert edge.post().status_code == 200


def test_client_that_leaves_is_seen_by_the_replica(edge: EdgeHarness) -> None:
    with socket.create_connection(("127.0.0.1", edge.port)) as peer:
        peer.sendall(b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\ntext")
        wait_for(lambda: "/slow" in edge.backend.seen)
    assert edge.backend.left.wait(TIMEOUT_S)


def test_sockets_are_private_and_on_loopback(edge: EdgeHarness, directory: Path) -> None:
    (haproxy,) = edge.haproxies()
    listening = haproxy.net_connections("tcp")
    assert {c.laddr.ip for c in listening if c.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    sockets = [path for path in directory.rglob("*") if path.is_socket()]
    assert len(sockets) >= 3
    assert {oct(path.stat().st_mode & 0o777) for path in sockets} == {"0o600"}


def test_metrics_have_a_port_of_their_own(edge: EdgeHarness) -> None:
    own = f"http://127.0.0.1:{edge.ports.metrics}"
    assert httpx.get(f"{own}/metrics").text == "/metrics"  # the replica answers with the path
    assert "haproxy_process_nbproc" in httpx.get(f"{own}/haproxy").text
    for url in (f"{own}/models", f"{own}/", f"{edge.url}/metrics"):
        reply = httpx.get(url)
        assert (reply.status_code, reply.json()["code"]) == (404, "route_not_found")


@pytest.mark.parametrize(
    "path",
    [
        *("/metrics/", "/metrics//", "/metrics%2f", "/%6detrics", "/%6Detrics/?a=1"),
        *("//metrics", "///metrics//", "/%2fmetrics", "http://x/metrics", "http://x//metrics"),
        "/" * 9_000 + "metrics",
    ],
)
def test_no_spelling_of_the_path_opens_metrics_to_clients(edge: EdgeHarness, path: str) -> None:
    with socket.create_connection(("127.0.0.1", edge.port)) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        assert client.recv(100).startswith(b"HTTP/1.1 404 ")


def test_paths_that_only_begin_like_metrics_reach_the_replica(edge: EdgeHarness) -> None:
    for path in ("/metrics/a", "/metrics%252f", "/metrics%zz", "/ametrics"):
        assert httpx.get(edge.url + path).text == path


async def test_wrapper_without_an_edge_edits_the_configuration(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = local_environment()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    wrapper = environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
    monkeypatch.setattr("ray.serve._private.haproxy.RAY_SERVE_HAPROXY_BINARY_PATH", wrapper)
    port = free_port()
    ports = LocalPorts(*(free_port() for _ in fields(LocalPorts)))
    manager = build_manager(directory, port, ports)

    async def post() -> tuple[int, str]:
        reply = await asyncio.to_thread(httpx.post, f"http://127.0.0.1:{port}/", content=b"text")
        return reply.status_code, reply.json()["code"]

    await manager.start()  # as on a new node, which has no application yet
    try:
        assert await post() == (404, "route_not_found")
        set_routes(manager, 1)
        await manager.reload()
        assert await post() == (503, "unavailable")
        await manager.reload()
    finally:
        await manager.stop()


def test_stopped_edge_closes_the_port(directory: Path) -> None:
    with run_harness(directory) as harness:
        port = harness.port
        processes = harness.haproxies()
    assert not any(process.is_running() for process in processes)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_edge_that_stops_while_haproxy_starts_leaves_no_process(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel kills HAProxy when its parent thread ends, but only after HAProxy has started."""
    setpriv = directory / "setpriv"
    setpriv.write_text(f'#!/bin/sh\nsleep 0.3\nexec {shutil.which("setpriv")} "$@"\n')
    setpriv.chmod(0o700)
    starting = threading.Event()
    wait_until_serving = HaproxyProcess._wait_until_serving

    async def wait_and_tell(process: HaproxyProcess) -> None:
        starting.set()
        await wait_until_serving(process)

    with run_harness(directory) as harness:
        (process,) = harness.haproxies()
        monkeypatch.setattr(HaproxyProcess, "_wait_until_serving", wait_and_tell)
        monkeypatch.setenv("PATH", str(directory), prepend=os.pathsep)
        process.kill()
        assert starting.wait(TIMEOUT_S)
    time.sleep(0.5)
    left = harness.haproxies()
    for process in left:
        process.kill()
    assert left == []
