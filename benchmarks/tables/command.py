"""Tables in the documents, generated from the result files in docs/results and from the code.

A marker precedes each table. `<!-- end of results -->` or `<!-- end of reference -->` follows it.

<!-- results: FILE TABLE -->    a table of a file in docs/results; copy a file there to publish it
<!-- reference: NAME -->        a table of benchmarks/tables/reference.py
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.report import REPOSITORY, RESULTS, Table, read_table

_BLOCK = re.compile(
    r"(?P<start><!-- (?P<kind>results|reference): (?P<name>[^\n]+?) -->\n)"
    r".*?(?P<end><!-- end of (?P=kind) -->)",
    re.DOTALL,
)


def list_documents() -> list[Path]:
    """Return README.md, CONTRIBUTING.md and all Markdown files below docs."""
    pages = sorted((REPOSITORY / "docs").rglob("*.md"))
    return [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *pages]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the tables are outdated"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the tables into the documents. With `--check`, only compare and write nothing.

    Raises BenchmarkError if a table is missing or, with `--check`, outdated.
    """
    outdated = []
    for document in list_documents():
        text = document.read_text(encoding="utf-8")
        generated = fill_tables(text, RESULTS)
        if generated != text:
            outdated.append(document.name)
            if not arguments.check:
                document.write_text(generated, encoding="utf-8")
    if outdated and arguments.check:
        raise BenchmarkError(
            f"tables differ from the results or the code: {', '.join(outdated)}",
            hint="run `hundredfold bench tables`",
        )
    return 0


def fill_tables(text: str, results: Path) -> str:
    """Fill each marked block with its table. Raises BenchmarkError if a table is missing."""

    def fill(block: re.Match[str]) -> str:
        table = _build_table(block["kind"], block["name"], results)
        return f"{block['start']}{table.markdown}\n{block['end']}"

    return _BLOCK.sub(fill, text)


def _build_table(kind: str, name: str, results: Path) -> Table:
    if kind == "results":
        file, _, table = name.partition(" ")
        return read_table(results / file, table)
    from benchmarks.tables.reference import REFERENCES  # late, because it imports the server

    if name not in REFERENCES:
        raise BenchmarkError(
            f"the marker `{kind}: {name}` names no table",
            hint=f"tables of the code are {', '.join(REFERENCES)}",
        )
    return REFERENCES[name]()
