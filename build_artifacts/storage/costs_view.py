"""A cost table for people: milliseconds by shape, the winners marked."""

from __future__ import annotations

from build_artifacts.columns import columns
from deployments.tuning.costs import CostTable


def costs_view(table: CostTable) -> str:
    """The table in columns: a row per shape, a column per variant, `*` at what will serve."""
    winners = dict(table.winners)
    rows = [["items x tokens", *(row.variant.name for row in table.rows)]]
    for shape in winners:
        cells = [str(shape)]
        for row in table.rows:
            ms = row.by_shape().get(shape)
            mark = "*" if row.variant == winners[shape] else " "
            cells.append("-" if ms is None else f"{ms:.2f}{mark}")
        rows.append(cells)
    threads = f"{table.threads} thread{'s' if table.threads > 1 else ''} a pass"
    head = f"{table.host.name}, {table.host.cores} cores, {threads}; milliseconds, * serves"
    refused = [f"{name} is not right here: {why}" for name, why in table.refused.items()]
    return "\n".join([head, columns(rows, right=True), *refused])
