from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from cluster.progress import StartupProgress, notify_systemd
from cluster.start_errors import StartError


def test_service_manager_is_notified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        name = f"hundredfold-test-{os.getpid()}"
        manager.bind(f"\0{name}")
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        notify_systemd("READY=1")
        assert manager.recv(100) == b"READY=1"
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "absent"))
    notify_systemd("READY=1")
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify_systemd("READY=1")


def test_progress_is_plain_lines_on_stderr_of_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.progress.POLL_S", 0)
    states = iter(["waiting for a", "waiting for a", "waiting for b", None])
    progress = StartupProgress()
    progress.report("serving on " + 200 * "x")
    progress.wait(lambda: next(states), lambda: None, 60)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line[10:] for line in captured.err.splitlines()] == [
        "serving on " + 200 * "x",
        "waiting for a",
        "waiting for b",
    ]
    assert "\033" not in captured.err


def test_progress_goes_on_after_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `2>&1 | head`, the reader of stderr ends early. The start must go on without it."""
    monkeypatch.setattr("cluster.progress.POLL_S", 0)
    reader, writer = os.pipe()
    os.close(reader)
    states = iter(["waiting for a", "waiting for b", None])
    stderr = os.fdopen(writer, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", stderr)
    progress = StartupProgress()
    progress.wait(lambda: next(states), lambda: None, 60)
    progress.report("serving")
    with suppress(BrokenPipeError):  # closing flushes what was not written
        stderr.close()
    assert next(states, "all states were read") == "all states were read"


def test_wait_ends_with_the_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StartError, match="HAProxy ended"):
        StartupProgress().wait(lambda: "waiting", lambda: "HAProxy ended", 60)
    assert "waiting" in capsys.readouterr().err
