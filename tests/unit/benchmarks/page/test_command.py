from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="`playwright` is not installed")

from benchmarks.__main__ import main
from benchmarks.page import command
from benchmarks.page.command import PageResults

RESULTS = PageResults(
    first_paint_ms=(80.0, 90.0),
    file_bytes=200_000,
    files=20,
    foreign_requests=0,
    tokens=200,
    shifts=0,
    minutes=30,
    real_time=False,
    heap_bytes=(2_000_000, 2_100_000),
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[PageResults]:
    """Fake the browser. Return a list whose last item is the result of the fake measurement."""
    results = [RESULTS]
    monkeypatch.setattr(command, "find_browser", lambda: "chromium")
    monkeypatch.setattr(command, "open_browser", nullcontext)
    monkeypatch.setattr(command, "measure", lambda *_: results[-1])
    return results


@pytest.mark.parametrize("shifts", [0, 3])
def test_json_output_is_the_result_file_only(
    measured: list[PageResults], tmp_path: Path, capsys: pytest.CaptureFixture[str], shifts: int
) -> None:
    measured.append(replace(RESULTS, shifts=shifts))
    assert main(["page", "--json", "--out", str(tmp_path)]) == (1 if shifts else 0)
    captured = capsys.readouterr()
    assert json.loads(captured.out)["results"]["shifts"] == shifts
    assert ("elements that moved" in captured.err) == bool(shifts)


def test_limits_of_the_table_are_goals() -> None:
    (*_, size, foreign) = command.evaluate_goals(replace(RESULTS, file_bytes=300_001))
    assert (size.reached, foreign.reached) == (False, True)
    limits = [row[-1] for row in command.build_table(RESULTS).rows]
    assert limits == ["500 ms", "0", "+20 %", "300 kB", "0"]
    assert len(limits) == len(command.evaluate_goals(RESULTS))


@pytest.mark.usefixtures("measured")
def test_text_output_ends_with_the_goals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["page", "--out", str(tmp_path)]) == 0
    goals = command.evaluate_goals(RESULTS)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-len(goals) :] == [goal.sentence for goal in goals]
