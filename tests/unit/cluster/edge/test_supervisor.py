"""The edge and the processes that represent HAProxy in Ray Serve, with a fake HAProxy."""

from __future__ import annotations

import asyncio
import select
import socket
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from cluster.edge.haproxy_process import HaproxyFiles, HaproxyProcess
from cluster.edge.supervisor import Edge, EdgeSettings, control_socket
from tests.support.fakes import wait_until
from tests.unit.cluster.edge.test_haproxy_config import SERVE


class FakeHaproxy:
    """A process that serves until it is killed."""

    pid = 1

    def __init__(self, files: HaproxyFiles) -> None:
        self.files = files
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        return 0

    async def is_serving(self, _timeout_s: float) -> bool:
        return True

    def read_cpu_s(self) -> float:
        return 0.0

    def drain(self) -> None:
        self._ended.set()

    kill = drain


class EdgeWithFakes:
    """An edge whose processes start while `may_start` is set. `texts` has their configurations."""

    def __init__(self, directory: Path, listener: socket.socket) -> None:
        self.texts: list[str] = []
        self.starting = 0
        self.may_start = threading.Event()
        self.may_start.set()
        self.directory = directory
        self.reports: list[str] = []
        self._connections: list[socket.socket] = []
        self.edge = Edge(directory, listener, "haproxy", self.reports.append, EdgeSettings())

    async def start_haproxy(self, files: HaproxyFiles, _listener_fd: int) -> FakeHaproxy:
        self.starting += 1
        while not self.may_start.is_set():
            await asyncio.sleep(0.001)
        self.starting -= 1
        self.texts.append(files.text)
        return FakeHaproxy(files)

    def attach(self, replica_port: int) -> socket.socket:
        """Send a configuration with one replica, and return the connection."""
        text = SERVE.replace("30000", str(replica_port))
        config = self.directory / f"serve-{replica_port}.cfg"
        admin_socket = str(self.directory / "serve.sock")
        config.write_text(text.replace("/tmp/haproxy-serve/admin.sock", admin_socket))
        return self.send(bytes(config))

    def send(self, line: bytes) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(10)
        connection.connect(str(control_socket(self.directory)))
        with suppress(ConnectionError):  # the edge may refuse a line before it has all of it
            connection.sendall(line + b"\n")
        self._connections.append(connection)
        return connection

    async def close(self) -> None:
        self.may_start.set()
        for connection in self._connections:
            connection.close()
        await wait_until(lambda: not self.edge.is_attached)
        self.edge.stop()


@pytest.fixture
async def edge(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EdgeWithFakes]:
    # Not `tmp_path`, because paths of Unix sockets have a maximum length.
    with (
        tempfile.TemporaryDirectory(prefix="edge-") as name,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        fake = EdgeWithFakes(Path(name), listener)
        monkeypatch.setattr(HaproxyProcess, "start", fake.start_haproxy)
        fake.edge.start()
        yield fake
        await fake.close()


def is_closed(connection: socket.socket) -> bool:
    readable, _, _ = select.select([connection], [], [], 0)
    return bool(readable) and connection.recv(1) == b""


async def test_last_configuration_is_used_although_it_came_while_another_one_started(
    edge: EdgeWithFakes,
) -> None:
    """Ray Serve gives up a slow change of the routes, and takes the change back."""
    first = edge.attach(30_000)
    await wait_until(lambda: edge.edge.is_attached)
    edge.may_start.clear()
    given_up = edge.attach(30_001)
    await wait_until(lambda: edge.starting == 1)
    last = edge.attach(30_000)
    await asyncio.sleep(0.05)
    edge.may_start.set()
    await wait_until(lambda: is_closed(given_up) and is_closed(first))
    assert not is_closed(last)
    assert "127.0.0.1:30000" in edge.texts[-1]


@pytest.mark.parametrize("line", [b"\xff", b"a" * 100_000, b"a\0b"], ids=["utf-8", "long", "null"])
async def test_line_without_a_path_is_refused(edge: EdgeWithFakes, line: bytes) -> None:
    answer = await asyncio.to_thread(edge.send(line).recv, 1_000)
    assert answer
    assert answer.decode() in edge.reports[0]


async def test_configuration_that_is_not_utf_8_is_refused(edge: EdgeWithFakes) -> None:
    config = edge.directory / "serve.cfg"
    config.write_bytes(b"\xff")
    assert b"utf-8" in await asyncio.to_thread(edge.send(bytes(config)).recv, 1_000)
