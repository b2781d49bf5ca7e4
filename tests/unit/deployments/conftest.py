from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deployments.tuning.host import read_host


@pytest.fixture
def fake_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], None]]:
    """Return a function that creates a fake `nvidia-smi` from shell lines, first in PATH."""

    def create(lines: str) -> None:
        executable = tmp_path / "nvidia-smi"
        executable.write_text(f"#!/bin/sh\n{lines}\n")
        executable.chmod(0o755)
        read_host.cache_clear()

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    yield create
    read_host.cache_clear()
