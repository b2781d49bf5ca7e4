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
    """Puts an `nvidia-smi` of these shell lines first in the path."""

    def place(lines: str) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{lines}\n")
        tool.chmod(0o755)
        read_host.cache_clear()

    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    yield place
    read_host.cache_clear()
