from __future__ import annotations

from pathlib import Path

import pytest

from cluster.default_config import CONFIG_NAME, find_config
from tests.support.ordinary_rights import ordinary_rights


def test_config_of_the_working_directory_comes_before_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = find_config(None)
    assert shipped.is_absolute()
    (tmp_path / CONFIG_NAME).touch()
    assert find_config(None) == Path(CONFIG_NAME)
    assert find_config(shipped) == shipped


def test_working_directory_that_may_not_be_entered_has_no_config(
    public_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(public_directory)
    (public_directory / CONFIG_NAME).touch()
    public_directory.chmod(0o600)
    with ordinary_rights():
        assert find_config(None).is_absolute()
