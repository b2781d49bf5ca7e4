"""The model as PyTorch runs it without any of our work: eager, fp32, on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.errors import BenchmarkError
from deployments.engines.heads import feeds_of
from deployments.manifest import ArtifactManifest
from deployments.messages import Batch


class TorchEager:
    """The model an artifact was built from, answering the same rows."""

    def __init__(
        self, source: str | None, manifest: ArtifactManifest, scratch: Path, threads: int
    ) -> None:
        """Load `source` (as `build_artifacts build` takes it; None: the manifest's own).

        What must be unpacked goes under `scratch`. Raises BenchmarkError or a BuildError.
        """
        import torch

        from build_artifacts.models import load_model
        from build_artifacts.rows import input_names, row_model
        from build_artifacts.sources.hub import HuggingFaceHub
        from build_artifacts.steps.resolve import resolve

        checkpoint = resolve(source or own_source(manifest), scratch, HuggingFaceHub())
        model = load_model(checkpoint.weights, head=manifest.head, dtype="float32")
        torch.set_num_threads(threads)
        self._torch = torch
        self._model = row_model(model, manifest.head, manifest.pooling)
        self._inputs = input_names(model, manifest.head)
        self._mask_token = manifest.mask_token

    def rows(self, batch: Batch) -> NDArray[np.float32]:
        """One forward pass, [B, W]; embeddings pooled, as the graph pools them."""
        torch = self._torch
        feeds = feeds_of(batch, self._inputs, self._mask_token)
        inputs = {name: torch.from_numpy(array) for name, array in feeds.arrays.items()}
        with torch.inference_mode():
            rows: NDArray[np.float32] = self._model(**inputs).numpy()
        return rows


def own_source(manifest: ArtifactManifest) -> str:
    """Where the artifact's weights came from. Raises BenchmarkError for a merged adapter."""
    if manifest.source.adapter is not None:
        raise BenchmarkError(
            f"`{manifest.id}` was merged with an adapter, so its source is another model",
            hint="name a directory with the merged model: --torch DIR",
        )
    return manifest.source.ref
