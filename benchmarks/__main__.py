"""The command line: `python -m benchmarks NAME`; the names are those of SUBCOMMANDS."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from benchmarks.engine import command as engine
from benchmarks.generation import command as generation
from benchmarks.graphs import command as graphs
from benchmarks.graphs import tuning
from benchmarks.hostile import command as hostile
from benchmarks.serving import command as serving
from benchmarks.serving import quality
from deployments.errors import ServeError


class Subcommand(Protocol):
    """A module with these two functions; its docstring's first line is the help text."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""

    def run(self, arguments: argparse.Namespace, command: str) -> int:
        """Do it; returns the exit status. `command` is the line that started it, for the record."""


SUBCOMMANDS: Mapping[str, Subcommand] = {
    "serving": serving,
    "engine": engine,
    "quality": quality,
    "graphs": graphs,
    "tuning": tuning,
    "hostile": hostile,
    "generation": generation,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand: 0 when it measured, 1 when it could not or an answer was wrong."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in SUBCOMMANDS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        module.add_arguments(commands.add_parser(name, help=summary, description=summary))
    arguments = parser.parse_args(given)
    command = shlex.join(["python", "-m", "benchmarks", *given])
    try:
        return SUBCOMMANDS[arguments.command].run(arguments, command)
    except ServeError as exc:
        print(f"error: {exc.message}", file=sys.stderr)
        if hint := getattr(exc, "hint", ""):
            print(f"\nhint: {hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
