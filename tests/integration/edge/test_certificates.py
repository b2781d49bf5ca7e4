"""HTTPS of HAProxy, and certificates that are renewed while it serves."""

from __future__ import annotations

import socket
import ssl
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from cluster.edge import supervisor
from cluster.edge.certificate import CertificateFiles
from cluster.edge.supervisor import EdgeSettings
from cluster.probes import check_ready
from deployments.files import write_atomically
from tests.support.certificates import SelfSigned, create_certificate
from tests.support.edge_harness import Backend, EdgeHarness, run_harness
from tests.support.ports import free_port
from tests.support.waiting import wait_for


@pytest.fixture
def files(tmp_path: Path) -> SelfSigned:
    return create_certificate(tmp_path / "files")


@pytest.fixture
def edge(files: SelfSigned, monkeypatch: pytest.MonkeyPatch) -> Iterator[EdgeHarness]:
    monkeypatch.setattr(supervisor, "RENEWAL_S", 0.05)
    settings = EdgeSettings(certificate=CertificateFiles(*files))
    with (
        tempfile.TemporaryDirectory(prefix="edge-") as name,
        run_harness(Path(name), settings) as harness,
    ):
        harness.start_manager()
        harness.route(harness.backend.port)
        yield harness


def get(edge: EdgeHarness, trusted: Path) -> httpx.Response:
    context = ssl.create_default_context(cafile=trusted)
    return httpx.get(f"https://127.0.0.1:{edge.port}/echo", verify=context, timeout=20)


def replace_files(files: SelfSigned, renewed: SelfSigned) -> None:
    for old, new in zip(files, renewed, strict=True):
        old.write_bytes(new.read_bytes())


def test_clients_verify_the_server(edge: EdgeHarness, files: SelfSigned, tmp_path: Path) -> None:
    response = get(edge, files.certificate)
    assert (response.status_code, response.text) == (200, "/echo")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        get(edge, create_certificate(tmp_path / "other").certificate)


def test_the_port_speaks_neither_http_nor_http_2_nor_old_tls(
    edge: EdgeHarness, files: SelfSigned
) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http://127.0.0.1:{edge.port}/echo", timeout=20)
    offering_h2 = ssl.create_default_context(cafile=files.certificate)
    offering_h2.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection(("127.0.0.1", edge.port), 20) as plain,
        offering_h2.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        assert connection.selected_alpn_protocol() == "http/1.1"
        assert connection.version() == "TLSv1.3"


def test_launcher_probes_its_own_port_without_the_name_of_the_host(edge: EdgeHarness) -> None:
    assert check_ready(f"https://127.0.0.1:{edge.port}")() is None


def test_renewed_certificate_is_used_without_a_lost_request(
    edge: EdgeHarness, files: SelfSigned, tmp_path: Path
) -> None:
    renewed = create_certificate(tmp_path / "renewed")
    both = tmp_path / "both.pem"
    both.write_bytes(files.certificate.read_bytes() + renewed.certificate.read_bytes())
    stopping = threading.Event()

    def probe() -> Counter[int]:
        statuses: Counter[int] = Counter()
        while not stopping.is_set():
            statuses[get(edge, both).status_code] += 1
        return statuses

    with ThreadPoolExecutor(1) as pool:
        probing = pool.submit(probe)
        replace_files(files, renewed)
        try:
            wait_for(lambda: "HAProxy serves with the new certificate" in edge.reports, 20)
            edge.wait_for_one()
            assert get(edge, renewed.certificate).status_code == 200
        finally:
            stopping.set()
        assert set(probing.result()) == {200}
    edge.route(edge.backend.port, Backend().port)
    edge.wait_for_one()
    assert get(edge, renewed.certificate).status_code == 200, "so are later routes"


def test_unusable_renewal_keeps_the_certificate(edge: EdgeHarness, files: SelfSigned) -> None:
    original = files.certificate.read_bytes()
    write_atomically(files.certificate, b"not a certificate")
    wait_for(lambda: any("HAProxy keeps its certificate" in each for each in edge.reports), 20)
    trusted = files.certificate.with_name("original.pem")
    trusted.write_bytes(original)
    assert get(edge, trusted).status_code == 200
    edge.kill_haproxies()
    assert get(edge, trusted).status_code == 200
    assert sum("HAProxy keeps its certificate" in each for each in edge.reports) == 1


def test_renewal_knows_that_a_replica_is_back(
    edge: EdgeHarness, files: SelfSigned, tmp_path: Path
) -> None:
    """Ray Serve writes the state of the replicas only when it changes the routes."""
    port = edge.backend.port
    trusted = tmp_path / "trusted.pem"
    renewed = create_certificate(tmp_path / "renewed")
    trusted.write_bytes(files.certificate.read_bytes() + renewed.certificate.read_bytes())
    edge.backend.close()
    wait_for(lambda: get(edge, trusted).status_code == 503)
    edge.route(port, free_port())
    edge.route(port)
    edge.backend = Backend(port)
    wait_for(lambda: get(edge, trusted).status_code == 200)
    replace_files(files, renewed)
    statuses: Counter[int] = Counter()
    while "HAProxy serves with the new certificate" not in edge.reports:
        statuses[get(edge, trusted).status_code] += 1
    for _ in range(20):
        statuses[get(edge, trusted).status_code] += 1
    assert set(statuses) == {200}


def test_certificate_that_haproxy_refuses_leaves_the_former_one(
    edge: EdgeHarness, files: SelfSigned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(files.certificate.read_bytes())
    monkeypatch.setattr(CertificateFiles, "check", lambda *_: None)  # as if Python's OpenSSL agreed
    attempts: list[bytes] = []
    read = CertificateFiles.read
    monkeypatch.setattr(CertificateFiles, "read", lambda it: attempts.append(b"") or read(it))
    write_atomically(files.key, b"not a key")
    wait_for(lambda: any("HAProxy keeps its certificate" in each for each in edge.reports))
    attempts.clear()
    wait_for(lambda: len(attempts) > 2)
    assert get(edge, trusted).status_code == 200
    assert sum("HAProxy keeps its certificate" in each for each in edge.reports) == 1
    edge.kill_haproxies()
    assert get(edge, trusted).status_code == 200
    assert len(list(edge.edge.directory.glob("certificate-*.pem"))) <= 2, "one may be on trial"
