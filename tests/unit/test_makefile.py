"""The Makefile's choice of a Python."""

from __future__ import annotations

import subprocess
from collections.abc import Collection
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PYTHONS = ("python3.11", "python3.12", "python3.13")


def print_commands(directory: Path, working: Collection[str]) -> str:
    """Return what `make` would run where only the Pythons `working` run, as commands of pyenv."""
    for name in PYTHONS:
        command = directory / name
        command.write_text(f"#!/bin/sh\nexit {0 if name in working else 127}\n")
        command.chmod(0o755)
    return subprocess.run(
        ["make", "--dry-run", "--always-make", ".venv-clients/ready"],
        cwd=REPOSITORY,
        env={"PATH": f"{directory}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.parametrize(
    ("working", "selected"),
    [
        (PYTHONS, "python3.11"),
        (("python3.12", "python3.13"), "python3.12"),
        (("python3.13",), "python3.13"),
        ((), "python3.11"),
    ],
)
def test_first_python_that_runs_is_selected(
    tmp_path: Path, working: tuple[str, ...], selected: str
) -> None:
    assert print_commands(tmp_path, working).startswith(f"{selected} -m venv .venv-clients\n")
