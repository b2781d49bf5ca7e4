from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deployments.health import MAX_QUARANTINE_S
from deployments.tuning.host import read_host
from tests.support.fakes import TIMEOUT_S


@pytest.fixture(autouse=True)
def patient_grammar_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse no grammar because the machine is busy."""
    monkeypatch.setattr("deployments.generation.grammar_trials.WAIT_S", 2 * TIMEOUT_S)


@pytest.fixture
def long_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a quarantine outlast the test, also on a slow machine."""
    for module in ("health", "replicas.failed_loads"):
        monkeypatch.setattr(f"deployments.{module}.MIN_QUARANTINE_S", MAX_QUARANTINE_S)


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
