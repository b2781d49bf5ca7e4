from __future__ import annotations

from pathlib import Path

import pytest

from build_artifacts.checkpoints.adapter import read_adapter
from build_artifacts.demo import DEMO_MODELS
from build_artifacts.errors import SourceNotFound, UnsafeSource
from build_artifacts.pruning.prune import Pruning, describe_pruning
from build_artifacts.report.rebuild import find_adapter, find_pruning
from deployments.artifacts.manifest import ModelSource, PruningSource

SENTIMENT, QUESTIONS = (model.adapter for model in DEMO_MODELS if model.adapter)


def source_with(adapter: str, revision: str) -> ModelSource:
    return ModelSource(ref="anything", revision="1", adapter=adapter, adapter_revision=revision)


@pytest.mark.parametrize("directory", [SENTIMENT, QUESTIONS])
def test_demo_adapters_are_found_by_name(directory: Path) -> None:
    known = read_adapter(directory)
    assert find_adapter(source_with(known.name, known.revision), None) == known


def test_adapter_of_other_revision_is_rejected() -> None:
    with pytest.raises(UnsafeSource, match="has changed since the build"):
        find_adapter(source_with(SENTIMENT.name, "f" * 64), None)


def test_unknown_adapter_requires_a_directory() -> None:
    known = read_adapter(SENTIMENT)
    with pytest.raises(SourceNotFound) as caught:
        find_adapter(source_with("mine", known.revision), None)
    assert caught.value.hint == "pass `--adapter DIR`"
    assert find_adapter(source_with("mine", known.revision), SENTIMENT) == known


@pytest.mark.parametrize("data", [None, *(model.evaluation for model in DEMO_MODELS)])
def test_data_of_demo_models_are_found_by_digest(data: Path | None) -> None:
    pruning = Pruning(fraction=0.2, data=data)
    assert find_pruning(describe_pruning(pruning), None) == pruning


def test_unknown_data_of_a_pruning_require_a_file(tmp_path: Path) -> None:
    data = tmp_path / "mine.tsv"
    data.write_text("1\tfine\n")
    pruning = Pruning(fraction=0.2, data=data)
    source = describe_pruning(pruning)
    assert find_pruning(source, data) == pruning
    for other in (None, DEMO_MODELS[1].evaluation):
        with pytest.raises(SourceNotFound) as caught:
            find_pruning(source, other)
        assert "--prune-data FILE" in caught.value.hint
    with pytest.raises(SourceNotFound):
        find_pruning(PruningSource(fraction=0.2), data)
