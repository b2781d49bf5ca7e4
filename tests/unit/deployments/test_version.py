"""Places that repeat the version of the package."""

import tomllib
from pathlib import Path

from deployments import __version__
from tests.support import released


def test_version_equals_the_project_version() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__


def test_released_formats_are_those_of_this_version() -> None:
    assert __version__ == released.VERSION, (
        "for a release, set `VERSION`, `WIRE_VERSION` and `SCHEMA` in tests/support/released.py to "
        "those of the code"
    )
