"""docs/security.md names tests for every threat."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def threats() -> list[tuple[str, list[str]]]:
    """Return the first column of the threat model and the tests of each row."""
    text = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    table = text.partition("| threat | defense | test |\n|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return [(row[0], re.findall(r"`(test_\w+)`", row[2])) for row in rows]


def test_every_threat_has_tests_that_exist() -> None:
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    existing = {name for text in sources for name in re.findall(r"def (test_\w+)\(", text)}
    assert len(threats()) >= 15
    for threat, tests in threats():
        assert tests, f"no test for: {threat}"
        assert set(tests) <= existing, threat
