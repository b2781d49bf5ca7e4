"""Print the environment for a Ray started by hand, as shell exports."""

from __future__ import annotations

import argparse
import shlex

from cluster.local import local_environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing to choose."""
    del parser


def run(arguments: argparse.Namespace) -> int:
    """One `export NAME=value` a line, for `eval "$(python -m cluster env)"`."""
    del arguments
    for name, value in local_environment().items():
        print(f"export {name}={shlex.quote(value)}")
    return 0
