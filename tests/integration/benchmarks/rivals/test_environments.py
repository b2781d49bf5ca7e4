from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.rivals.environments import (
    current_environment,
    list_packages,
    open_environment,
)


def test_open_environment_installs_once_per_list(tmp_path: Path) -> None:
    lists = tmp_path / "lists"
    lists.mkdir()
    (lists / "empty.txt").write_text("# nothing\n")
    first = open_environment("empty", tmp_path, lists)
    assert first.python.is_file()
    assert "pip" in first.packages
    assert "numpy" not in first.packages
    marker = first.python.parent / "untouched"
    marker.touch()
    assert open_environment("empty", tmp_path, lists) == first
    assert marker.exists()
    (lists / "empty.txt").write_text("# changed\n")
    assert open_environment("empty", tmp_path, lists).python != first.python


def test_open_environment_installs_again_without_interpreter(tmp_path: Path) -> None:
    lists = tmp_path / "lists"
    lists.mkdir()
    (lists / "empty.txt").write_text("# nothing\n")
    first = open_environment("empty", tmp_path, lists)
    first.python.unlink()
    first.python.symlink_to(tmp_path / "removed" / "python")
    assert open_environment("empty", tmp_path, lists) == first


def test_open_environment_states_why_pip_failed(tmp_path: Path) -> None:
    lists = tmp_path / "lists"
    lists.mkdir()
    (lists / "broken.txt").write_text(f"missing @ file://{tmp_path}/missing.whl\n")
    with pytest.raises(BenchmarkError, match=r"pip cannot install broken\.txt: .*missing\.whl"):
        open_environment("broken", tmp_path, lists)
    # Without the file `complete`, the next run installs the environment again.
    assert not list(tmp_path.glob("broken-*/complete"))


def test_list_packages_without_pip_states_the_error(tmp_path: Path) -> None:
    python = tmp_path / "python"
    with pytest.raises(BenchmarkError, match=f"cannot run `{python}`: No such file"):
        list_packages(python)
    python.write_text("#!/bin/sh\necho 'Error: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(BenchmarkError, match=r"cannot list .*: Error: No module named pip"):
        list_packages(python)


def test_current_environment_is_that_of_this_process() -> None:
    environment = current_environment()
    assert environment.python == Path(sys.executable)
    assert "numpy" in environment.packages
