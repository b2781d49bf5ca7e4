"""The programs in README.md and docs/, run against the server of the tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import PYTHON, ROOT, SHELL, CodeBlock, find_blocks
from tests.support.ray_cluster import Cluster
from tests.support.served_models import link_or_copy

BLOCKS = [block for block in find_blocks() if not block.reason]
ADDRESS = "localhost:8000"
TOLERANCE = 0.05  # for scores, because kernels of other CPUs round differently
MAX_S = 600.0


def named(block: CodeBlock) -> str:
    return block.name


@pytest.fixture
def checkout(tmp_path: Path, store: Path) -> Path:
    """A directory with links to the repository's files, next to a copy of the store.

    Its parent is the home directory of the tested commands.
    """
    directory = tmp_path / "checkout"
    directory.mkdir()
    for entry in ROOT.iterdir():
        (directory / entry.name).symlink_to(entry)
    shutil.copytree(store, tmp_path / "store", copy_function=link_or_copy)
    # Without `fail-with-body`, curl exits with 0 even after an HTTP error.
    (tmp_path / ".curlrc").write_text(f"fail-with-body\nsilent\nshow-error\nmax-time = {MAX_S}\n")
    return directory


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == SHELL], ids=named)
def test_commands_succeed(block: CodeBlock, cluster: Cluster, checkout: Path) -> None:
    address = cluster.url.removeprefix("http://")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.commands.replace(ADDRESS, address)],
        cwd=checkout,
        env={
            **os.environ,
            "HOME": str(checkout.parent),
            "HUNDREDFOLD_STORE": str(checkout.parent / "store"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=MAX_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if block.answers:
        assert_similar(
            [json.loads(line) for line in done.stdout.splitlines()],
            [json.loads(line) for line in block.answers],
        )


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == PYTHON], ids=named)
def test_programs_succeed(block: CodeBlock, cluster: Cluster) -> None:
    address = cluster.url.removeprefix("http://")
    program = compile(block.code.replace(ADDRESS, address), block.name, "exec")
    exec(program, {"__name__": "__main__"})


def assert_similar(actual: Any, shown: Any) -> None:
    """Compare values; numbers may differ by TOLERANCE."""
    if isinstance(shown, float):
        assert actual == pytest.approx(shown, abs=TOLERANCE)
    elif isinstance(shown, list):
        assert len(actual) == len(shown)
        for one, other in zip(actual, shown, strict=True):
            assert_similar(one, other)
    elif isinstance(shown, dict):
        assert actual.keys() == shown.keys()
        for key, value in shown.items():
            assert_similar(actual[key], value)
    else:
        assert actual == shown
