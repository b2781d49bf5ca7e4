"""The version in the package equals the version in pyproject.toml."""

import tomllib
from pathlib import Path

from deployments import __version__


def test_version_equals_the_project_version() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
