"""Certificates of the edge: what OpenSSL refuses, and what a renewal changes."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

import pytest

from cluster.edge.certificate import Certificate, CertificateFiles, UnusableCertificate
from tests.support.certificates import create_certificate


def test_haproxy_gets_chain_and_key_in_one_private_file(tmp_path: Path) -> None:
    ours = create_certificate(tmp_path / "ours")
    certificate = Certificate(CertificateFiles(*ours), tmp_path)
    assert certificate.renew()
    certificate.write()
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate.path)
    assert stat.S_IMODE(certificate.path.stat().st_mode) == 0o600


def test_key_may_be_in_the_file_of_the_certificate(tmp_path: Path) -> None:
    ours = create_certificate(tmp_path / "ours")
    joined = tmp_path / "joined.pem"
    joined.write_bytes(ours.key.read_bytes() + ours.certificate.read_bytes())
    assert Certificate(CertificateFiles(joined), tmp_path).renew()


def test_only_changed_files_are_new(tmp_path: Path) -> None:
    ours = create_certificate(tmp_path / "ours")
    certificate = Certificate(CertificateFiles(*ours), tmp_path)
    assert certificate.renew()
    assert not certificate.renew()
    for path, renewed in zip(ours, create_certificate(tmp_path / "renewed"), strict=True):
        renewed.replace(path)
    assert certificate.renew()


def test_renewal_of_one_file_keeps_the_certificate_until_the_other_one_follows(
    tmp_path: Path,
) -> None:
    ours, renewed = (create_certificate(tmp_path / name) for name in ("ours", "renewed"))
    certificate = Certificate(CertificateFiles(*ours), tmp_path)
    certificate.renew()
    certificate.write()
    before = certificate.path.read_bytes()
    renewed.certificate.replace(ours.certificate)
    with pytest.raises(UnusableCertificate, match="the private key belongs to another certificate"):
        certificate.renew()
    certificate.write()
    assert certificate.path.read_bytes() == before
    renewed.key.replace(ours.key)
    assert certificate.renew()


def test_encrypted_key_is_refused_without_asking_the_terminal(tmp_path: Path) -> None:
    ours = create_certificate(tmp_path / "ours", password="secret")
    with pytest.raises(UnusableCertificate, match="without a password"):
        CertificateFiles(*ours).read()


def test_unusable_files_are_named(tmp_path: Path) -> None:
    ours = create_certificate(tmp_path / "ours")
    with pytest.raises(UnusableCertificate, match=r"certificate\.pem` cannot be used for TLS: it"):
        CertificateFiles(ours.certificate).read()
    with pytest.raises(UnusableCertificate, match=r"missing\.pem`: No such file"):
        CertificateFiles(ours.certificate, tmp_path / "missing.pem").read()
