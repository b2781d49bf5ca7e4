"""Names that the scripts of rival servers import from each other exist.

The scripts run in other Python environments, so no linter checks these imports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.rivals import programs

SCRIPTS = sorted(Path(programs.__file__).parent.glob("*.py"))


def find_definitions(script: Path) -> set[str]:
    defined: set[str] = set()
    for node in ast.parse(script.read_text()).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                defined.add(node.name)
            case ast.Assign():
                defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                defined.add(name)
    return defined


def find_imports_of_scripts() -> Iterator[tuple[str, str, str]]:
    """Yield the importing script, the imported script and the imported name."""
    names = {script.stem for script in SCRIPTS}
    for script in SCRIPTS:
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in names:
                yield from ((script.stem, node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize(("script", "imported", "name"), list(find_imports_of_scripts()))
def test_imported_name_exists(script: str, imported: str, name: str) -> None:
    (definer,) = (each for each in SCRIPTS if each.stem == imported)
    assert name in find_definitions(definer)
