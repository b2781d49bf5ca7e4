from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cluster.progress import notify_systemd


def test_service_manager_is_notified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0hundredfold-test")
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", "@hundredfold-test")
        notify_systemd("READY=1")
        assert manager.recv(100) == b"READY=1"
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "absent"))
    notify_systemd("READY=1")
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify_systemd("READY=1")
