"""Session fixtures: tiny models built by the whole pipeline, and one prepared build."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from build_artifacts.pipeline import BuildRequest, BuildResult, build
from build_artifacts.presets import CPU_INT8, CPU_INT8_WEIGHTS, GPU_FP16
from build_artifacts.progress import BuildProgress
from build_artifacts.recipes import BuildRecipe
from tests.support.adapters import tiny_adapter
from tests.support.prepared_build import LITTLE, PreparedBuild, plant_outlier
from tests.support.tiny_encoders import tiny_checkpoint

LABELS = ("SAD", "GLAD", "MAD")
BOTH_DEVICES = BuildRecipe(candidates=(CPU_INT8, CPU_INT8_WEIGHTS, GPU_FP16))


@pytest.fixture
def progress() -> BuildProgress:
    return BuildProgress(io.StringIO())


@pytest.fixture(scope="session")
def embedding_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("source") / "embedder", layers=1)


@pytest.fixture(scope="session")
def adapter_source(tmp_path_factory: pytest.TempPathFactory, embedding_source: Path) -> Path:
    directory = tmp_path_factory.mktemp("adapters") / "mood"
    return tiny_adapter(directory, embedding_source, labels=LABELS)


@pytest.fixture(scope="session")
def embedding_build(
    tmp_path_factory: pytest.TempPathFactory, embedding_source: Path
) -> BuildResult:
    """A build that tests share. Tests that modify it copy its store first, or undo the change."""
    request = BuildRequest(
        ref=str(embedding_source),
        store=tmp_path_factory.mktemp("store"),
        recipe=BOTH_DEVICES,
        budget=LITTLE,
    )
    return build(request, BuildProgress(io.StringIO()))


@pytest.fixture(scope="session")
def sentiment_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labeled data for models with the labels LABELS."""
    path = tmp_path_factory.mktemp("data") / "sentiment.tsv"
    texts = ("a lovely film", "the awful night", "bad food", "the river is great", "it was good")
    lines = [f"{text}\t{LABELS[i % 3]}" for i, text in enumerate(texts)]
    path.write_text("\n".join(["text\tlabel", *lines]), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def prepared_build(tmp_path_factory: pytest.TempPathFactory) -> PreparedBuild:
    """An embedding model of two layers.

    Its planted outlier makes int8 inaccurate in the second feed-forward MatMul of the second layer.
    """
    root = tmp_path_factory.mktemp("prepared_build")
    source = plant_outlier(tiny_checkpoint(root / "model"), layer=1)
    return PreparedBuild.of(source, root / "work")
