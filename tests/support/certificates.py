"""Self-signed TLS certificates of 127.0.0.1 and localhost."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest


class SelfSigned(NamedTuple):
    """PEM files. The certificate is its own authority."""

    certificate: Path
    key: Path


def create_certificate(
    directory: Path, *, password: str | None = None, bits: int = 2048
) -> SelfSigned:
    """Create a certificate in a new directory; `password` encrypts its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl")
    directory.mkdir()
    files = SelfSigned(directory / "certificate.pem", directory / "key.pem")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    protection = ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
    output = ["-keyout", str(files.key), "-out", str(files.certificate)]
    command = [openssl, "req", "-x509", *names, *protection, "-newkey", f"rsa:{bits}", *output]
    subprocess.run([*command, "-days", "2"], check=True, capture_output=True)
    return files
