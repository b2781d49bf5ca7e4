"""What every test may use: a store of tiny models, and a header that says what ran the tests."""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.support.artifacts import CLASSIFIER, EMBEDDER, seal_tiny

PACKAGES = ("onnxruntime", "onnxruntime-gpu", "ray", "torch", "transformers", "numpy")
# The instructions that decide which graph is fastest, and how int8 rounds.
CPU_FLAGS = {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "asimddp"}

# Imports of one test from which their modules are worth hiding from the garbage collector: torch
# alone imports many more.
MANY_MODULES = 50


def pytest_collection_finish() -> None:
    _spare_garbage_collector()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[object]:
    """Spare the collector large imports of a test too: each step of a build collects garbage."""
    modules = len(sys.modules)
    result = yield
    if len(sys.modules) >= modules + MANY_MODULES:
        _spare_garbage_collector()
    return result


def _spare_garbage_collector() -> None:
    """Exclude what the imports made: it never becomes garbage, but takes half a second to scan."""
    gc.collect()
    gc.freeze()


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
    """A store with EMBEDDER and CLASSIFIER, shared: a test that damages artifacts seals its own."""
    store = tmp_path_factory.mktemp("store")
    seal_tiny(store, EMBEDDER)
    seal_tiny(store, CLASSIFIER, labels=("NEGATIVE", "NEUTRAL", "POSITIVE"))
    return store


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """A directory that every user can enter, unlike those of pytest."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    yield directory
    directory.chmod(0o755)
    shutil.rmtree(directory)
