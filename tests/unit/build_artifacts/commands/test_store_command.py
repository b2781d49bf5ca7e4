"""Errors of commands on a store."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from build_artifacts.commands.store_command import store_command
from build_artifacts.errors import BuildError


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        OSError("68096 requested and 1024 written"),
        Exception("No space left on device (os error 28)"),
    ],
)
def test_full_disk_is_an_error_with_a_hint(error: Exception) -> None:
    """NumPy raises the second one, which has no error number, tokenizers the third one."""

    @store_command
    def run(_: argparse.Namespace) -> int:
        raise error

    with pytest.raises(BuildError, match=r"No space|requested and") as caught:
        run(argparse.Namespace(store=Path("/store")))
    assert caught.value.hint == "check space and permissions of /store; run the command again"


def test_file_in_place_of_a_directory_is_an_error_with_a_hint(tmp_path: Path) -> None:
    @store_command
    def run(_: argparse.Namespace) -> int:
        (tmp_path / "hosts" / "abc").mkdir(parents=True, exist_ok=True)
        return 0

    (tmp_path / "hosts").write_text("a file")
    with pytest.raises(BuildError, match=r"Not a directory: .*hosts/abc") as caught:
        run(argparse.Namespace(store=tmp_path))
    assert "in place of a directory" in caught.value.hint


def test_other_errors_of_the_system_are_not_foreseen() -> None:
    @store_command
    def run(_: argparse.Namespace) -> int:
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        run(argparse.Namespace(store=Path("/store")))
