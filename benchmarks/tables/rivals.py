"""Table of README.md: summary of the published comparison with other servers (rivals)."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.common.report import RESULTS, Table, read_table

FILE = RESULTS / "rivals.json"
# (header of the column, workload, number of connections)
COLUMNS = (
    ("1 client", "sentences", 1),
    ("16 clients", "sentences", 16),
    ("64 clients", "sentences", 64),
    ("16 clients, lists of 32", "lists", 16),
)
_NOTHING = "-"


def summarize_published() -> Table:
    """Return requests/s of the servers that answered without failure at all loads of COLUMNS.

    A server that needs longer than the measured window for a response counts as not answering.

    Raises BenchmarkError if the published results lack a table.
    """
    tables = {workload: read_table(FILE, workload) for _, workload, _ in COLUMNS}
    systems = dict.fromkeys(row[0] for table in tables.values() for row in table.rows)
    rows = [
        [system, *(_find_rate(tables[workload], system, at) for _, workload, at in COLUMNS)]
        for system in systems
    ]
    complete = [row for row in rows if _NOTHING not in row]
    return Table("rivals", ("requests/s", *(header for header, _, _ in COLUMNS)), complete)


def _find_rate(table: Table, system: str, connections: int) -> str:
    """Return requests/s; `-` if the server was not measured, failed, or gave no answer in time."""
    rate = next(_cells(table, system, f"requests/s at {connections}"), _NOTHING)
    return _NOTHING if rate == "0.0" or "failed" in rate else rate


def _cells(table: Table, system: str, header: str) -> Iterator[str]:
    if header in table.columns:
        index = list(table.columns).index(header)
        yield from (row[index] for row in table.rows if row[0] == system)
