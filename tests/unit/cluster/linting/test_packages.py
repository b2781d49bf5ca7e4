"""The linter refuses settings whose packages this environment lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cluster.linting.linter import check_file, check_text
from deployments.host.machine import advise_install
from deployments.ingress.http import tracing
from tests.support.checked_configs import INGRESS, create_config, to_dotted_path

TRACING = f"{INGRESS}.user_config.tracing.enabled"


def test_traces_need_their_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(create_config({TRACING: True})))
    assert check_file(config) == []
    monkeypatch.setattr(tracing, "PACKAGES", ("no-such-package",))
    (problem,) = check_file(config)
    assert to_dotted_path(problem.path) == TRACING
    assert "no-such-package" in problem.message
    assert advise_install("tracing") in problem.message
    assert check_text(config.read_text()) == []  # the pods of `hundredfold render` have others
    config.write_text(yaml.safe_dump(create_config({})))
    assert check_file(config) == []
