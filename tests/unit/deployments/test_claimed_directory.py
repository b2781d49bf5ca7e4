"""Directories that a process locks while it uses them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.claimed_directory import claim_directory, remove_unused


def test_directory_in_use_is_neither_claimed_nor_removed(tmp_path: Path) -> None:
    path = tmp_path / "used"
    lock = claim_directory(path)
    assert lock is not None
    (path / "socket").touch()
    assert claim_directory(path) is None
    remove_unused(path)
    assert (path / "socket").exists()
    os.close(lock)


def test_directory_of_an_ended_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "left"
    program = (
        "import os, sys; from pathlib import Path\n"
        "from deployments.claimed_directory import claim_directory\n"
        "claim_directory(Path(sys.argv[1])); Path(sys.argv[1], 'socket').touch(); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert (path / "socket").exists()
    lock = claim_directory(path)
    assert lock is not None
    assert list(path.iterdir()) == []
    assert path.stat().st_mode & 0o777 == 0o700
    os.close(lock)


def test_link_is_not_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.mkdir()
    link.symlink_to(target)
    remove_unused(link)
    assert target.exists()
    assert claim_directory(link) is None


def test_missing_parent_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        claim_directory(tmp_path / "missing" / "path")
