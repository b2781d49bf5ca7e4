from __future__ import annotations

from deployments.terminal.console import format_table

ROWS = (("name", "ms"), ("a", "1.5"), ("longer", "10.25"))


def test_format_table_aligns_numbers_right() -> None:
    assert format_table(ROWS, align_right=True).splitlines() == [
        "name       ms",
        "a         1.5",
        "longer  10.25",
    ]


def test_format_table_aligns_text_left_without_trailing_spaces() -> None:
    assert format_table(ROWS).splitlines() == ["name    ms", "a       1.5", "longer  10.25"]


def test_format_table_accepts_a_header_without_rows() -> None:
    assert format_table(ROWS[:1], align_right=True) == "name  ms"


def test_format_table_aligns_named_columns_and_truncates_nothing() -> None:
    rows = [("kind", "MB", "reason"), ("version", "1.5", "x" * 300)]
    assert format_table(rows, align_right=(1,)).splitlines() == [
        "kind      MB  reason",
        f"version  1.5  {'x' * 300}",
    ]
