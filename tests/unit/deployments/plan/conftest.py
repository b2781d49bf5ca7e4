from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.plan_stores import NEW, OLD, seal_version


@pytest.fixture
def store(tmp_path: Path) -> Path:
    seal_version(tmp_path, OLD, 1)
    seal_version(tmp_path, NEW, 2)
    return tmp_path
