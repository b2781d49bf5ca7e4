from __future__ import annotations

import sys
from pathlib import Path

import pytest

from build_artifacts.report.output import read_report, report_path, write_report
from tests.support.report_samples import HOST, OPTIONS, SETTING, report_of

NAMES = ["report.json", "report.md", "report.png", "report.svg"]


def test_write_report_writes_exactly_four_files(tmp_path: Path) -> None:
    messages: list[str] = []
    path = write_report(tmp_path, report_of(), messages.append)
    assert path == tmp_path / "hosts" / HOST.fingerprint / "report.json"
    assert sorted(p.name for p in path.parent.iterdir()) == NAMES
    assert messages == []
    assert read_report(tmp_path, SETTING, messages.append) == report_of()
    assert messages == []


def test_read_report_without_a_report_is_silent(tmp_path: Path) -> None:
    messages: list[str] = []
    assert read_report(tmp_path, SETTING, messages.append) is None
    assert messages == []


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
def test_report_of_other_setting_is_invalid(
    tmp_path: Path, changed: dict[str, object], word: str
) -> None:
    write_report(tmp_path, report_of(), print)
    messages: list[str] = []
    assert read_report(tmp_path, SETTING.model_copy(update=changed), messages.append) is None
    assert messages == [f"measuring again: not the {word} of the stored report"]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"schema_version": 2}'])
def test_damaged_report_is_invalid(tmp_path: Path, damage: bytes) -> None:
    path = write_report(tmp_path, report_of(), print)
    path.write_bytes(damage)
    messages: list[str] = []
    assert read_report(tmp_path, SETTING, messages.append) is None
    assert len(messages) == 1
    assert messages[0].startswith(f"measuring again: {path} cannot be used: ")


def test_incomplete_report_is_invalid(tmp_path: Path) -> None:
    gaps = report_of().model_copy(update={"unmeasured": {"torch": "it was gone"}})
    write_report(tmp_path, gaps, print)
    messages: list[str] = []
    assert read_report(tmp_path, SETTING, messages.append) is None
    assert messages == ["measuring again: the stored report lacks torch"]


def test_write_report_without_matplotlib_omits_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    messages: list[str] = []
    path = write_report(tmp_path, report_of(), messages.append)
    assert sorted(p.name for p in path.parent.iterdir()) == NAMES[:2]
    assert len(messages) == 1
    assert "`matplotlib` is not installed" in messages[0]


def test_failed_write_leaves_no_files(tmp_path: Path) -> None:
    directory = report_path(tmp_path, HOST).parent
    (directory / "report.md").mkdir(parents=True)  # a rename onto a directory fails
    with pytest.raises(OSError, match=r"report\.md"):
        write_report(tmp_path, report_of(), print)
    assert not [p for p in directory.iterdir() if p.name.startswith(".")]
    assert not (directory / "report.json").exists()
