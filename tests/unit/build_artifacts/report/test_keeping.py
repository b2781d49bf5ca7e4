from __future__ import annotations

import sys
from pathlib import Path

import pytest

from build_artifacts.report.output import read_report, report_path, write_report
from tests.support.report_samples import HOST, OPTIONS, SETTING, report_of

NAMES = ["report.json", "report.md", "report.png", "report.svg"]


def test_a_report_is_kept_in_four_forms_and_nothing_else(tmp_path: Path) -> None:
    told: list[str] = []
    path = write_report(tmp_path, report_of(), told.append)
    assert path == tmp_path / "hosts" / HOST.fingerprint / "report.json"
    assert sorted(p.name for p in path.parent.iterdir()) == NAMES
    assert told == []
    assert read_report(tmp_path, SETTING, told.append) == report_of()
    assert told == []


def test_where_nothing_was_measured_nothing_is_said(tmp_path: Path) -> None:
    told: list[str] = []
    assert read_report(tmp_path, SETTING, told.append) is None
    assert told == []


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"version": "ba9876543210"}, "version"),
        ({"versions": {"torch": "2.1"}}, "versions"),
        ({"options": OPTIONS.model_copy(update={"runs": 51})}, "options"),
        ({"served": {"cpu-2": ("cpu-fp32",)}}, "served"),
        ({"gpu": HOST}, "gpu"),
    ],
)
def test_a_report_of_another_setting_does_not_hold(
    tmp_path: Path, changed: dict[str, object], word: str
) -> None:
    write_report(tmp_path, report_of(), print)
    told: list[str] = []
    assert read_report(tmp_path, SETTING.model_copy(update=changed), told.append) is None
    assert told == [f"measuring again: not the {word} of the stored report"]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"schema_version": 2}'])
def test_a_damaged_report_does_not_hold(tmp_path: Path, damage: bytes) -> None:
    path = write_report(tmp_path, report_of(), print)
    path.write_bytes(damage)
    told: list[str] = []
    assert read_report(tmp_path, SETTING, told.append) is None
    assert len(told) == 1
    assert told[0].startswith(f"measuring again: {path} cannot be used: ")


def test_a_report_with_gaps_does_not_hold(tmp_path: Path) -> None:
    gaps = report_of().model_copy(update={"unmeasured": {"torch": "it was gone"}})
    write_report(tmp_path, gaps, print)
    told: list[str] = []
    assert read_report(tmp_path, SETTING, told.append) is None
    assert told == ["measuring again: the stored report lacks torch"]


def test_without_matplotlib_there_is_everything_but_the_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    told: list[str] = []
    path = write_report(tmp_path, report_of(), told.append)
    assert sorted(p.name for p in path.parent.iterdir()) == NAMES[:2]
    assert len(told) == 1
    assert "`matplotlib` is not installed" in told[0]


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    directory = report_path(tmp_path, HOST).parent
    (directory / "report.md").mkdir(parents=True)  # a rename onto a directory fails
    with pytest.raises(OSError, match=r"report\.md"):
        write_report(tmp_path, report_of(), print)
    assert not [p for p in directory.iterdir() if p.name.startswith(".")]
    assert not (directory / "report.json").exists()
