"""Two tiny models built once by the whole pipeline, and what refusals are asserted with."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from build_artifacts.pipeline import BuildRequest, BuildResult, build
from build_artifacts.progress import Progress
from tests.build_artifacts.adapters import tiny_adapter
from tests.builders import tiny_checkpoint


@pytest.fixture
def progress() -> Progress:
    return Progress(io.StringIO())


@pytest.fixture(scope="session")
def embedding_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("source") / "embedder")


@pytest.fixture(scope="session")
def adapter_source(tmp_path_factory: pytest.TempPathFactory, embedding_source: Path) -> Path:
    directory = tmp_path_factory.mktemp("adapters") / "mood"
    return tiny_adapter(directory, embedding_source, labels=("SAD", "GLAD", "MAD"))


@pytest.fixture(scope="session")
def embedding_build(
    tmp_path_factory: pytest.TempPathFactory, embedding_source: Path
) -> BuildResult:
    request = BuildRequest(ref=str(embedding_source), store=tmp_path_factory.mktemp("store"))
    return build(request, Progress(io.StringIO()))


@pytest.fixture(scope="session")
def adapter_build(
    tmp_path_factory: pytest.TempPathFactory, embedding_source: Path, adapter_source: Path
) -> BuildResult:
    request = BuildRequest(
        ref=str(embedding_source),
        store=tmp_path_factory.mktemp("store"),
        id="tiny/mood",
        adapter=adapter_source,
    )
    return build(request, Progress(io.StringIO()))
