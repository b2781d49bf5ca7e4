from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest

from deployments.config import RayTlsFiles, ray_tls_files
from deployments.transports.channel.pool import ReplicaPool
from deployments.transports.channel.tls import TlsContexts
from tests.support.channels import call, connected_pool, running_replica

OTHER_NODE = "another node"


def create_certificate(directory: Path) -> RayTlsFiles:
    """Create a self-signed certificate. The same file is the CA certificate."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl")
    directory.mkdir()
    files = RayTlsFiles(*(str(directory / name) for name in ("c.pem", "k.pem", "c.pem")))
    subject = ["-subj", "/CN=ray", "-days", "2", "-nodes", "-newkey", "rsa:2048"]
    command = [openssl, "req", "-x509", *subject, "-keyout", files.key, "-out", files.certificate]
    subprocess.run(command, check=True, capture_output=True)
    return files


async def test_tcp_channel_with_certificates(tmp_path: Path) -> None:
    tls = TlsContexts.load(create_certificate(tmp_path / "ours"))
    large = b"echo" + bytes(3_000_000)
    async with (
        running_replica(tls=tls.server) as replica,
        connected_pool(replica, node=OTHER_NODE, tls=tls.client) as pool,
    ):
        assert bytes((await pool.call(call(large))).message) == large


async def test_client_without_a_certificate_of_the_authority_is_refused(tmp_path: Path) -> None:
    tls = TlsContexts.load(create_certificate(tmp_path / "ours"))
    other = TlsContexts.load(create_certificate(tmp_path / "other"))
    async with running_replica(tls=tls.server) as replica:
        for client in (None, other.client):
            pool = ReplicaPool("CpuEncoder", OTHER_NODE, client)
            pool.update({"0": replica.endpoint})
            await asyncio.sleep(0.2)
            assert pool.connected == 0
            assert not replica.server.connections
            pool.close()


def test_files_come_from_the_environment_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    assert ray_tls_files() is None
    assert TlsContexts.load(None) == TlsContexts(None, None)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    for name in ("SERVER_CERT", "SERVER_KEY", "CA_CERT"):
        monkeypatch.setenv(f"RAY_TLS_{name}", f"/{name}")
    assert ray_tls_files() == RayTlsFiles("/SERVER_CERT", "/SERVER_KEY", "/CA_CERT")
