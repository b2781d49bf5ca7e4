from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.http import ServerAddress
from benchmarks.overload.command import read_memory_mib
from benchmarks.servers.local_server import find_launcher
from benchmarks.servers.process_kinds import find_members
from tests.support.ports import free_port
from tests.support.waiting import wait_for

# A launcher in a session of its own, whose child listens on a port.
LISTEN = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1])))"
LAUNCH = """
import subprocess, sys
title = "ray::ServeReplica:hundredfold:Ingress"
subprocess.run([title, "-c", sys.argv[1] + "; time.sleep(60)", sys.argv[2]],
               executable=sys.executable, process_group=0)
"""


@pytest.fixture
def server() -> Iterator[tuple[ServerAddress, subprocess.Popen[bytes]]]:
    port = free_port()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, LISTEN, str(port)], start_new_session=True
    )
    try:
        yield ServerAddress("127.0.0.1", port), launcher
    finally:
        members = list(find_members(launcher.pid))
        launcher.kill()
        launcher.wait()
        for member in members:
            member.kill()


def has_listener(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_launcher_leads_the_session_that_owns_the_port(
    server: tuple[ServerAddress, subprocess.Popen[bytes]],
) -> None:
    address, launcher = server
    wait_for(lambda: has_listener(address.port))
    assert find_launcher(address) == launcher.pid
    (replica,) = find_members(launcher.pid)
    expected = psutil.Process(replica.pid).memory_full_info().uss / (1 << 20)
    assert read_memory_mib(launcher.pid) == pytest.approx(expected, rel=0.2)
    assert read_memory_mib(os.getpid()) == 0, "replicas of other sessions are not counted"


def test_listener_without_a_server_is_no_launcher() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(BenchmarkError, match="no visible process of a server listens"):
            find_launcher(ServerAddress("127.0.0.1", port))


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "::1"])
def test_names_and_addresses_of_this_host_are_accepted(host: str) -> None:
    with pytest.raises(BenchmarkError, match="no visible process"):
        find_launcher(ServerAddress(host, free_port()))


def test_servers_of_other_hosts_and_closed_ports_are_rejected() -> None:
    for host in ("192.0.2.1", "2001:db8::1"):
        with pytest.raises(BenchmarkError, match="is not this host"):
            find_launcher(ServerAddress(host, 8000))
    with pytest.raises(BenchmarkError, match="no visible process of a server listens"):
        find_launcher(ServerAddress("127.0.0.1", free_port()))
