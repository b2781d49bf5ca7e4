"""What the integration tests share: exported graphs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.shared_exports import SharedExports


@pytest.fixture(scope="session", autouse=True)
def shared_exports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedExports]:
    """Builds export equal models once; tests of `export` itself call it directly."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # of all workers
    directory = root / "exports"
    directory.mkdir(exist_ok=True)
    shared = SharedExports(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("build_artifacts.search.graphs.export", shared)
        yield shared
