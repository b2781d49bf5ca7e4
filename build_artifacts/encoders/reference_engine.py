"""The eager torch model as an engine: the reference of candidates, reports and benchmarks."""

from __future__ import annotations

import numpy as np

from build_artifacts.checkpoints.export_wrapper import input_names, wrap_for_export
from build_artifacts.checkpoints.metadata import CheckpointMetadata
from build_artifacts.checkpoints.models import TorchModel
from deployments.engines.base import EngineInfo
from deployments.engines.forward_pass import Batch, Outputs
from deployments.engines.graph_io import build_feeds, split


class TorchReferenceEngine:
    """An EncoderEngine over the eager torch model, for builds and reports."""

    def __init__(
        self, model: TorchModel, metadata: CheckpointMetadata, threads: int | None = None
    ) -> None:
        self.info = EngineInfo(compute_type="cpu-fp32")
        self._metadata = metadata
        self._model = wrap_for_export(model, metadata)
        self._names = input_names(model, metadata)
        self._threads = threads  # None: the setting of torch

    def run(self, batch: Batch) -> Outputs:
        import torch

        if self._threads is not None:  # other engines in this process may have changed the setting
            torch.set_num_threads(self._threads)
        feeds = build_feeds(batch, self._names, self._metadata.mask_token)
        inputs = {name: torch.from_numpy(array) for name, array in feeds.arrays.items()}
        with torch.inference_mode():
            raw = np.asarray(self._model(**inputs).numpy(), dtype=np.float32)
        return Outputs(split(self._metadata.head, raw, batch, feeds.mask_counts))

    def close(self) -> None:
        """Do nothing: the caller owns the model."""
