"""Fixtures and pytest hooks for all tests: tiny models, garbage collection, skips, the header."""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.support.artifacts import CLASSIFIER, EMBEDDER, seal_tiny
from tests.support.skips import fail_unpermitted_skip

PACKAGES = ("onnxruntime", "onnxruntime-gpu", "ray", "torch", "transformers", "numpy")
# CPU instruction sets that decide which graph is fastest and how int8 rounds.
CPU_FLAGS = {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "asimddp"}

# If one test imports at least this many modules, the modules are excluded from garbage collection.
# torch alone imports many more.
MANY_MODULES = 50


def pytest_collection_finish() -> None:
    _spare_garbage_collector()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Exclude long-lived objects from garbage collection, because each build step collects garbage.

    These are large imports, and what a file of tests has left, such as caches of torch. Late in a
    run, collections took a third of the time.
    """
    modules = len(sys.modules)
    result = yield
    is_last = nextitem is not None and nextitem.path != item.path
    if is_last or len(sys.modules) >= modules + MANY_MODULES:
        _spare_garbage_collector()
    return result


def _spare_garbage_collector() -> None:
    """Collect garbage, then exclude the remaining objects from later collections.

    Most of these objects come from imports and are never freed. Each scan of them takes 0.5 s.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return fail_unpermitted_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return fail_unpermitted_skip((yield))


def pytest_report_header() -> list[str]:
    versions = ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name)))
    return [f"engines: {versions}", f"cpu flags: {' '.join(_cpu_flags()) or 'unknown'}"]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_flags() -> list[str]:
    try:
        words = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return []
    return sorted(CPU_FLAGS & set(words))


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a store with EMBEDDER and CLASSIFIER, shared by all tests.

    Tests that damage artifacts make their own store.
    """
    store = tmp_path_factory.mktemp("store")
    seal_tiny(store, EMBEDDER)
    seal_tiny(store, CLASSIFIER, labels=("NEGATIVE", "NEUTRAL", "POSITIVE"))
    return store


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """Create a temporary directory that every user can enter, unlike `tmp_path`."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory
    directory.chmod(0o755)
    shutil.rmtree(directory)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Collect garbage once, and then not until the test has ended."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
