"""Shared state that makes integration tests faster: exported graphs, imports, CPU affinity."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import forked_programs
from tests.support.shared_exports import KEPT_EXPORTS, SharedExports
from tests.support.source_digests import digest_exporter

# Timeout of a test in seconds. Some tests build models for 200 s on a busy host. Slow hosts take
# 2.5 times as long.
TIMEOUT_S = 1_200


def pytest_configure() -> None:
    """Pin each worker to one core.

    Engines and torch start one busy-waiting thread per usable core. The threads of several workers
    would wait for each other. One core suffices for the tiny models of the tests.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_own = Path(__file__).parent in item.path.parents
        if is_own and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session", autouse=True)
def shared_exports() -> Iterator[SharedExports]:
    """Replace `export` in builds, so that all tests export equal models only once.

    Later runs use the graphs too, until the code changes. Tests of `export` itself call the
    original.
    """
    directory = KEPT_EXPORTS / digest_exporter()
    directory.mkdir(parents=True, exist_ok=True)
    shared = SharedExports(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("build_artifacts.encoders.candidates.export", shared)
        yield shared


@pytest.fixture(scope="session", autouse=True)
def _forked_model_builder() -> Iterator[None]:
    """Run onnxruntime-genai's model builder in forks that skip seconds of imports.

    Builds for the end-to-end tests start a new process instead, as builds of users do.
    """
    with forked_programs.fork_model_builder():
        yield
