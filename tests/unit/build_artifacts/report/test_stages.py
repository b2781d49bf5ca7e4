from __future__ import annotations

from pathlib import Path

import pytest

from build_artifacts.checkpoints.adapter import read_adapter
from build_artifacts.demo import DEMO_MODELS
from build_artifacts.errors import SourceNotFound, UnsafeSource
from build_artifacts.report.stages import find_adapter
from deployments.artifacts.manifest import ModelSource

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
