"""The command line: `python -m cluster up | check | env | render`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from cluster import check, local, up
from cluster.kuberay import render


class Subcommand(Protocol):
    """A module with these two functions; its docstring's first line is the help text."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; returns the exit status."""


SUBCOMMANDS: Mapping[str, Subcommand] = {
    "up": up,
    "check": check,
    "env": local,
    "render": render,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m cluster")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in SUBCOMMANDS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    arguments = parser.parse_args(argv)
    return SUBCOMMANDS[arguments.command].run(arguments)


if __name__ == "__main__":
    sys.exit(main())
