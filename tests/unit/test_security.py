"""docs/security.md names tests for every threat, and pytest runs each of them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A name of several files needs the file in the table: `tests/unit/x/test_y.py::test_z`.
NAMED_TEST = re.compile(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`")
NEVER_RUNS = re.compile(r"pytest\.mark\.skip\b")


def threats() -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the first column of the threat model, and the file ("") and name of its tests."""
    text = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    table = text.partition("| threat | defense | test |\n|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return [(row[0], NAMED_TEST.findall(row[2])) for row in rows]


def collected_tests(source: str) -> Iterator[str]:
    """Yield the names of the functions and methods that pytest runs, in the order of a file."""
    for node in ast.parse(source).body:
        is_class = isinstance(node, ast.ClassDef) and node.name.startswith("Test")
        for each in node.body if is_class else [node]:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                marks = [ast.unparse(mark) for mark in (*each.decorator_list, *node.decorator_list)]
                if each.name.startswith("test_") and not any(map(NEVER_RUNS.match, marks)):
                    yield each.name


def test_tests_of_a_file_are_those_that_pytest_runs() -> None:
    source = '''
"""def test_text(): ..."""
# def test_comment(): ...
def test_plain():
    def test_inner(): ...
async def test_async(): ...
@pytest.mark.skip(reason="not now")
def test_skipped(): ...
@pytest.mark.skipif(not has_gpu(), reason="no GPU")
def test_conditional(): ...
def helper_of_test_plain(): ...
class TestGroup:
    def test_method(self): ...
class Helper:
    def test_of_no_group(self): ...
'''
    expected = ["test_plain", "test_async", "test_conditional", "test_method"]
    assert list(collected_tests(source)) == expected


def test_every_threat_has_tests_that_run() -> None:
    files: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in collected_tests(path.read_text(encoding="utf-8")):
            files[name].append(path.relative_to(ROOT).as_posix())
    assert len(threats()) >= 15
    for threat, tests in threats():
        assert tests, f"no test for: {threat}"
        for file, name in tests:
            places = [path for path in files[name] if file in ("", path)]
            assert len(places) == 1, f"{name} of `{threat}` is in {places or 'no file'}"
