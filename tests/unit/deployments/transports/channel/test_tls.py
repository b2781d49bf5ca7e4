from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from deployments.config import RayTlsFiles, ray_tls_files
from deployments.transports.channel.client_connection import ClientConnection
from deployments.transports.channel.endpoint import Endpoint
from deployments.transports.channel.tls import TlsContexts
from tests.support.certificates import create_certificate
from tests.support.channels import call, connected_pool, running_replica, until
from tests.support.fakes import TIMEOUT_S

OTHER_NODE = "another node"


def ray_files(directory: Path) -> RayTlsFiles:
    """Create a certificate that is its own authority."""
    certificate, key = map(str, create_certificate(directory))
    return RayTlsFiles(certificate, key, certificate)


async def test_tcp_channel_with_certificates(tmp_path: Path) -> None:
    tls = TlsContexts.load(ray_files(tmp_path / "ours"))
    large = b"echo" + bytes(3_000_000)
    async with (
        running_replica(tls=tls.server) as replica,
        connected_pool(replica, node=OTHER_NODE, tls=tls.client) as pool,
    ):
        assert bytes((await pool.call(call(large))).message) == large


async def is_accepted(endpoint: Endpoint, tls: ssl.SSLContext | None) -> bool:
    """Try once to connect by TCP. Return whether both ends finish their handshakes."""

    def build() -> ClientConnection:
        return ClientConnection(endpoint.key, asyncio.Event())

    loop = asyncio.get_running_loop()
    async with asyncio.timeout(TIMEOUT_S):
        try:
            _, connection = await loop.create_connection(
                build, endpoint.host, endpoint.port, ssl=tls
            )
        except OSError:
            return False
        await until(lambda: connection.is_ready or connection.closed.done())
    connection.close()
    return connection.is_ready


@pytest.fixture
def ours(tmp_path: Path) -> RayTlsFiles:
    return ray_files(tmp_path / "ours")


@pytest.fixture
def stranger(tmp_path: Path, ours: RayTlsFiles) -> TlsContexts:
    """Return contexts that trust our authority and present a certificate of another one."""
    other = ray_files(tmp_path / "other")
    return TlsContexts.load(other._replace(authority=ours.authority))


def without_certificate(files: RayTlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(files.authority)
    return context


async def test_server_refuses_clients_without_a_certificate_of_its_authority(
    ours: RayTlsFiles, stranger: TlsContexts
) -> None:
    tls = TlsContexts.load(ours)
    async with running_replica(tls=tls.server) as replica:
        # These clients trust the server, so only the server can refuse them.
        for client in (None, without_certificate(ours), stranger.client):
            assert not await is_accepted(replica.endpoint, client)
            assert not replica.server.connections
        assert await is_accepted(replica.endpoint, tls.client)


async def test_client_refuses_a_server_without_a_certificate_of_its_authority(
    ours: RayTlsFiles, stranger: TlsContexts
) -> None:
    client = TlsContexts.load(ours).client
    async with running_replica(tls=stranger.server) as replica:  # it trusts the client
        assert not await is_accepted(replica.endpoint, client)
        assert not replica.server.connections


def test_files_come_from_the_environment_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    assert ray_tls_files() is None
    assert TlsContexts.load(None) == TlsContexts(None, None)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    for name in ("SERVER_CERT", "SERVER_KEY", "CA_CERT"):
        monkeypatch.setenv(f"RAY_TLS_{name}", f"/{name}")
    assert ray_tls_files() == RayTlsFiles("/SERVER_CERT", "/SERVER_KEY", "/CA_CERT")
