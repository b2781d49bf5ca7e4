"""Tables of docs/performance.md, generated from the result files in docs/results.

A marker `<!-- results: FILE TABLE -->` precedes each table; `<!-- end of results -->` follows it.
Copy a result file of a benchmark to docs/results to publish its tables.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import orjson

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.report import REPOSITORY, Table

DOCUMENT = REPOSITORY / "docs" / "performance.md"
RESULTS = REPOSITORY / "docs" / "results"
_BLOCK = re.compile(
    r"(?P<start><!-- results: (?P<file>\S+) (?P<table>[^\n]+?) -->\n)"
    r".*?(?P<end><!-- end of results -->)",
    re.DOTALL,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the tables are outdated"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the tables. Raise BenchmarkError for bad markers, or outdated tables in a check."""
    text = DOCUMENT.read_text(encoding="utf-8")
    generated = fill_tables(text, RESULTS)
    if generated == text:
        return 0
    if arguments.check:
        raise BenchmarkError(
            f"the tables of {DOCUMENT.name} differ from the files in {RESULTS.name}",
            hint="run `python -m benchmarks tables`",
        )
    DOCUMENT.write_text(generated, encoding="utf-8")
    return 0


def fill_tables(text: str, results: Path) -> str:
    """Replace the contents of all marked blocks by their tables. Raise BenchmarkError."""

    def fill(block: re.Match[str]) -> str:
        table = read_table(results / block["file"], block["table"])
        return f"{block['start']}{table.markdown}\n{block['end']}"

    return _BLOCK.sub(fill, text)


def read_table(path: Path, name: str) -> Table:
    """Read one table of a result file. Raise BenchmarkError."""
    try:
        tables = orjson.loads(path.read_bytes())["tables"]
        (table,) = [Table(**entry) for entry in tables if entry["name"] == name]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise BenchmarkError(
            f"`{path.name}` has no table `{name}`: {exc!r}",
            hint="name a file of docs/results and one of its tables in the marker",
        ) from exc
    return table
