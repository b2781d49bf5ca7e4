from __future__ import annotations

from build_artifacts.console import columns

ROWS = (("name", "ms"), ("a", "1.5"), ("longer", "10.25"))


def test_figures_line_up_to_the_right_of_their_names() -> None:
    assert columns(ROWS, right=True).splitlines() == [
        "name       ms",
        "a         1.5",
        "longer  10.25",
    ]


def test_words_line_up_to_the_left_without_a_trailing_space() -> None:
    assert columns(ROWS).splitlines() == ["name    ms", "a       1.5", "longer  10.25"]


def test_a_header_alone_is_a_table() -> None:
    assert columns(ROWS[:1], right=True) == "name  ms"
