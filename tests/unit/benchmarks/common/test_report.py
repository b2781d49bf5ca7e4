from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.common.report import git_commit, read_host_info


def test_git_commit_marks_a_dirty_tree(tmp_path: Path) -> None:
    assert git_commit(tmp_path / "absent") == "unknown"

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    git("commit", "--allow-empty", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert git_commit(tmp_path) == commit
    (tmp_path / "new").touch()
    assert git_commit(tmp_path) == f"{commit}-dirty"


def test_read_host_info_is_complete() -> None:
    facts = read_host_info()
    assert facts.cpu_model
    assert 1 <= facts.usable_cores <= facts.logical_cores
    assert facts.memory_bytes > 0
    assert "numpy" in facts.packages
