"""The original: a checkpoint in torch, behind the engines' own contract."""

from __future__ import annotations

import numpy as np

from build_artifacts.checkpoints.facts import ModelFacts
from build_artifacts.checkpoints.models import TorchModel
from build_artifacts.checkpoints.rows import input_names, row_model
from deployments.engines.base import EngineInfo
from deployments.engines.heads import feeds_of, split
from deployments.messages import Batch, Outputs


class Original:
    """An Engine over an eager torch model, which stays as it was; for builds and reports only."""

    def __init__(self, model: TorchModel, facts: ModelFacts) -> None:
        self.info = EngineInfo(compute_type="cpu-fp32")
        self._facts = facts
        self._rows = row_model(model, facts.head, facts.pooling)
        self._names = input_names(model, facts.head)

    def run(self, batch: Batch) -> Outputs:
        """One forward pass, on as many threads as torch is set to."""
        import torch

        feeds = feeds_of(batch, self._names, self._facts.mask_token)
        inputs = {name: torch.from_numpy(array) for name, array in feeds.arrays.items()}
        with torch.inference_mode():
            raw = np.asarray(self._rows(**inputs).numpy(), dtype=np.float32)
        return Outputs(split(self._facts.head, raw, batch, feeds.mask_counts))

    def close(self) -> None:
        """Nothing to give back that the caller does not hold."""
