"""The release that the server tells is the one that the project is packaged as."""

import tomllib
from pathlib import Path

from deployments import __version__


def test_the_release_is_the_projects() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
