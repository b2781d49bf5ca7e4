"""Errors of commands on a store."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from build_artifacts.commands.store_command import store_command
from build_artifacts.errors import BuildError


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), OSError("68096 requested and 1024 written")]
)
def test_full_disk_is_an_error_with_a_hint(error: OSError) -> None:
    """NumPy raises the second one, which has no error number."""

    @store_command
    def run(_: argparse.Namespace) -> int:
        raise error

    with pytest.raises(BuildError, match=r"No space|requested and") as caught:
        run(argparse.Namespace(store=Path("/store")))
    assert caught.value.hint == "check space and permissions of /store; run the command again"


def test_other_errors_of_the_system_are_not_foreseen() -> None:
    @store_command
    def run(_: argparse.Namespace) -> int:
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        run(argparse.Namespace(store=Path("/store")))
