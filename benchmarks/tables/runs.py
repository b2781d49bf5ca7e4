"""Table of docs/performance.md: conditions of the published runs, and what their files contain."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import orjson

from benchmarks.common.report import RESULTS, Table

COLUMNS = ("file", "day", "cores", "load average at the start", "raw results")


def summarize_runs(results: Path = RESULTS) -> Table:
    """Return one row per result file. A load average above half of the cores is a busy machine."""
    rows = [
        _summarize_run(path.name, orjson.loads(path.read_bytes()))
        for path in sorted(results.glob("*.json"))
    ]
    return Table("runs", COLUMNS, rows)


def _summarize_run(name: str, content: dict[str, Any]) -> list[str]:
    run, host = content["run"], content["run"]["host"]
    load = host.get("load_average")
    without_raw = "no" if "benchmark" in run else "no, written by hand"
    return [
        f"[{name}](results/{name})",
        f"{date.fromisoformat(run['started'][:10]):%-d %B %Y}",
        str(host.get("usable_cores", "-")),
        "-" if load is None else f"{load:.2f}",
        "yes" if "results" in content else without_raw,
    ]
