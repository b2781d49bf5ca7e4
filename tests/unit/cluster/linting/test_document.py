"""Tests of YAML documents that record the line of every key and item."""

import pytest

from cluster.linting.document import UnreadableConfig, read_document
from cluster.linting.linter import check_text

TEXT = """\
# a comment
http:
  port: 1

items:
  - name: a
    size: 2
  - {name: b, size: 3}
"""


def test_document_has_the_line_of_every_key_and_item() -> None:
    document = read_document(TEXT)
    assert document.value["items"][1] == {"name": "b", "size": 3}
    assert document.lines[("http",)] == 2
    assert document.lines[("http", "port")] == 3
    assert document.lines[("items", 0)] == 6
    assert document.lines[("items", 0, "size")] == 7
    assert document.lines[("items", 1, "size")] == 8


def test_missing_key_is_reported_at_its_nearest_ancestor() -> None:
    problem = read_document(TEXT).problem(("items", 0, "shape", "depth"), "missing")
    assert (problem.line, problem.path) == (6, "items[0].shape.depth")


def test_duplicate_key_is_reported() -> None:
    document = read_document("a:\n  b: 1\n  b: 2\n")
    assert document.duplicates == (("a", "b"),)
    problems = check_text(
        "applications: [{name: a, import_path: 'shop:app'}]\nhttp_options:\n  port: 1\n  port: 2\n"
    )
    assert [(p.line, p.path) for p in problems] == [(4, "http_options.port")]


def test_syntax_error_has_its_line() -> None:
    with pytest.raises(UnreadableConfig) as caught:
        read_document("a: 1\nb: [1, 2\nc: 3\n")
    assert caught.value.problem.line == 3


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("2024-13-45", "month must be in 1..12"),
        ("!!bool maybe", "'maybe'"),
        ("!!timestamp soon", "invalid value"),
        ("\a", "'\\x07' is not allowed"),
    ],
)
def test_invalid_value_has_its_line(value: str, message: str) -> None:
    (problem,) = check_text(f"a: 1\nb:\n  - c: {value}\n")
    assert problem.line == 3
    assert message in problem.message


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ("{a: ", "}"), ("[", "")])
def test_deep_nesting_has_its_line(opening: str, closing: str) -> None:
    (problem,) = check_text(f"a: 1\nb: {opening * 3_000}{closing * 3_000}\n")
    assert (problem.line, problem.message) == (2, "nested more than 100 levels deep")


def test_aliases_and_recursive_anchors_are_read() -> None:
    assert read_document("a: &x {k: 1}\nb: *x\n").lines[("b", "k")] == 1
    assert read_document("a: &x [1, *x]\n").lines[("a", 1)] == 1
