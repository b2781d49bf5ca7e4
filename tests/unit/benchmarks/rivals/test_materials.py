"""Files that rivals serve, prepared on first use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common.local_model import LocalModel
from benchmarks.rivals.materials import Materials
from deployments.errors import ServeError
from tests.support.artifacts import EMBEDDER


def test_a_material_that_failed_fails_again_with_the_same_error(
    tiny_store: Path, tmp_path: Path
) -> None:
    model = LocalModel.open(tiny_store, EMBEDDER)
    source = model.manifest.source.model_copy(update={"ref": "not a source"})
    model = replace(model, manifest=model.manifest.model_copy(update={"source": source}))
    materials = Materials(model, None, tmp_path, tmp_path)
    for _ in range(2):
        with pytest.raises(ServeError, match="`not a source` is not a directory"):
            materials.checkpoint  # noqa: B018
