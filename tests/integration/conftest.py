"""What the integration tests share: exported graphs, and the imports of the model builder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.support import forked_programs
from tests.support.shared_exports import SharedExports


def pytest_configure() -> None:
    """Give each worker a core of its own: threads of several workers would wait for each other.

    Models of tests are tiny, and engines and torch start a busy-waiting thread per usable core.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


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


@pytest.fixture(scope="session", autouse=True)
def _forked_model_builder() -> Iterator[None]:
    """Run onnxruntime-genai's model builder without its seconds of imports.

    The demo models of the end-to-end tests are built in a process of their own, as users do.
    """
    with pytest.MonkeyPatch.context() as patch:
        forked = SimpleNamespace(run=forked_programs.run)
        patch.setattr("build_artifacts.decoders.builder.subprocess", forked)
        yield
