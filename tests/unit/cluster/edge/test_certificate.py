"""Certificates of the edge: which files OpenSSL refuses, and why."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from cluster.edge.certificate import CertificateFiles, UnusableCertificate
from tests.support.certificates import create_certificate


def test_chain_and_key_are_one_content(tmp_path: Path) -> None:
    files = CertificateFiles(*create_certificate(tmp_path / "ours"))
    pem = files.read()
    files.check(pem)
    (tmp_path / "both.pem").write_bytes(pem)
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / "both.pem")


def test_key_may_be_in_the_file_of_the_certificate(tmp_path: Path) -> None:
    ours = create_certificate(tmp_path / "ours")
    joined = tmp_path / "joined.pem"
    joined.write_bytes(ours.key.read_bytes() + ours.certificate.read_bytes())
    CertificateFiles(joined).check(CertificateFiles(joined).read())


def check(files: CertificateFiles) -> None:
    files.check(files.read())


def test_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    ours, other = (create_certificate(tmp_path / name) for name in ("ours", "other"))
    with pytest.raises(UnusableCertificate, match="the private key belongs to another certificate"):
        check(CertificateFiles(ours.certificate, other.key))


def test_encrypted_key_is_refused_without_asking_the_terminal(tmp_path: Path) -> None:
    ours = create_certificate(tmp_path / "ours", password="secret")
    with pytest.raises(UnusableCertificate, match="without a password"):
        check(CertificateFiles(*ours))


def test_weak_key_is_named(tmp_path: Path) -> None:
    ours = create_certificate(tmp_path / "ours", bits=1024)
    with pytest.raises(UnusableCertificate, match=r"too weak \(EE_KEY_TOO_SMALL\)"):
        check(CertificateFiles(*ours))


def test_unusable_files_are_named(tmp_path: Path) -> None:
    ours = create_certificate(tmp_path / "ours")
    with pytest.raises(UnusableCertificate, match=r"certificate\.pem` cannot be used for TLS: it"):
        check(CertificateFiles(ours.certificate))
    with pytest.raises(UnusableCertificate, match=r"missing\.pem`: No such file"):
        check(CertificateFiles(ours.certificate, tmp_path / "missing.pem"))
