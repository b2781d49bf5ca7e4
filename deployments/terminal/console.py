"""Options that many commands share, and their results: tables for people, JSON for programs."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Collection, Sequence

from deployments.config import STORE_VARIABLE, UNNAMED_STORE, expand_home
from deployments.terminal.command_line import OK

_COLUMN_GAP = 2  # spaces
_UNLIMITED_WIDTH = 1_000_000  # characters; a table never wraps or truncates a cell


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, an option of every command that prints a table."""
    parser.add_argument("--json", action="store_true", help="print JSON to stdout")


def add_store_option(parser: argparse.ArgumentParser) -> None:
    """Add `--store`, an option of every command that works on the models of a store.

    Program replaces a missing value, by its `store_finder` or else by the default store.
    """
    parser.add_argument(
        "--store",
        type=expand_home,
        metavar="DIR",
        help="directory of sealed artifacts; default: `args.store` of the Serve config, else "
        f"${STORE_VARIABLE}, else {UNNAMED_STORE}",
    )


def print_json(value: object) -> int:
    """Print a value; return the exit code of success."""
    return print_text(json.dumps(value, indent=1))


def print_text(text: str) -> int:
    """Print a result; return the exit code of success."""
    print(text, flush=True)
    return OK


def format_table(
    rows: Sequence[Sequence[str]], *, align_right: bool | Collection[int] = False
) -> str:
    """Format rows of equal length, header first, without a limit to the width.

    `align_right` has the indices of the right-aligned columns; True means all but the first.
    """
    # Imported here: most commands print no table.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, _COLUMN_GAP, 0, 0))
    columns = range(len(rows[0]))
    right = columns[1:] if align_right is True else align_right or ()
    for column in columns:
        table.add_column(justify="right" if column in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    text = io.StringIO()
    Console(file=text, width=_UNLIMITED_WIDTH, force_terminal=False, legacy_windows=False).print(
        table
    )
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
