from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import orjson
import pytest

from benchmarks.common.errors import BenchmarkError
from benchmarks.common.report import REPOSITORY, RESULTS
from benchmarks.common.statistics import summarize, summarize_ratios
from benchmarks.neighbor.command import MAX_SLOWDOWN
from benchmarks.tables.command import fill_tables, list_documents
from benchmarks.tables.runs import summarize_runs

BLOCK = "<!-- results: run.json levels -->\n{}<!-- end of results -->\n"


def write_result(directory: Path) -> None:
    table = {"name": "levels", "columns": ["connections", "requests/s"], "rows": [["1", "113"]]}
    (directory / "run.json").write_bytes(orjson.dumps({"tables": [table]}))


@pytest.mark.parametrize("path", list_documents(), ids=lambda path: path.name)
def test_document_has_the_tables_of_the_results_and_of_the_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert fill_tables(text, RESULTS) == text, "run `hundredfold bench tables`"


def test_every_committed_table_is_in_a_document() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in list_documents())
    for path in sorted(RESULTS.glob("*.json")):
        for table in orjson.loads(path.read_bytes())["tables"]:
            assert f"<!-- results: {path.name} {table['name']} -->" in text


# Result files whose commits are not known. Every other result file must name its commit.
WITHOUT_COMMIT = {
    f"{name}.json"
    for name in (
        *("arena", "autoscaling", "bert_large", "cached", "decoders", "engine", "generation"),
        *("graphs", "int8", "report", "scheduling", "squad"),
    )
}


def test_result_files_name_the_commit_that_they_measured() -> None:
    commits = {
        path.name: orjson.loads(path.read_bytes())["run"]["host"].get("commit", "")
        for path in RESULTS.glob("*.json")
    }
    missing = {name for name, it in commits.items() if not re.fullmatch(r"[0-9a-f]{40}.*", it)}
    assert missing == WITHOUT_COMMIT


# Result files of benchmark commands that were published without raw results, before this rule.
WITHOUT_RESULTS = {
    f"{name}.json" for name in ("autoscaling", "cached", "engine", "generation", "graphs", "rivals")
}


def test_result_files_of_benchmark_commands_contain_the_raw_results() -> None:
    contents = {path.name: orjson.loads(path.read_bytes()) for path in RESULTS.glob("*.json")}
    commands = {name: content["run"]["command"] for name, content in contents.items()}
    measured = {
        name for name, it in commands.items() if re.search(r"\bbench |python -m benchmarks", it)
    }
    assert "serving.json" in measured
    missing = {name for name in measured if not contents[name].get("results")}
    assert missing == WITHOUT_RESULTS, "publish the file that the command wrote"


def test_runs_are_listed_with_their_load_and_their_raw_results(tmp_path: Path) -> None:
    runs = {
        "busy": {"benchmark": "toy", "host": {"usable_cores": 2, "load_average": 1.549}},
        "raw": {"benchmark": "toy", "host": {"usable_cores": 2, "load_average": 0.0}},
        "typed": {"host": {}},
    }
    for name, run in runs.items():
        content = {"run": {**run, "started": "2026-11-05T15:48:15+00:00"}, "tables": []}
        content |= {"results": {}} if name == "raw" else {}
        (tmp_path / f"{name}.json").write_bytes(orjson.dumps(content))
    assert [row[1:] for row in summarize_runs(tmp_path).rows] == [
        ["5 November 2026", "2", "1.55", "no"],
        ["5 November 2026", "2", "0.00", "yes"],
        ["5 November 2026", "-", "-", "no, written by hand"],
    ]


def test_goals_of_the_published_neighbor_follow_from_its_raw_results() -> None:
    results = orjson.loads((RESULTS / "neighbor.json").read_bytes())["results"]
    p99 = {
        name: summarize(client["latency_ms"]["p99"]["values"])
        for name, client in results["clients"].items()
    }
    ratio = summarize_ratios(p99["quiet"], p99["quiet, alone"]).median
    assert results["goals"][0]["value"] == pytest.approx(ratio)
    assert results["goals"][0]["reached"] == (ratio <= MAX_SLOWDOWN)


def test_fill_tables_replaces_the_marked_block(tmp_path: Path) -> None:
    write_result(tmp_path)
    filled = fill_tables("before\n" + BLOCK.format("old\n") + "after\n", tmp_path)
    table = "| connections | requests/s |\n| --- | --- |\n| 1 | 113 |\n"
    assert filled == "before\n" + BLOCK.format(table) + "after\n"


@pytest.mark.parametrize("marker", ["absent.json levels", "run.json absent"])
def test_fill_tables_rejects_an_unknown_table(tmp_path: Path, marker: str) -> None:
    write_result(tmp_path)
    text = BLOCK.format("").replace("run.json levels", marker)
    with pytest.raises(BenchmarkError, match="has no table"):
        fill_tables(text, tmp_path)


def test_fill_tables_rejects_an_unknown_table_of_the_code(tmp_path: Path) -> None:
    text = "<!-- reference: absent -->\n<!-- end of reference -->\n"
    with pytest.raises(BenchmarkError, match="names no table"):
        fill_tables(text, tmp_path)


def test_every_table_of_figures_comes_from_a_result_file() -> None:
    text = (REPOSITORY / "docs/performance.md").read_text(encoding="utf-8")
    marked = r"<!-- (results|reference): .*?<!-- end of \1 -->"
    typed = re.sub(marked, "", text, flags=re.DOTALL)
    rows = [line for line in typed.splitlines() if line.startswith("|")]
    headers = [row for row, below in pairwise(rows) if set(below) <= set("|- ")]
    assert headers == [  # these tables contain no measurements
        "| November 2026 | machine | sections |",
        "| rival | serves |",
        "| measurement | options of `hundredfold bench generation` |",
    ]
